"""The chat template of a tokenizer: a Jinja program that turns messages into one text.

Templates come with downloaded tokenizers, so they run in Jinja's sandbox, with the settings and names that the library
transformers gives them (`apply_chat_template`): the same messages become the same text. Nothing is computed when a
template is compiled, and it may print only text: an object or a number of a message that it prints as
Python writes it refuses the conversation.
"""

import json
from collections.abc import Mapping
from datetime import date, datetime, time
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchllm.config.errors import DataError
from torchllm.config.files import read_regular
from torchllm.tools.prepare.chat.marks import GENERATED_BEGIN, GENERATED_END
from torchllm.tools.prepare.chat.tokenizer_config import SPECIAL_NAMES, TOKENIZER_CONFIG, read_tokenizer_config

TEMPLATE_FILE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"
"""folder of transformers next to chat_template.jinja, with a file for each other template"""
WITH_TOOLS = "tool_use"
"""transformers' name of the template for conversations with tools"""
_SHOWN = 60
"""characters of a value that an error shows"""

CALLS = ("tool_calls", "function_call")
"""keys of a message whose objects hold the arguments of functions"""

Message = dict[str, Any]
"""of a conversation: its role, its content, and other keys that a template may use"""


class Conversation(NamedTuple):
    """A record of the data."""

    messages: list[Message]
    tools: list[Any] | None = None


ANSWER = "314159265"
QUESTION_AND_ANSWER: list[Message] = [
    {"role": "user", "content": "271828182"},
    {"role": "assistant", "content": ANSWER},
]
"""a conversation to try a template with, of words that no template writes"""


class RefusedConversation(ValueError):
    """A conversation has another form than it should, or cannot be trained on with this chat template."""

    def __init__(self, fault: str, detail: str = "") -> None:
        """`fault`: in the same words for all such conversations. `detail`: the rest of the text: place, and advice."""
        super().__init__(fault + detail)
        self.fault = fault
        self.detail = detail


