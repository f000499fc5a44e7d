"""Samples text from a checkpoint, on one device, with a cache of keys and values.

    python recipes/generate.py RUN_FOLDER/config.toml [--generate.prompt="…"] [--checkpoint.resume=STEP_FOLDER]

The newest checkpoint of the run folder that verifies is used, unless another is named. generate.prompts_file has more
prompts, one per line. With generate.chat, which recipes/finetune.py sets, each prompt is a user's message; without one
the lines of the standard input are the user's messages of one conversation; without generate.history each begins one.
"""

import sys

from torchllm.recipe import Config, UserError, load_run

if __name__ == "__main__":
    CONFIG = load_run(sys.argv[1:], one_device=True)

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torchllm.recipe import report_errors
from torchllm.runtime.signs_of_life import signs_of_life
from torchllm.runtime.terminal import drop_unwritten_output
from torchllm.tools.generate.language_model import LanguageModel, language_model


def main(config: Config) -> str:
    """Print and return the prompts with their continuations; in a chat, the answers."""
    report_errors()
    prompts = read_prompts(config)
    with signs_of_life("generate"):
        model = language_model(config)
    assert model.manifest is not None  # of the run's checkpoint
    settings = config.generate
    what = "a chat" if settings.chat else f"up to {settings.tokens} tokens"
    print_text(f"--- step {model.manifest.step}, {what} at temperature {settings.temperature:g} ---")
    if not settings.chat:
        with signs_of_life("generate"):
            texts = model.generate(prompts or [""])
        for text in texts:
            print_text(text)
    elif prompts:
        texts = [answer for prompt in prompts for answer in chat(model, [prompt])]
    else:
        texts = chat(model, sys.stdin, history=settings.history)
    return "\n".join(texts)


def read_prompts(config: Config) -> list[str]:
    """Return the prompt of the config, if there is one, and those of its file."""
    prompts = [config.generate.prompt] if config.generate.prompt else []
    if config.generate.prompts_file:
        try:
            prompts += Path(config.generate.prompts_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"generate.prompts_file: {error}") from error
    return prompts


def chat(model: LanguageModel, prompts: Iterable[str], *, history: bool = True) -> list[str]:
    """Print and return the answers to the messages of a user. history: each with the conversation so far."""
    messages: list[dict[str, str]] = []
    answers = []
    for prompt in prompts:
        if not history:
            messages.clear()
        messages.append({"role": "user", "content": prompt.strip()})
        with signs_of_life("generate"):
            answers.append(model.chat(messages))
        messages.append({"role": "assistant", "content": answers[-1]})
        print_text(answers[-1])
    return answers


def print_text(text: str) -> None:
    """Print a model's text, with replacements for characters that the terminal cannot show."""
    encoding = sys.stdout.encoding or "utf-8"  # a terminal may be unable to show all characters
    with suppress(OSError):  # a closed pipe is not a failure of the training before the sample
        print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
    drop_unwritten_output()


if __name__ == "__main__":
    main(CONFIG)
