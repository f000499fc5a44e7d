"""Suggestions for a key that the schema lacks."""

import difflib
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin

from torchllm.config.keys import KeyPath, dotted, field_types, plain_type
from torchllm.tools.config.foreign import foreign_hint


def hint_of(schema: type, section: type, path: KeyPath, value: Any) -> str:
    """Return the key of another program that it is, or the nearest of this schema; "" if nothing is like it.

    section: the type of the table that has the key, which is at `path`.
    """
    hint = foreign_hint(dotted(path), value)
    if not hint:
        nearest = _nearest(schema, section, path, is_table=isinstance(value, dict))
        hint = f"did you mean {dotted(nearest)}?" if nearest else foreign_hint(path[-1], value)
    return hint or foreign_hint(path[-1], value, cutoff=0.8)


def _key_paths(schema: type, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Return the paths of all keys, with index 0 for an element of an array."""
    for key, annotated in field_types(schema).items():
        key_path = (*path, key)
        yield key_path
        kind, _ = plain_type(annotated)
        if get_origin(kind) is tuple:
            kind = get_args(kind)[0]
            key_path = (*key_path, "0")
        if is_dataclass(kind) and isinstance(kind, type):
            yield from _key_paths(kind, key_path)


def _nearest(schema: type, section: type, path: KeyPath, is_table: bool) -> KeyPath:
    """Return the valid key most like an unknown one; () if none is like it.

    First choice is a key of the same name elsewhere, then one of the same section, then any.
    """
    siblings = {name: (*path[:-1], name) for name in field_types(section)}
    everywhere: dict[str, KeyPath] = {}
    same_name: dict[str, KeyPath] = {}
    if not is_table:
        for key_path in _key_paths(schema):
            if len(key_path) > 1:
                everywhere[dotted(key_path)] = key_path
            if len(key_path) > 1 and key_path[-1] == path[-1]:
                same_name[dotted(key_path)] = key_path
    return (
        _closest(dotted(path), same_name, cutoff=0.0)
        or _closest(path[-1], siblings, cutoff=0.6)
        or _closest(dotted(path), everywhere, cutoff=0.8)
    )


def _closest(name: str, candidates: dict[str, KeyPath], cutoff: float) -> KeyPath:
    """Return the path of the candidate whose name is most like `name`; () if none is at least `cutoff` like it."""
    close = difflib.get_close_matches(name[:100], candidates, n=1, cutoff=cutoff)
    return candidates[close[0]] if close else ()
