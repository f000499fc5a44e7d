"""Keys of a config: the types of fields and the notes on them (`Annotated`), and keys and values as TOML."""

import datetime
import json
import math
import re
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

N = TypeVar("N")
KeyPath = tuple[str, ...]
"""("data", "sources", "0", "path"): keys, and indices of arrays as decimal strings."""


class Bound(NamedTuple):
    """Limits of a number, checked when it is read."""

    at_least: float = -math.inf
    at_most: float = math.inf
    over: float = -math.inf
    """the number must be greater than this"""


def toml_value(value: bool | int | float | str | tuple[Any, ...] | list[Any]) -> str:
    """Return one value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's escapes are TOML's, except that TOML wants DEL escaped too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)


def dotted(path: KeyPath) -> str:
    """Return a key path on one line, as it is written in TOML."""
    return ".".join(part if re.fullmatch(r"[\w-]+", part) else toml_value(part) for part in path)


def shown(value: object) -> str:
    """Return a wrong value for a message, on one line and not too long."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, (datetime.date, datetime.time)):
        return f"the date or time {value}"
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print the longest ones
        return "a number of more than 64 bits"
    assert isinstance(value, (bool, int, float, str)), value
    text = toml_value(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


@cache
def field_types(schema: type) -> dict[str, Any]:
    """Return name to annotated type of a dataclass's fields."""
    hints = get_type_hints(schema, include_extras=True)
    return {field.name: hints[field.name] for field in fields(schema)}


def plain_type(annotated: Any) -> tuple[Any, Bound]:
    """Return a type without `Annotated`, and its limits."""
    if get_origin(annotated) is not Annotated:
        return annotated, Bound()
    return get_args(annotated)[0], next(iter(notes_on(annotated, Bound)), Bound())


def notes_on(annotated: Any, kind: type[N]) -> list[N]:
    """Return the notes of a kind on a type."""
    return [note for note in get_args(annotated) if isinstance(note, kind)]


def notes_on_key(section: type, name: str, kind: type[N]) -> list[N]:
    """Return the notes of a kind on a key of a section, then those on the section; a subclass keeps its base's."""
    own, shared = [], []
    for each in filter(is_dataclass, section.__mro__):
        own += notes_on(field_types(each).get(name), kind)
        shared += [note for note in vars(each).get("key_notes", ()) if isinstance(note, kind)]
    return own + shared
