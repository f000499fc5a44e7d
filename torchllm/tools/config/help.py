"""`--help`: every section and key with its docstring, type and default, read from the source of the dataclasses."""

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin

from torchllm.config.keys import field_types, plain_type
from torchllm.config.toml import toml_value
from torchllm.tools.config.read import describe

WIDTH = 88
"""of a line of the help: the site of the documentation shows as much"""


@cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """Return class name to field name to the string under the field, of all classes in a module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name: _docs_of_fields(node) for node in classes}


def _docs_of_fields(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return docs


def field_docs(schema: type) -> dict[str, str]:
    """Return field name to docstring of a dataclass, inherited fields included; a field without one is missing."""
    docs: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        if is_dataclass(kind):
            docs |= _docs_in(kind.__module__).get(kind.__name__, {})
    return docs


def help_text(schema: type) -> str:
    """Return the whole configuration, for people."""
    usage = f"usage: {sys.argv[0]} [CONFIG.toml] [--section.key=value ...] [--check] [--gpus=N] [--json] [--help]"
    return "\n".join([_wrapped(usage, 4), *_section_lines(schema(), "")])


def _wrapped(text: str, indent: int) -> str:
    """Return a text in lines of the help's width, all but the first with an indent."""
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


class _Subsection(NamedTuple):
    schema: type
    header: str
    prefix: str
    """prefix of its keys' names"""
    doc: str


def _section_lines(section: Any, prefix: str) -> Iterator[str]:
    """Yield the lines of a section's own keys, then of the sections inside it."""
    schema: type = type(section)
    docs = field_docs(schema)
    types = field_types(schema)
    subsections = []
    for field in fields(section):
        name = prefix + field.name
        doc = docs.get(field.name, "")
        kind, _ = plain_type(types[field.name])
        element = get_args(kind)[0] if get_origin(kind) is tuple else kind
        if isinstance(element, type) and is_dataclass(element):
            doc = doc or inspect.getdoc(element) or ""
            if element is kind:
                subsections.append(_Subsection(element, f"[{name}]", f"{name}.", doc))
            else:
                subsections.append(_Subsection(element, f"[[{name}]]", f"{name}.0.", doc))
            continue
        yield _wrapped(f"  {name} = {toml_value(getattr(section, field.name))}    ({describe(types[field.name])})", 4)
        yield _wrapped(" " * 6 + doc, 6)
    for subsection in subsections:
        yield "\n" + _wrapped(f"{subsection.header}  {subsection.doc}", 4)
        yield from _section_lines(subsection.schema(), subsection.prefix)


def print_help(schema: type, introduction: str = "") -> None:
    """Print the help text after an introduction; `| head` may close the pipe before its end."""
    try:
        print(introduction + help_text(schema), flush=True)
    except BrokenPipeError:
        # Python flushes stdout again at exit, which would print another error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
