"""`--help`: every section and key with its docstring, type and default, read from the source of the dataclasses."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

from torchllm.config.read import describe, field_types, plain_type
from torchllm.config.toml import toml_value


@cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """Class name to field name to the string under the field, of all classes in a module."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                field.target.id: inspect.cleandoc(text.value.value)
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    return found


def field_docs(schema: type) -> dict[str, str]:
    """Field name to docstring of a dataclass, inherited fields included; a field without one is left out."""
    docs: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        if is_dataclass(kind):
            docs |= _docs_in(kind.__module__).get(kind.__name__, {})
    return docs


def help_text(schema: type) -> str:
    """All of the configuration, for people."""
    usage = f"usage: {sys.argv[0]} [CONFIG.toml] [--section.key=value ...] [--check] [--json] [--help]"
    return "\n".join([usage, *_section(schema(), "")])


def _section(table: Any, prefix: str) -> Iterator[str]:
    schema: type = type(table)
    docs, types = field_docs(schema), field_types(schema)
    nested = []
    for field in fields(table):
        annotated, value, name = types[field.name], getattr(table, field.name), prefix + field.name
        kind, _ = plain_type(annotated)
        item = get_args(kind)[0] if get_origin(kind) is tuple else kind
        if isinstance(item, type) and is_dataclass(item):
            nested.append((item, name, f"[{name}]" if item is kind else f"[[{name}]]", docs.get(field.name)))
            continue
        yield f"  {name} = {toml_value(value)}    ({describe(annotated)})"
        yield textwrap.fill(docs.get(field.name, ""), 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    for item, name, header, doc in nested:
        yield f"\n{header}  {doc or inspect.getdoc(item)}"
        yield from _section(item(), f"{name}{'.0.' if header.startswith('[[') else '.'}")
