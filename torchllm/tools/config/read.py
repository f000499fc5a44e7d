"""Turn plain tables into frozen dataclasses, strictly: no value coerced, no key dropped, every problem reported.

A field may be `bool`, `int`, `float`, `str`, a `Literal`, another dataclass, `Kinds`, or `tuple[one of these, ...]`;
numbers may be `Annotated` with a `Bound`. Every field has a default. Any other schema is a TypeError.
"""

import json
import math
import os
import re
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin

from torchllm.config.keys import Bound, IsPath, KeyPath, Unsupported, dotted, field_types, notes_on, plain_type
from torchllm.config.schema import KIND_KEYS, Config, Kinds, Model
from torchllm.config.toml import shown

TO_SET = "SET"
"""value in a converted config of a key that only its user can know"""
STILL_SET = f'is still "{TO_SET}", a value to fill in: it must be'
_WRONG = object()
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


class ConfigError(NamedTuple):
    """An error in a config, and the key to change."""

    path: KeyPath
    """("parallel", "tp")"""
    message: str
    """the error and its remedy, without the key"""
    is_unknown: bool = False
    """the schema has no such key"""

    @property
    def key(self) -> str:
        """The path on one line: "parallel.tp"."""
        return dotted(self.path)


def config_error(key: str, message: str) -> ConfigError:
    """Return the error of a key of the schema: "parallel.tp"."""
    return ConfigError(tuple(key.split(".")), message)


GONE = {("data", "pattern"): "llama3"}
"""keys that config.toml of every earlier run has, and their default, which has no effect"""


def key_of_kind(config: Config, path: str, name: str) -> str:
    """Return the key that decides a setting of a kind's blocks: its own, or [model]'s. path: of `of_kinds`."""
    is_own = path != "model" and name in config.model.kinds.get(path.rpartition(".")[2], {})
    return f"{path}.{name}" if is_own else f"model.{name}"


def read_table(schema: type, table: dict[str, Any], faults: list[ConfigError]) -> Any:
    """Return a `schema` with the values of a plain table.

    Wrong and unknown keys are appended to `faults`; wrong keys keep their default.
    """
    return _TableReader(schema, faults).read_section(schema, table, ())


class _TableReader:
    """Reads one table and collects its faults."""

    def __init__(self, schema: type, faults: list[ConfigError]) -> None:
        self.schema = schema
        self.faults = faults

    def read_section(self, kind: type, table: dict[str, Any], path: KeyPath) -> Any:
        """Return a dataclass with the values of a table."""
        _check_schema(kind)
        types = field_types(kind)
        values = {}
        for key, value in table.items():
            key_path = (*path, key)
            if key not in types:
                if key_path not in GONE or value != GONE[key_path]:
                    self.report_unknown(kind, key_path, value)
                continue
            result = self.read_value(types[key], value, key_path)
            if result is not _WRONG:
                values[key] = result
        return kind(**values)

    def read_value(self, annotated: Any, value: Any, path: KeyPath) -> Any:
        """Return a value as its type has it: arrays are tuples, tables are dataclasses; _WRONG after a fault."""
        kind, _ = plain_type(annotated)
        if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
            return self.read_section(kind, value, path)
        if get_origin(kind) is tuple and isinstance(value, list):
            items = []
            for index, item in enumerate(value):
                items.append(self.read_value(get_args(kind)[0], item, (*path, str(index))))
            return _WRONG if _WRONG in items else tuple(items)
        if kind is Kinds and isinstance(value, dict):
            return Kinds({name: self.read_kind(table, (*path, name)) for name, table in value.items()})
        message = _scalar_problem(annotated, value)
        if message:
            self.faults.append(ConfigError(path, message))
            return _WRONG
        if notes_on(annotated, IsPath):
            return os.path.expanduser(value)
        return float(value) if kind is float else value

    def read_kind(self, table: Any, path: KeyPath) -> dict[str, Any]:
        """Return the table of a kind of blocks, whose keys are some of [model]."""
        if not isinstance(table, dict):
            self.faults.append(ConfigError(path, f"must be a table of keys of [model], not {shown(table)}"))
            return {}
        values = {}
        for key, value in table.items():
            if key in KIND_KEYS:
                values[key] = self.read_value(field_types(Model)[key], value, (*path, key))
            elif key in field_types(Model):
                message = f"has one value for all blocks: a kind of blocks has {', '.join(KIND_KEYS)}"
                self.faults.append(ConfigError((*path, key), message))
            else:
                self.report_unknown(Model, (*path, key), value)
        return {key: value for key, value in values.items() if value is not _WRONG}

    def report_unknown(self, section: type, path: KeyPath, value: Any) -> None:
        """Report a key that its section does not have, with the one that was probably meant."""
        from torchllm.tools.config.unknown_keys import hint_of  # only for a key that does not exist

        kind_of_key = "section or key" if len(path) == 1 else "key"
        hint = hint_of(self.schema, section, path, value) or "--help lists all keys"
        self.faults.append(ConfigError(path, f"unknown {kind_of_key}; {hint}", is_unknown=True))


