"""Lists every text that a user of torchllm can see, as `file:line text`: errors, log lines, help, tables' headings.

A text is any string of two words or more that is no docstring (an f-string's values read `{}`), the help under a field
of the config, the docstring of a recipe (its `--help`), and what `run_train.sh` echoes. It may list a few strings that
nobody sees; it misses none that is written in one piece.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SHELL_TEXT = re.compile(r'\b(?:echo|fail) "([^"]+)"')


class Text(NamedTuple):
    """One text and where it is written."""

    place: str
    """file:line, relative to the repository"""
    text: str


def python_texts(file: Path, name: str) -> Iterator[Text]:
    """Yield the texts of a Python file; `name` is how its place is printed."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = set(_docstrings(tree))
    pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = _template(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            if id(node) in docstrings:
                continue
            text = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 2 and " " in text.strip():
            yield Text(f"{name}:{node.lineno}", " ".join(text.split()))
    if name.startswith("recipes/"):
        description = ast.get_docstring(tree)
        if description:
            yield Text(f"{name}:1", " ".join(description.split()))


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """Yield the identity of every docstring; a string under a field of a settings class is help, and is not one."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for position, statement in enumerate(body):
            is_string = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_string:
                continue
            is_help = isinstance(node, ast.ClassDef) and position > 0 and _is_settings(node)
            if not is_help:
                yield id(statement.value)


def _is_settings(node: ast.ClassDef) -> bool:
    """Return whether a class is a section of a TOML file: a frozen dataclass."""
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _template(node: ast.JoinedStr) -> str:
    """Return an f-string with `{}` for each value."""
    return "".join(piece.value if isinstance(piece, ast.Constant) else "{}" for piece in node.values)


def shell_texts(file: Path, name: str) -> Iterator[Text]:
    """Yield what a shell script prints."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        for text in SHELL_TEXT.findall(line):
            yield Text(f"{name}:{number}", text)


def user_texts(root: Path) -> Iterator[Text]:
    """Yield the texts of a checkout, file by file."""
    for folder in ("torchllm", "recipes"):
        for file in sorted((root / folder).rglob("*.py")):
            yield from sorted(python_texts(file, str(file.relative_to(root))))
    yield from shell_texts(root / "run_train.sh", "run_train.sh")
