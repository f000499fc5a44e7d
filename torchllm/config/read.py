"""Plain tables into frozen dataclasses, strictly: nothing is coerced, nothing dropped, and every problem is reported.

A field may be `bool`, `int`, `float`, `str`, a `Literal`, another dataclass, or `tuple[one of these, ...]`; numbers may
be `Annotated` with a `Bound`. Every field has a default. TypeError, for the programmer, on anything else.
"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from torchllm.config.schema import Bound
from torchllm.config.toml import KeyPath, dotted, shown, toml_value

_WRONG = object()
_UNBOUND = Bound()


class Fault(NamedTuple):
    """A wrong or unknown key: what is wrong with it, and the key that was probably meant."""

    path: KeyPath
    message: str
    meant: KeyPath


def read_table(schema: type, table: dict[str, Any], faults: list[Fault]) -> Any:
    """A `schema` from a plain table. Keys with faults (appended to `faults`) keep their defaults."""

    def read_section(kind: type, table: dict[str, Any], path: KeyPath) -> Any:
        types = field_types(kind)
        values = {}
        for key, value in table.items():
            if key not in types:
                meant = _nearest((*path, key), schema, isinstance(value, dict))
                hint = f"did you mean {dotted(meant)}?" if meant else "--help lists all keys"
                faults.append(Fault((*path, key), f"unknown {'key' if path else 'section or key'}; {hint}", meant))
            elif (result := read(types[key], value, (*path, key))) is not _WRONG:
                values[key] = result
        return kind(**values)

    def read(annotated: Any, value: Any, path: KeyPath) -> Any:
        kind, _ = plain_type(annotated)
        if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
            return read_section(kind, value, path)
        if get_origin(kind) is tuple and isinstance(value, list):
            items = [read(get_args(kind)[0], item, (*path, str(index))) for index, item in enumerate(value)]
            return _WRONG if _WRONG in items else tuple(items)
        if message := _wrong_scalar(annotated, value):
            faults.append(Fault(path, message, path))
            return _WRONG
        return float(value) if kind is float else value

    return read_section(schema, table, ())


def _wrong_scalar(annotated: Any, value: Any) -> str:
    """What is wrong with a value that is to be a scalar; empty: nothing."""
    kind, bound = plain_type(annotated)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and number and not abs(value) < math.inf:
        return f"must be a finite number, not {shown(value)}"
    if number and isinstance(value, int) and kind in (int, float) and not -(2**63) <= value < 2**63:
        return "must fit into 64 bits"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # a command line that is not UTF-8; it could not be written to config.toml
            return "must be UTF-8"
    if get_origin(kind) is Literal:
        right = any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    elif kind is float:
        right = number
    else:
        right = type(value) is kind
    if right and kind in (int, float):
        right = bound.at_least <= value <= bound.at_most and value > bound.over
    return "" if right else f"must be {describe(annotated)}, not {shown(value)}"


@cache
def field_types(schema: type) -> dict[str, Any]:
    """Name to annotated type of a dataclass's fields."""
    hints = get_type_hints(schema, include_extras=True)
    types = {field.name: hints[field.name] for field in fields(schema)}
    for field in fields(schema):
        if field.default is MISSING and field.default_factory is MISSING:
            raise TypeError(f"{schema.__name__}.{field.name} needs a default")
        describe(types[field.name])
    return types


def plain_type(annotated: Any) -> tuple[Any, Bound]:
    """A type without `Annotated`, and its limits."""
    if get_origin(annotated) is not Annotated:
        return annotated, _UNBOUND
    kind, *notes = get_args(annotated)
    return kind, next((note for note in notes if isinstance(note, Bound)), _UNBOUND)


def describe(annotated: Any) -> str:
    """What a value must be, in words; TypeError if no TOML value can be that."""
    kind, bound = plain_type(annotated)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(toml_value, get_args(kind)))}"
    if get_origin(kind) is tuple and get_args(kind)[1:] == (...,) and get_origin(get_args(kind)[0]) is not tuple:
        return f"an array, each {describe(get_args(kind)[0])}"
    if isinstance(kind, type) and is_dataclass(kind):
        field_types(kind)
        return "a table"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    if kind not in words:
        raise TypeError(f"a config field cannot be {annotated!r}: see torchllm/config/read.py")
    if bound.at_most < math.inf:
        return f"{words[kind]} from {bound.at_least} to {bound.at_most}"
    if bound.over > -math.inf:
        return f"{words[kind]} over {bound.over:g}"
    return words[kind] + (f" of at least {bound.at_least:g}" if bound.at_least > -math.inf else "")


def type_at(schema: type, path: KeyPath) -> Any:
    """Annotated type of the value at a path; None if there is no such key."""
    kind: Any = schema
    for part in path:
        kind, _ = plain_type(kind)
        if get_origin(kind) is tuple:
            kind = get_args(kind)[0] if part.isdigit() else None
        elif is_dataclass(kind) and isinstance(kind, type):
            kind = field_types(kind).get(part)
        else:
            return None
    return kind


def _leaves(schema: type, path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, annotated in field_types(schema).items():
        kind, _ = plain_type(annotated)
        inside = get_args(kind)[0] if get_origin(kind) is tuple else kind
        yield (*path, key)
        if is_dataclass(inside) and isinstance(inside, type):
            yield from _leaves(inside, (*path, key) if inside is kind else (*path, key, "0"))


def _nearest(path: KeyPath, schema: type, is_table: bool) -> KeyPath:
    """The valid key most like an unknown one: the same name elsewhere, else one of the same table, else any."""
    siblings = {name: (*path[:-1], name) for name in field_types(plain_type(type_at(schema, path[:-1]))[0])}
    everywhere = {} if is_table else {dotted(leaf): leaf for leaf in _leaves(schema) if len(leaf) > 1}
    same_name = {name: leaf for name, leaf in everywhere.items() if leaf[-1] == path[-1]}
    for names, wanted, cutoff in (
        (same_name, dotted(path), 0.0),
        (siblings, path[-1], 0.6),
        (everywhere, dotted(path), 0.8),
    ):
        if close := difflib.get_close_matches(wanted[:100], names, n=1, cutoff=cutoff):
            return names[close[0]]
    return ()
