"""Keys of a config: their paths, the types of their values, and the notes on these (`Annotated`)."""

import math
import re
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from torchllm.config.toml import toml_value

N = TypeVar("N")
KeyPath = tuple[str, ...]
"""("data", "sources", "0", "path"): keys, and indices of arrays as decimal strings."""


class Bound(NamedTuple):
    """Limits of a number, checked when it is read."""

    at_least: float = -math.inf
    at_most: float = math.inf
    over: float = -math.inf
    """the number must be greater than this"""


class Unsupported(NamedTuple):
    """A word that a user may expect among the choices of a key, and why it is not supported: annotates a type."""

    word: str
    reason: str


class IsPath(NamedTuple):
    """Annotates the type of a path: a leading ~ is the home folder, and a run's config.toml has the absolute path."""

    names: tuple[str, ...] = ()
    """values that are not paths"""
    or_name: bool = False
    """a value is a path if it exists; else it is the name of something else, such as a model of the hub"""
    ending: str = ""
    """suffix that paths have and names lack"""


class AppliedBy(NamedTuple):
    """The call that applies a key, or the keys of a section, in a recipe: see `applied_keys.py`."""

    call: str
    is_replaceable: bool = False
    """a fork may replace the part, e.g. the optimizer, and ignore its keys: they are reported but not refused"""


class Needs(NamedTuple):
    """The condition for a key, or for the keys of a section, to have an effect."""

    words: str
    """KEY over NUMBER, or KEY = VALUE or VALUE, several with "and", and more for people after ", or" or a colon; other
    words have a function in tools/config/idle.py"""
    unmet: Literal["error", "idle", "elsewhere"] = "error"
    """error: the key contradicts a choice; idle, a printed line: it waits for a layout, a source or a length;
    elsewhere, a printed line: other recipes read it"""


class OfKinds(NamedTuple):
    """The kinds of sources that use a key of [[data.sources]]."""

    kinds: tuple[str, ...]


def dotted(path: KeyPath) -> str:
    """Return a key path on one line, as it is written in TOML."""
    return ".".join(part if re.fullmatch(r"[\w-]+", part) else toml_value(part) for part in path)


@cache
def field_types(schema: type) -> dict[str, Any]:
    """Return name to annotated type of a dataclass's fields."""
    hints = get_type_hints(schema, include_extras=True)
    return {field.name: hints[field.name] for field in fields(schema)}


def plain_type(annotated: Any) -> tuple[Any, Bound]:
    """Return a type without `Annotated`, and its limits."""
    kind = get_args(annotated)[0] if get_origin(annotated) is Annotated else annotated
    return kind, next(iter(notes_on(annotated, Bound)), Bound())


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
