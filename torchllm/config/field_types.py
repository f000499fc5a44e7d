"""The types of a config's fields, and the notes on them (`Annotated`)."""

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from torchllm.config.schema import Bound

N = TypeVar("N")


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
