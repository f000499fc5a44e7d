"""TOML files as plain tables that remember where each key was written, and values written back as TOML.

`base = "parent.toml"` at the top of a file names one parent, relative to that file. A child's tables merge over the
parent's key by key; everything else, arrays included, replaces.
"""

import datetime
import difflib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.resources import find_base, find_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KeyPath = tuple[str, ...]
"""("data", "sources", "0", "path"): keys, and indices of arrays as decimal strings."""


class Layer(NamedTuple):
    """A table and where its keys and array elements were written: "file.toml:12" or "--training.steps"."""

    table: dict[str, Any]
    places: dict[KeyPath, str]

    def forget(self, path: KeyPath) -> None:
        """Drop the places of a key, and of all inside it, that is about to be replaced."""
        for place in [place for place in self.places if place[: len(path)] == path]:
            del self.places[place]


def read_files(file: str, found: list[str]) -> Layer:
    """A file merged over its chain of bases. Appends a line to `found` for all that cannot be read."""
    layers: list[Layer] = []
    file = find_config(file)
    seen: dict[str, str] = {}  # real path -> as it is named in messages
    named_at = ""
    while True:
        real = os.path.realpath(file)
        if real in seen:
            chain = list(seen.values())
            found.append(f"{named_at}base: a cycle: {' -> '.join([*chain[list(seen).index(real) :], seen[real]])}")
            break
        seen[real] = file
        layer = _read_file(file, named_at, found)
        layers.append(layer)
        base = layer.table.pop("base", None)
        if base is None:
            break
        named_at = f"{layer.places[('base',)]}: "
        if not isinstance(base, str) or not base:
            found.append(f"{named_at}base: must name a file, not {shown(base)}")
            break
        file = os.path.normpath(find_base(os.path.dirname(file), base))
    merged = layers.pop()
    while layers:
        _merge(merged, layers.pop())
    return merged


def _merge(below: Layer, above: Layer) -> None:
    def over(lower: dict[str, Any], upper: dict[str, Any], path: KeyPath) -> None:
        for key, value in upper.items():
            if isinstance(value, dict) and isinstance(lower.get(key), dict):
                over(lower[key], value, (*path, key))
            else:
                below.forget((*path, key))
                lower[key] = value

    over(below.table, above.table, ())
    below.places.update(above.places)


def _read_file(file: str, named_at: str, found: list[str]) -> Layer:
    path = Path(file)
    if not path.is_file():  # never opened otherwise: reading a pipe or a device may not end
        near = "" if path.exists() else _near_files(path)
        what = "is not a file" if path.exists() else "no such file"
        found.append(f"{named_at}{file}: {what}" + (f"; did you mean {near}?" if near else ""))
        return Layer({}, {})
    try:
        data = path.read_bytes()
        text = data.decode()
        return Layer(tomllib.loads(text), {key: f"{file}:{line}" for key, line in key_lines(text).items()})
    except OSError as error:
        found.append(f"{named_at}{file}: cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        found.append(f"{file}:{data[: error.start].count(10) + 1}: is not UTF-8")
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and what the decoder lets through
        message = str(error).replace("Cannot overwrite a value", "a key is given twice")
        at = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", message)
        line = (at and at[1]) or max(1, text.rstrip("\n").count("\n") + 1)
        found.append(f"{file}:{line}: {message[: at.start()] if at else message}")
    return Layer({}, {})


def _near_files(path: Path) -> str:
    """Existing TOML files with a name like that of the missing one."""
    files = [*path.parent.glob("*.toml"), *Path("train_configs").rglob("*.toml")] if path.name else []
    close = difflib.get_close_matches(path.stem, {file.stem for file in files}, n=2, cutoff=0.7)
    return " or ".join(sorted({str(file) for file in files if file.stem in close}))


_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?:"{0,2})|\'\'\'.*?\'\'\'(?:'{0,2})|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|\#[^\n]*'''
    r"""|\n|[ \t\r]+|[\[\]{}=,.]|[^\s\[\]{}=,."'#]+""",
    re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line on which each key, table and array element of a *valid* TOML text begins."""
    tokens: list[tuple[str, int]] = []
    line = 1
    for match in _TOKEN.finditer(text):
        if match[0][0] not in "# \t\r":
            tokens.append((match[0], line))
        line += match[0].count("\n")
    tokens.append(("\n", line))
    tokens.reverse()  # the next token is the last
    lines: dict[KeyPath, int] = {}
    tables: dict[KeyPath, int] = {}  # [[array of tables]] -> index of its last element

    def key(prefix: KeyPath) -> KeyPath:
        """A dotted key; inside an array of tables it continues in the last element."""
        path = prefix
        while True:
            part, line = tokens.pop()
            path += (parse_value(part) if part[0] in "\"'" else part,)
            lines.setdefault(path, line)
            if tokens[-1][0] != ".":
                return path
            tokens.pop()
            if path in tables:
                path += (str(tables[path]),)

    def assignment(prefix: KeyPath) -> None:
        path = key(prefix)
        tokens.pop()  # =
        value(path)

    def value(path: KeyPath) -> None:
        opening = tokens[-1][0]
        if opening not in ("[", "{"):
            while tokens[-1][0] not in ("\n", ",", "]", "}"):
                tokens.pop()
            return
        tokens.pop()
        index = 0
        while tokens[-1][0] not in ("]", "}"):
            if tokens[-1][0] in ("\n", ","):
                tokens.pop()
            elif opening == "{":
                assignment(path)
            else:
                element = (*path, str(index))
                lines[element] = tokens[-1][1]
                value(element)
                index += 1
        tokens.pop()

    table: KeyPath = ()
    while tokens:
        token, line = tokens[-1]
        if token == "\n":
            tokens.pop()
        elif token == "[":
            tokens.pop()
            is_array = tokens[-1][0] == "["
            if is_array:
                tokens.pop()
            table = key(())
            if is_array:
                tables[table] = tables.get(table, -1) + 1
            if table in tables:
                table += (str(tables[table]),)
                lines.setdefault(table, line)
            while tokens[-1][0] == "]":
                tokens.pop()
        else:
            assignment(table)
    return lines


def parse_value(text: str) -> Any:
    """The value that a TOML text spells; ValueError if it is not exactly one."""
    try:
        table = tomllib.loads(f"value = {text}")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if len(table) > 1:
        raise ValueError("more than a value")
    return table["value"]


def toml_value(value: bool | int | float | str | tuple[Any, ...]) -> str:
    """One value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's escapes are TOML's, except that TOML wants DEL escaped too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)


def dotted(path: KeyPath) -> str:
    """A key path on one line, as it is written in TOML."""
    return ".".join(part if re.fullmatch(r"[\w-]+", part) else toml_value(part) for part in path)


def shown(value: object) -> str:
    """A wrong value for a message, on one line and not too long."""
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
