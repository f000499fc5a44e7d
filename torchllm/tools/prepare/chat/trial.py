"""Try a chat template in a process with limits, before it runs in this one.

Templates come with downloaded tokenizers, and Jinja has loops, products and filters that fill a text: one that never
ends, or fills the memory, must be an error and not the end of the machine.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from functools import lru_cache

from torchllm.data.error import DataError
from torchllm.tools.prepare.chat.template import QUESTION_AND_ANSWER, ChatTemplate, Message, RefusedConversation

SECONDS = 10
"""of a processor, at most"""
SECONDS_OF_A_BUSY_MACHINE = 120
MIB = 512
"""memory, at most"""

_START = "import sys; sys.path = sys.argv[1:]; from torchllm.tools.prepare.chat.trial import main; main()"
_SYSTEM: Message = {"role": "system", "content": "161803398"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


def try_template(source: str, special_tokens: Mapping[str, str], seconds: int = SECONDS) -> None:
    """Compile a template and render conversations with it, in another process.

    Raises DataError if it is not a template, or takes more than `seconds` or `MIB`.
    """
    _try_once(json.dumps([source, special_tokens, seconds]), seconds)


@lru_cache(maxsize=8)
def _try_once(case: str, seconds: int) -> None:
    """Do so; `case` is what `main` reads."""
    # -I: a file of the working folder with the name of a module of Python is not run
    command = [sys.executable, "-I", "-c", _START, *sys.path]
    too_long = f"the chat template takes over {seconds} s for a conversation of a few words"
    try:
        tried = subprocess.run(
            command, input=case, capture_output=True, text=True, timeout=SECONDS_OF_A_BUSY_MACHINE, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(too_long) from error
    if tried.returncode < 0:  # a signal, usually of the limit on the time
        raise DataError(too_long)
    if tried.returncode:
        last_line = tried.stderr.strip().rpartition("\n")[2]
        raise DataError(f"the chat template could not be tried: {last_line}")
    if tried.stdout:
        raise DataError(tried.stdout)


def main() -> None:
    """Try the template on standard input; print its fault."""
    source, special_tokens, seconds = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if sys.platform == "linux":  # macOS does not count mapped memory
        resource.setrlimit(resource.RLIMIT_AS, (MIB << 20, MIB << 20))
    try:
        _render_all(ChatTemplate(source, special_tokens, date.today()))
    except DataError as error:
        print(error, end="")
    except MemoryError:
        print(f"the chat template takes over {MIB} MiB for a conversation of a few words", end="")


def _render_all(template: ChatTemplate) -> None:
    """Render conversations with and without a system message, tools and a prompt. Raises MemoryError."""
    talk = QUESTION_AND_ANSWER
    for messages, tools, add_generation_prompt in (
        (talk, None, False),
        (talk[:1], None, True),
        ([_SYSTEM, *talk, *talk], [_TOOL], False),
    ):
        try:
            template.render(messages, tools, add_generation_prompt)
        except RefusedConversation as refusal:  # not every template takes every conversation
            if isinstance(refusal.__cause__, MemoryError):
                raise refusal.__cause__ from None
