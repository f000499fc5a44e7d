"""Read TOML files as plain tables that remember where each key was written.

`base = "parent.toml"` at the top of a file names one parent, relative to that file. A child's tables merge over the
parent's key by key; everything else, arrays included, replaces.
"""

import codecs
import os
import re
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config.files import read_regular
from torchllm.config.keys import KeyPath
from torchllm.config.toml import shown
from torchllm.tools.config.read import STILL_SET, TO_SET
from torchllm.tools.resources import RUN_CONFIG, find_base, find_config


class Layer(NamedTuple):
    """A table and where its keys and array elements were written."""

    table: dict[str, Any]
    origins: dict[KeyPath, str]
    """"file.toml:12" or "--training.steps" """
    is_complete: bool = True
    """False: a file could not be read, and its keys are missing"""
    files: tuple["Layer", ...] = ()
    """the files that were merged into this layer, lowest base first"""

    def forget(self, path: KeyPath) -> None:
        """Drop the origins of a key, and of all inside it, that is about to be replaced."""
        for key in list(self.origins):
            if key[: len(path)] == path:
                del self.origins[key]


def read_files(file: str, errors: list[str], folder: str = "train_configs") -> Layer:
    """Return a file merged over its chain of bases. Appends a line to `errors` for each file that cannot be read.

    folder: where bases that come with torchllm are.
    """
    layers: list[Layer] = []
    file = find_config(file)
    names: dict[str, str] = {}  # real path -> as it is named in messages
    named_at = ""  # where the file is named as a base: a prefix for messages
    while True:
        real = os.path.realpath(file)
        if real in names:
            start = list(names).index(real)
            cycle = [*list(names.values())[start:], names[real]]
            errors.append(f"{named_at}base: a cycle: {' -> '.join(cycle)}")
            layers.append(_unread())
            break
        names[real] = file
        layer = _read_file(file, named_at, errors)
        if layers and Path(file).name == RUN_CONFIG and isinstance(run := layer.table.get("run"), dict):
            run.pop("folder", None)  # of the run whose config this is
        layers.append(layer)
        if "base" not in layer.table:
            break
        base = layer.table.pop("base")
        named_at = f"{layer.origins[('base',)]}: "
        if not isinstance(base, str) or base in ("", TO_SET):
            problem = f"{STILL_SET} the name of a file" if base == TO_SET else f"must name a file, not {shown(base)}"
            errors.append(f"{named_at}base: {problem}")
            layers.append(_unread())
            break
        file = os.path.normpath(find_config(find_base(os.path.dirname(file), base, folder)))
    return merge_layers(tuple(reversed(layers)))


def merge_layers(files: tuple[Layer, ...]) -> Layer:
    """Return a copy of layers, at least one, merged into one; later layers win."""
    merged = Layer({}, {}, all(layer.is_complete for layer in files), files)
    for layer in files:
        _put_over(merged, merged.table, deepcopy(layer.table), ())
        merged.origins.update(layer.origins)
    return merged


def _put_over(layer: Layer, lower: dict[str, Any], upper: dict[str, Any], path: KeyPath) -> None:
    """Write the keys of `upper` into `lower`, which is the layer's table at `path`."""
    for key, value in upper.items():
        if isinstance(value, dict) and isinstance(lower.get(key), dict):
            _put_over(layer, lower[key], value, (*path, key))
        else:
            layer.forget((*path, key))
            lower[key] = value


def _unread() -> Layer:
    """Return a new layer that stands for a file that could not be read."""
    return Layer({}, {}, is_complete=False)


def _read_file(file: str, named_at: str, errors: list[str]) -> Layer:
    path = Path(file)
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe or a device may never end
        what = f"is a folder without a {RUN_CONFIG}, so it is no run" if os.path.isdir(path) else "is not a file"
        errors.append(f"{named_at}{file}: {what}")
        return _unread()
    try:
        data = read_regular(path)
    except FileNotFoundError:
        from torchllm.tools.config.toml_errors import near_files  # of no use to a file that can be read

        near = near_files(path)
        hint = f"; did you mean {near}?" if near else ""
        errors.append(f"{named_at}{file}: no such file{hint}")
        return _unread()
    except OSError as error:
        errors.append(f"{named_at}{file}: cannot be read: {error.strerror}")
        return _unread()
    if data.startswith(codecs.BOM_UTF8):
        errors.append(f"{file}:1: starts with a byte order mark: save it as UTF-8 without one (without BOM)")
        return _unread()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        errors.append(f"{file}:{_line_after(data[: error.start])}: is not UTF-8")
        return _unread()
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and errors that the decoder does not wrap
        from torchllm.tools.config.toml_errors import parser_message  # as above

        errors.append(f"{file}:{parser_message(str(error), text)}")
        return _unread()
    origins = {key: f"{file}:{line}" for key, line in key_lines(text).items()}
    return Layer(table, origins)