def _scalar_problem(annotated: Any, value: Any) -> str:
    """Return the error of a scalar value; "" if it is right."""
    kind, bound = plain_type(annotated)
    is_path = bool(notes_on(annotated, IsPath))
    if value == TO_SET and (kind is not str or is_path):
        return f"{STILL_SET} {describe(annotated)}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and is_number and not abs(value) < math.inf:
        return f"must be a finite number, not {shown(value)}"
    if kind in (int, float) and is_number and isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "must fit into 64 bits"
    if isinstance(value, str) and not _is_utf8(value):
        return "must be UTF-8"
    if isinstance(value, str) and is_path and (variable := _shell_variable(value)):
        return f"{variable} is not expanded in a config: write the path itself, or ~ for the home folder"
    if _has_type(kind, value, is_number) and (kind not in (int, float) or _is_within(bound, value)):
        return ""
    return f"must be {describe(annotated)}, not {shown(value)}{_reason_against(annotated, value)}"


def _reason_against(annotated: Any, value: Any) -> str:
    """Return why a word is not among the choices of a key, after a colon; "" if the key's type has no note on it."""
    return next((f": {note.reason}" for note in notes_on(annotated, Unsupported) if note.word == value), "")


def _shell_variable(path: str) -> str:
    """Return the first $NAME or ${NAME} that is a variable of the environment, the path of an unknown ~USER, or ""."""
    names = re.finditer(r"\$(\w+)|\$\{(\w+)\}", path)
    unknown_user = path if os.path.expanduser(path).startswith("~") else ""
    return next((name[0] for name in names if (name[1] or name[2]) in os.environ), unknown_user)


def _is_utf8(text: str) -> bool:
    """Whether text can be written to config.toml: an argument of a command line may have been other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _has_type(kind: Any, value: Any, is_number: bool) -> bool:
    """Whether a value is of a scalar type, without being coerced; a whole number is a float, too."""
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if kind is float:
        return is_number
    return type(value) is kind


def _is_within(bound: Bound, number: float) -> bool:
    return bound.at_least <= number <= bound.at_most and number > bound.over


@cache
def _check_schema(schema: type) -> None:
    """Raise TypeError if no TOML can fill a field of a dataclass."""
    types = field_types(schema)
    for field in fields(schema):
        if field.default is MISSING and field.default_factory is MISSING:
            raise TypeError(f"{schema.__name__}.{field.name} needs a default")
        describe(types[field.name])


def describe(annotated: Any) -> str:
    """Describe a type in words: "a whole number of at least 1". TypeError if no TOML value has this type."""
    kind, bound = plain_type(annotated)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(json.dumps, get_args(kind)))}"  # words, true and false, as in TOML
    if _is_array(kind):
        return f"an array, each {describe(get_args(kind)[0])}"
    if isinstance(kind, type) and is_dataclass(kind):
        _check_schema(kind)
        return "a table"
    if kind is Kinds:
        return "tables of keys of [model]"
    if kind not in _WORDS:
        raise TypeError(f"a config field cannot be {annotated!r}: see torchllm/tools/config/read.py")
    if bound.over > -math.inf:
        most = f" and not over {bound.at_most:g}" if bound.at_most < math.inf else ""
        return f"{_WORDS[kind]} over {bound.over:g}{most}"
    if bound.at_most < math.inf:
        limits = f"from {bound.at_least} to" if bound.at_least > -math.inf else "of at most"
        return f"{_WORDS[kind]} {limits} {bound.at_most}"
    if bound.at_least > -math.inf:
        return f"{_WORDS[kind]} of at least {bound.at_least:g}"
    return _WORDS[kind]


def _is_array(kind: Any) -> bool:
    """Whether a type is `tuple[X, ...]`, where X is not a tuple."""
    if get_origin(kind) is not tuple:
        return False
    item, *rest = get_args(kind)
    return rest == [...] and get_origin(item) is not tuple


def type_at(schema: type, path: KeyPath) -> Any:
    """Return the annotated type of the value at a path; None if there is no such key."""
    kind: Any = schema
    for part in path:
        kind, _ = plain_type(kind)
        if get_origin(kind) is tuple:
            kind = get_args(kind)[0] if part.isdigit() else None
        elif is_dataclass(kind) and isinstance(kind, type):
            kind = field_types(kind).get(part)
        elif kind is Kinds:
            kind = Model
        else:
            return None
    return kind
