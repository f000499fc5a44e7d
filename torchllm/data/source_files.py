"""The files of a raw source: which of those at data.sources.path are read, and in which order."""

import glob
import json
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from torchllm.config import Source
from torchllm.data.error import DataError
from torchllm.data.path_hint import describe_missing
from torchllm.data.records import BLOCK
from torchllm.data.unpack import open_unpacked
from torchllm.regular_file import check_regular

log = logging.getLogger(__name__)

_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""folders of the standard library that are not read"""


class SourceFile(NamedTuple):
    """A file of a source, and what decides whether it has to be read again."""

    path: str
    size: int
    """in bytes"""
    changed_ns: int
    """time of its last change, in nanoseconds since 1970"""


def source_files(source: Source) -> list[SourceFile]:
    """Return the files of a raw source, sorted by path; a source of the hub has none.

    Raises DataError if data.sources.path matches no file.
    """
    if source.kind == "hub":
        return []
    if source.kind == "stdlib":
        return [stat_file(path) for path in _stdlib_paths()]
    pattern = os.path.expanduser(source.path)
    # A path that exists is taken literally: its name may hold characters that mean something in a glob.
    matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    if matches == [pattern] and os.path.isdir(pattern):
        paths = _files_in_folder(pattern, source)
    else:
        paths = sorted(path for path in matches if not os.path.isdir(path))
    if not paths:
        raise DataError(
            f"data.sources: no file matches {source.path!r} (kind {source.kind!r}): {describe_missing(source.path)}"
        )
    files = [stat_file(path) for path in paths]
    if source.kind == "text":
        _refuse_json_lines(source, paths)
    return files


_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = ("", ".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4")
_SUFFIXES = {
    "jsonl": tuple(name + ending for name in _LINES for ending in _COMPRESSED),
    "parquet": (".parquet",),
}
"""names of the files of a folder that are read; all of a folder of text"""


def _files_in_folder(folder: str, source: Source) -> list[str]:
    """Return the files in a folder and in the folders in it, sorted; hidden ones, such as .git, are none of them."""
    suffixes = _SUFFIXES.get(source.kind, ("",))
    paths: list[str] = []
    ignored = 0
    for inside, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.startswith(".") or not name.endswith(suffixes):
                ignored += 1
            else:
                paths.append(os.path.join(inside, name))
    others = f"; {ignored:,} hidden ones and ones of another kind are not read" if ignored else ""
    log.info("data.sources: %s files in %r%s", f"{len(paths):,}", source.path, others)
    return sorted(paths)


_LOOKED_AT = 8
"""files of text that are looked at for JSON lines"""


def _refuse_json_lines(source: Source, paths: Sequence[str]) -> None:
    """Raise DataError if a source of text has files of JSON lines only: each would be one document in JSON."""
    places = np.unique(np.linspace(0, len(paths) - 1, _LOOKED_AT).astype(int))
    if all(_holds_json_lines(paths[place]) for place in places):
        raise DataError(
            f"data.sources: {source.path!r} holds JSON lines, which kind 'text' would read with their braces and keys: "
            'set kind = "jsonl", and text_key to the key of the text'
        )


def _holds_json_lines(path: str) -> bool:
    """Return whether the first two lines of a file are JSON objects."""
    try:
        with open_unpacked(path) as file:
            lines = [file.readline(BLOCK), file.readline(BLOCK)]
    except OSError:  # a bad record when it is read
        return False
    try:
        return all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _stdlib_paths() -> Iterator[str]:
    """Yield the .py files of the running Python's standard library, without tests and installed packages."""
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if name not in _NOT_CORPUS)
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name.endswith(".py") and os.path.isfile(path) and os.path.getsize(path):
                yield path


def stat_file(path: str) -> SourceFile:
    """Return size and time of change of a file. Raises DataError for a FIFO or a device, which have no size."""
    try:
        status = os.stat(path)
    except OSError:
        return SourceFile(path, 0, 0)  # a dangling link: a bad record when it is read
    try:
        check_regular(path)
    except OSError as error:
        raise DataError(f"data.sources: {path} {error.strerror}") from error
    return SourceFile(path, status.st_size, status.st_mtime_ns)