def _line_after(beginning: bytes) -> int:
    """Return the number of the line that follows the beginning of a file."""
    return beginning.count(b"\n") + 1


_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?:"{0,2})|\'\'\'.*?\'\'\'(?:'{0,2})|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|\#[^\n]*'''
    r"""|\n|[ \t\r]+|[\[\]{}=,.]|[^\s\[\]{}=,."'#]+""",
    re.DOTALL,
)


class _Token(NamedTuple):
    text: str
    line: int


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the first line of each key, table and array element of a *valid* TOML text."""
    reader = _LineReader(text)
    reader.read_document()
    return reader.lines


class _LineReader:
    """Walks over the tokens of a valid TOML text and notes where its keys are."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.last_element: dict[KeyPath, int] = {}
        """[[array of tables]] -> index of its last element"""
        self.tokens: list[_Token] = []
        """in reverse: the next token is the last of the list"""
        line = 1
        for match in _TOKEN.finditer(text):
            if match[0][0] not in "# \t\r":
                self.tokens.append(_Token(match[0], line))
            line += match[0].count("\n")
        self.tokens.append(_Token("\n", line))
        self.tokens.reverse()

    @property
    def next_text(self) -> str:
        """The next token, which stays where it is."""
        return self.tokens[-1].text

    def read_document(self) -> None:
        """Read to the end of the text."""
        table: KeyPath = ()
        while self.tokens:
            if self.next_text == "\n":
                self.tokens.pop()
            elif self.next_text == "[":
                table = self.read_header()
            else:
                self.read_assignment(table)

    def read_header(self) -> KeyPath:
        """Read `[table]` or `[[array of tables]]` and return the path of the table that it opens."""
        line = self.tokens.pop().line
        is_array = self.next_text == "["
        if is_array:
            self.tokens.pop()
        table = self.read_key(())
        if is_array:
            self.last_element[table] = self.last_element.get(table, -1) + 1
        if table in self.last_element:
            table = (*table, str(self.last_element[table]))
            self.lines.setdefault(table, line)
        while self.next_text == "]":
            self.tokens.pop()
        return table

    def read_key(self, prefix: KeyPath) -> KeyPath:
        """Read a dotted key; inside an array of tables it continues in the last element."""
        path = prefix
        while True:
            part, line = self.tokens.pop()
            path += (parse_value(part) if part[0] in "\"'" else part,)
            self.lines.setdefault(path, line)
            if self.next_text != ".":
                return path
            self.tokens.pop()
            if path in self.last_element:
                path += (str(self.last_element[path]),)

    def read_assignment(self, prefix: KeyPath) -> None:
        """Read `key = value`."""
        path = self.read_key(prefix)
        self.tokens.pop()  # =
        self.read_value(path)

    def read_value(self, path: KeyPath) -> None:
        """Read a value, including the elements of an array or an inline table."""
        opening = self.next_text
        if opening not in ("[", "{"):
            while self.next_text not in ("\n", ",", "]", "}"):
                self.tokens.pop()
            return
        self.tokens.pop()
        index = 0
        while self.next_text not in ("]", "}"):
            if self.next_text in ("\n", ","):
                self.tokens.pop()
            elif opening == "{":
                self.read_assignment(path)
            else:
                element = (*path, str(index))
                self.lines[element] = self.tokens[-1].line
                self.read_value(element)
                index += 1
        self.tokens.pop()


def parse_value(text: str) -> Any:
    """Return the value that a TOML text spells; ValueError if it is not exactly one."""
    try:
        table = tomllib.loads(f"value = {text}")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if len(table) > 1:
        raise ValueError("more than a value")
    return table["value"]
