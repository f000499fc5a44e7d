"""The command line of a recipe: `[CONFIG.toml] [--section.key=value ...] [--check] [--json] [--help]`."""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin

from torchllm.config.read import field_types, plain_type, type_at
from torchllm.config.toml import KeyPath, Layer, dotted, parse_value, shown


class Words(NamedTuple):
    """The arguments by kind; `overrides` maps "section.key" to the text of its value, `valueless` have none."""

    file: str
    overrides: dict[str, str]
    valueless: list[str]
    check: bool
    help: bool


def split(arguments: Sequence[str], found: list[str]) -> Words:
    """The arguments by kind; appends a line to `found` for each that is none."""
    files: list[str] = []
    overrides: dict[str, str] = {}
    valueless: list[str] = []
    check = help = False
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            help = True
        elif word == "--check":
            check = True
        elif word == "--json":
            overrides["run.json"] = "true"
        elif key.startswith("--") and equals and key not in ("--check", "--json", "--help"):
            if overrides.setdefault(key[2:], value) != value:
                found.append(f"{key}: given twice: {shown(overrides[key[2:]])} and {shown(value)}")
        elif word.startswith("--") and "." in word and not equals:
            follows = rest.pop(0) if rest and not rest[0].startswith("-") and not rest[0].endswith(".toml") else "VALUE"
            found.append(f"{word}: needs a value: {word}={follows}")
            valueless.append(key[2:])
        elif word.startswith("-"):
            found.append(f"{word}: unknown flag; overrides are --section.key=value, flags --check, --json and --help")
        elif files:
            found.append(f"{word}: one config file only, and {files[0]} is given; overrides are --section.key=value")
        else:
            files.append(word)
    return Words(files[0] if files else "", overrides, valueless, check, help)


def override(layer: Layer, schema: type, path: KeyPath, text: str, found: list[str]) -> None:
    """Put one override into the tables; an unknown key or a wrong value is found when they are read.

    An index of an array is an existing one, or the length for a new element. Elements that only the defaults have
    become the file's.
    """
    place = f"--{'.'.join(path)}"
    kind, _ = plain_type(type_at(schema, path))
    if isinstance(kind, type) and is_dataclass(kind):
        found.append(f"{place}: is a table: give its keys one by one, such as {place}.{next(iter(field_types(kind)))}=")
        return
    here: Any = layer.table
    for depth, part in enumerate(path, start=1):
        index: Any = part
        if isinstance(here, list):
            if not re.fullmatch("[0-9]{1,9}", part) or int(part) > len(here):
                array = dotted(path[: depth - 1])
                found.append(f"{place}: {array} has {len(here)} elements: the index is 0 to {len(here)}")
                return
            index = int(part)
            if index == len(here):
                here.append({})
                layer.places[path[:depth]] = place
        elif not isinstance(here, dict):
            return  # the file has a value where a table belongs: reported when it is read
        elif depth < len(path) and part not in here:
            here[part] = _default(schema, path[:depth])
            layer.places[path[:depth]] = place
        if depth == len(path):
            layer.forget(path)
            here[index] = _parse(text, kind)
            layer.places[path] = place
        else:
            here = here[index]


def _default(schema: type, path: KeyPath) -> Any:
    """What an override reaches into where the file has nothing: the elements of an array's default, else a table."""
    if get_origin(plain_type(type_at(schema, path))[0]) is not tuple:
        return {}
    table, _ = plain_type(type_at(schema, path[:-1]))
    return _plain(getattr(table(), path[-1]))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)} if is_dataclass(value) else value


def _parse(text: str, kind: Any) -> Any:
    """An override's value: text where text is wanted (quotes are optional), else TOML; what is not TOML stays text."""
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if (kind is str or any(isinstance(choice, str) for choice in choices)) and text[:1] not in ("'", '"'):
        return text
    try:
        return parse_value(text)
    except ValueError:
        return text
