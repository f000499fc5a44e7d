"""The types of a config's fields, and the notes on them (`Annotated`)."""

from dataclasses import fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from torchllm.config.schema import Bound, IsPath

_UNBOUND = Bound()


@cache
def field_types(schema: type) -> dict[str, Any]:
    """Return name to annotated type of a dataclass's fields."""
    hints = get_type_hints(schema, include_extras=True)
    return {field.name: hints[field.name] for field in fields(schema)}


def plain_type(annotated: Any) -> tuple[Any, Bound]:
    """Return a type without `Annotated`, and its limits."""
    if get_origin(annotated) is not Annotated:
        return annotated, _UNBOUND
    kind, *notes = get_args(annotated)
    return kind, next((note for note in notes if isinstance(note, Bound)), _UNBOUND)


def path_note(annotated: Any) -> IsPath | None:
    """Return the note on the type of a path; None if a type is no path."""
    return next((note for note in get_args(annotated) if isinstance(note, IsPath)), None)
