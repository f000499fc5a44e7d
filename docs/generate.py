"""Run the commands that README.md and the pages of docs/ quote, and put their output below them again.

    python docs/generate.py [FILE.md ...]        all pages if none is named

A block ```text whose first line is "$ COMMAND" shows that command's output; a backslash continues
the command on the next line, and lines of the output that are wider than the site's are wrapped.
Blocks below a line "<!-- measured: ... -->" have timings of one machine and are left alone.
tests/test_docs.py runs the other commands and compares.
"""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?P<measured><!-- measured: .*? -->\n+)?```text\n\$ (?P<command>(?:.*\\\n)*.*)\n(?P<output>(?:.*\n)*?)```\n"
)

SIGN_OF_LIFE = re.compile(r"^.*: \d+ s so far.*\n", re.M)
"""a line that a slow machine prints (`torchllm/runtime/signs_of_life.py`)"""


WIDTH = 88
"""characters of a line of code that the site shows"""


class Quote(NamedTuple):
    """A command and its output, as quoted by a page."""

    command: str
    output: str
    measured: bool


def quotes(text: str) -> Iterator[Quote]:
    """Find the quoted commands of a page."""
    for block in BLOCK.finditer(text):
        command = re.sub(r"\\\n\s*", "", block["command"])
        yield Quote(command, block["output"], bool(block["measured"]))


@cache
def run(command: str) -> str:
    """Return the output of a command, standard error included, in an environment without GPUs and schedulers.

    "COMMAND 2>&1 | FILTER" is run in two halves, so that pages that filter the output of one slow command share it.
    """
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(WIDTH),
    }
    command, piped, following = command.partition(" 2>&1 | ")
    words = ["bash", "-c", following if piped else command]
    text = run(command) if piped else None
    done = subprocess.run(
        words, cwd=ROOT, env=environment, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return SIGN_OF_LIFE.sub("", done.stdout)


def shown(command: str) -> str:
    """Return the output of a command as a page has it."""
    return wrapped(run(command))


def wrapped(text: str) -> str:
    """Return a text in lines of `WIDTH` characters."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        options = {"break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, **options) if len(line) > WIDTH else [line]
    return "".join(f"{line}\n" for line in lines)


def update(page: Path) -> None:
    """Replace the outputs in a page that are not measured."""

    def replace(block: re.Match[str]) -> str:
        if block["measured"]:
            return block[0]
        (quote,) = quotes(block[0])
        return f"```text\n$ {block['command']}\n{shown(quote.command)}```\n"

    page.write_text(BLOCK.sub(replace, page.read_text()))


if __name__ == "__main__":
    for page in [Path(name) for name in sys.argv[1:]] or PAGES:
        update(page)
