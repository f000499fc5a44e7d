"""Samples text from a model, on one device, with a cache of keys and values.

    python recipes/generate.py RUN [--generate.prompt="…"] [--generate.prompts_file=FILE] [--generate.output=FILE.jsonl]

RUN is a run folder, its config.toml or a step folder in it, or a model of Hugging Face: a folder or ORG/NAME. Of a run
the newest checkpoint that verifies is used, unless another is named. generate.prompts_file has a prompt in each line,
in the place of generate.prompt. With generate.chat, which recipes/finetune.py sets, each prompt is a user's message;
without one the lines of the standard input are the user's messages of one conversation; without generate.history each
begins one.
"""

import sys

from torchllm.recipe import Config
from torchllm.tools.front.preflight import inspect_generation
from torchllm.tools.front.resolve import load_model

if __name__ == "__main__":
    CONFIG = load_model(sys.argv[1:], inspect=inspect_generation)

import json
from collections.abc import Iterable
from contextlib import suppress

from torchllm.recipe import report_errors
from torchllm.runtime.signs_of_life import signs_of_life
from torchllm.runtime.terminal import drop_unwritten_output
from torchllm.tools.front.prompts import read_prompts
from torchllm.tools.generate.chat import answer_all, answer_lines
from torchllm.tools.generate.language_model import language_model


def main(config: Config) -> str:
    """Print and return the prompts with their continuations; in a chat, the answers."""
    report_errors()
    settings = config.generate
    prompts = [prompt for prompt in read_prompts(settings) for _ in range(settings.samples)]
    with signs_of_life("generate"):
        model = language_model(config)
    what = "a chat" if settings.chat else f"up to {settings.tokens} tokens"
    print_text(f"--- {model.origin}, {what} at temperature {settings.temperature:g} ---")
    if settings.chat and not prompts:
        return "\n".join(map(print_text, answer_lines(model, sys.stdin)))
    prompts = prompts or [""] * settings.samples
    with signs_of_life("generate"):
        texts = answer_all(model, prompts) if settings.chat else model.generate(prompts)
    if settings.output:
        answers = texts if settings.chat else map(str.removeprefix, texts, prompts)
        write_answers(settings.output, zip(prompts, answers, strict=True))
    else:
        for prompt, text in zip(prompts, texts, strict=True):
            print_text(f"> {prompt}\n{text}" if settings.chat else text)
    return "\n".join(texts)


def write_answers(file: str, answers: Iterable[tuple[str, str]]) -> None:
    """Write a new file with a line of JSON for each prompt and its answer."""
    with open(file, "x", encoding="utf-8") as output:
        for prompt, answer in answers:
            output.write(json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) + "\n")
    print_text(f"the answers are in {file}")


def print_text(text: str) -> str:
    """Print and return a model's text, with replacements for characters that the terminal cannot show."""
    encoding = sys.stdout.encoding or "utf-8"  # a terminal may be unable to show all characters
    with suppress(OSError):  # a closed pipe is not a failure of the training before the sample
        print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
    drop_unwritten_output()
    return text


if __name__ == "__main__":
    main(CONFIG)