class _GenerationTag(Extension):
    """Puts marks around the text between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an attribute of the instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{GENERATED_BEGIN}{caller()}{GENERATED_END}"


def _raise_exception(message: str) -> NoReturn:
    """Refuse a conversation; templates call it."""
    raise TemplateError(message)


def _refuse_to_print(value: Any) -> NoReturn:
    text = json.dumps(value, default=repr)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    raise TemplateError(
        f"it prints {shown} as Python writes it: make it text in the data, or use tojson in the template"
    )


class _Object(dict[str, Any]):
    """An object of a conversation. A template may read it, or write it as JSON, but not print it."""

    __repr__ = _refuse_to_print


class _List(list[Any]):
    """A list, likewise."""

    __repr__ = _refuse_to_print


class _Whole(int):
    """A whole number, likewise."""

    __repr__ = _refuse_to_print


class _Decimal(float):
    """A number with a fraction, likewise."""

    __repr__ = _refuse_to_print


def _unprintable(value: Any, has_printable_numbers: bool = False) -> Any:
    """Return a value of JSON whose objects and lists cannot be printed, and whose numbers neither.

    Numbers in the arguments of functions may be printed: some templates write them so (Qwen3-Coder), as JSON would.
    """
    if isinstance(value, dict):
        items = {key: _unprintable(item, has_printable_numbers or key in CALLS) for key, item in value.items()}
        return _Object(items)
    if isinstance(value, list):
        return _List(_unprintable(item, has_printable_numbers) for item in value)
    if type(value) is int and not has_printable_numbers:
        return _Whole(value)
    if type(value) is float and not has_printable_numbers:
        return _Decimal(value)
    return value


@pass_context
def _check_printed(context: Context, value: Any) -> Any:
    """Return a value that a template prints; a value that is not a text or a number raises TemplateError.

    A function with a context is never called by the compiler, so no constant is computed before the template runs.
    """
    if value is None or isinstance(value, (bool, dict, list, tuple, set)):
        _refuse_to_print(value)
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; Jinja's own filter would write characters of HTML as escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template, and the day that it takes for today."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], today: date) -> None:
        """Compile `source`. Raises DataError if it is not a template.

        special_tokens: names of variables and their texts, such as {"bos_token": "<s>"}. today: some templates write
        the current date (Llama 3.2), which must not change the content of a corpus.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            optimized=False,
            finalize=_check_printed,
        )
        self.source = source
        noon = datetime.combine(today, time(12))
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = noon.strftime
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(
                f"the chat template has an error in line {getattr(error, 'lineno', '?')}: {error}"
            ) from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # of the parser, and of Python's compiler
            raise DataError("the chat template cannot be compiled: it is nested too deeply") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation, with marks. Raises RefusedConversation.

        add_generation_prompt: end with the prompt of the model's answer.
        """
        return self._render(_with_parts(messages) if self.reads_parts else messages, tools, add_generation_prompt)

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template shows the content of a message only if it is a list of parts (Idefics, SmolVLM).

        Raises DataError if it shows the words of an answer in neither form.
        """
        if self._shows_answer(QUESTION_AND_ANSWER):
            return False
        if self._shows_answer(_with_parts(QUESTION_AND_ANSWER)):
            return True
        raise DataError(
            "the chat template does not write the content of the assistant's messages: nothing could be trained. Name "
            "another one, finetune.chat_template = FILE"
        )

    def _shows_answer(self, messages: list[Message]) -> bool:
        """Return whether the answer is in the text; also True if the template refuses this conversation."""
        try:
            return ANSWER in self._render(messages, None, False)
        except RefusedConversation:
            return True

    def _render(self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        known = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=_unprintable(known),
                tools=_unprintable(tools, has_printable_numbers=True),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # whatever the program of somebody does
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise RefusedConversation("the chat template refuses it", f" ({reason})") from error


def _with_parts(messages: list[Message]) -> list[Message]:
    """Return messages whose text is the only part of a list."""
    changed = []
    for message in messages:
        content = message.get("content")
        is_text = isinstance(content, str)
        changed.append(message | {"content": [{"type": "text", "text": content}]} if is_text else message)
    return changed


def special_names(source: str) -> set[str]:
    """Return which special tokens a template reads, by their key: {"eos_token"}."""
    environment = ImmutableSandboxedEnvironment(extensions=[_GenerationTag, loopcontrols])
    return meta.find_undeclared_variables(environment.parse(source)) & set(SPECIAL_NAMES)


def read_template(tokenizer: Path, file: str) -> str:
    """Return the source of the chat template to use with a tokenizer.json.

    file: finetune.chat_template; empty: `chat_template.jinja` in the tokenizer's folder, else the template in its
    tokenizer_config.json. Where there is one for conversations with tools, too, both are in the source.
    Raises DataError if there is none.
    """
    if file:
        return _read_template_file(Path(file))
    beside = tokenizer.with_name(TEMPLATE_FILE)
    if beside.is_file():
        named = {"default": _read_template_file(beside)}
        with_tools = tokenizer.with_name(OTHER_TEMPLATES) / f"{WITH_TOOLS}.jinja"
        if with_tools.is_file():
            named[WITH_TOOLS] = _read_template_file(with_tools)
    else:
        named = _templates_in_config(tokenizer)
    if WITH_TOOLS not in named:
        return named["default"]
    return chosen_by_tools(named[WITH_TOOLS], named["default"])


def _templates_in_config(tokenizer: Path) -> dict[str, str]:
    """Return the templates in the tokenizer_config.json of a tokenizer.json's folder; "default" is among them.

    Raises DataError if it is not.
    """
    template = read_tokenizer_config(tokenizer).get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if not isinstance(template, dict):
        raise DataError(
            f"the tokenizer {tokenizer} has no chat template ({TEMPLATE_FILE} or {TOKENIZER_CONFIG} in its folder): "
            "name one, finetune.chat_template = FILE"
        )
    named = {name: source for name, source in template.items() if isinstance(source, str)}
    if "default" not in named:
        raise DataError(
            f"{tokenizer.with_name(TOKENIZER_CONFIG)}: of the templates in chat_template none has the name "
            '"default": name a file with the one to use, finetune.chat_template = FILE'
        )
    return named


def _read_template_file(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"finetune.chat_template: {path} cannot be read ({error})") from error


def chosen_by_tools(with_tools: str, without: str) -> str:
    """Return a template that is one template for conversations with tools, and the other one for those without.

    Each gives the text that it gives alone: Jinja drops one line end at the end of a template; with the plus signs it
    drops nothing around the tags.
    """
    with_tools, without = with_tools.removesuffix("\n"), without.removesuffix("\n")
    return f"{{% if tools is defined and tools is not none +%}}{with_tools}{{%+ else +%}}{without}{{%+ endif %}}"
