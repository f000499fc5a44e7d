"""Make the paths of a config absolute, and compare them across working directories. The schema's types mark paths."""

import os
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, get_args

from torchllm.config.files import is_url
from torchllm.config.keys import IsPath, field_types, notes_on, plain_type
from torchllm.config.schema import Config, Source

C = TypeVar("C", bound=Config)


def absolute_paths(config: C) -> C:
    """Return a config with absolute paths."""
    absolute: C = _absolute(type(config), config)
    return absolute


def same_path(saved: str, current: str) -> bool:
    """Return whether two values of a key are the same path; a relative one may stem from another working directory."""
    if "" in (saved, current):
        return saved == current
    saved = os.path.expanduser(saved)
    if os.path.abspath(saved) == os.path.abspath(current):
        return True
    return not os.path.isabs(saved) and current.endswith(f"/{os.path.normpath(saved)}")


def _absolute(annotated: Any, value: Any) -> Any:
    if isinstance(value, Source) and value.kind == "hub":  # its path is an id
        return value
    if is_dataclass(value) and not isinstance(value, type):
        types = field_types(type(value))
        return replace(value, **{name: _absolute(types[name], getattr(value, name)) for name in types})
    if isinstance(value, tuple):
        item = get_args(plain_type(annotated)[0])[0]
        return tuple(_absolute(item, element) for element in value)
    return os.path.abspath(value) if any(_is_path(note, value) for note in notes_on(annotated, IsPath)) else value


def _is_path(note: IsPath, value: str) -> bool:
    is_name = value in note.names or not value.endswith(note.ending)
    return value != "" and not is_url(value) and not is_name and (os.path.exists(value) or not note.or_name)
