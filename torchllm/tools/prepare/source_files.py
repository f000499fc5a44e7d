"""The files of a raw source: a selection of the files at data.sources.path, in their order."""

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
from torchllm.regular_file import check_regular, why_pointer
from torchllm.tools.prepare.file_search import FoundFiles, NamedSplit, find_files
from torchllm.tools.prepare.records import BLOCK
from torchllm.tools.prepare.unpack import open_unpacked

log = logging.getLogger(__name__)

_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""folders of the standard library that are not read"""


class SourceFile(NamedTuple):
    """A file of a source, with the properties that show whether it has to be read again."""

    path: str
    size: int
    """in bytes"""
    changed_ns: int
    """time of its last change, in nanoseconds since 1970"""


class ChosenFiles(NamedTuple):
    """The files of a source that are read."""

    train: list[SourceFile]
    held_out: list[SourceFile]
    """the held-out part, by their names; none: it is a part of the others"""


def source_files(source: Source) -> list[SourceFile]:
    """Return all files of a raw source that are read, those that are held out by their names last."""
    chosen = choose_files(source)
    return [*chosen.train, *chosen.held_out]


def choose_files(source: Source) -> ChosenFiles:
    """Return the files of a raw source, sorted by path; a source of the hub has none.

    Raises DataError if there is none to train on at data.sources.path.
    """
    if source.kind == "hub":
        return ChosenFiles([], [])
    if source.kind == "stdlib":
        return ChosenFiles([stat_file(path) for path in _stdlib_paths()], [])
    suffixes = _SUFFIXES.get(source.kind, ("",))
    found = find_files(source.path, lambda name: name.lower().endswith(suffixes))
    if not found.files:
        hint = describe_missing(source.path)
        if os.path.isdir(source.path):
            endings = " or ".join(ending for ending in suffixes if ending.count(".") == 1)
            hint = f"the folder has no file that ends with {endings}" if endings else "the folder is empty"
        raise DataError(f"data.sources: no file matches {source.path!r} (kind {source.kind!r}): {hint}")
    if source.kind == "arrow":
        found = _without_caches(found)
    chosen = choose_by_name(source, found)
    if source.kind == "text":
        _refuse_json_lines(source, [file.path for file in chosen.train])
    return chosen


_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = ("", ".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4")
_SUFFIXES = {
    "jsonl": tuple(name + ending for name in _LINES for ending in _COMPRESSED),
    "parquet": (".parquet",),
    "csv": tuple(name + ending for name in (".csv", ".tsv") for ending in _COMPRESSED),
    "arrow": (".arrow",),
}
"""names of the files of a folder that are read; all of a folder of text"""


def _without_caches(found: FoundFiles) -> FoundFiles:
    """Return the Arrow files but for those that a folder of `datasets` (`save_to_disk`) does not name as its data.

    Raises DataError if the folder needs more than these files.
    """
    files = []
    named: dict[str, list[str] | None] = {}
    for file in found.files:
        folder, name = os.path.split(file.path)
        if folder not in named:
            named[folder] = _data_files(folder)
        names = named[folder]
        if names is None or name in names:
            files.append(file)
    return found._replace(files=files, ignored=found.ignored + len(found.files) - len(files))


def _data_files(folder: str) -> list[str] | None:
    """Return the names of the data files of a folder of `save_to_disk`; None if it is none."""
    path = os.path.join(folder, "state.json")
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
        names = [entry["filename"] for entry in state["_data_files"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"data.sources: {path}: is no list of data files ({error!r}): save the data set again"
        ) from error
    if state.get("_indices_files"):
        raise DataError(f"data.sources: {path}: the order of the rows is apart: flatten_indices(), and save it again")
    if missing := [name for name in names if not os.path.isfile(os.path.join(folder, name))]:
        raise DataError(f"data.sources: {path}: names {missing[0]}, which is missing: copy the folder again")
    return names


def choose_by_name(source: Source, found: FoundFiles) -> ChosenFiles:
    """Return the trained and the held-out files at data.sources.path; log files that are not trained, and why.

    Raises DataError if by their names none is to be trained.
    """
    paths: dict[NamedSplit, list[str]] = {"train": [], "held out": [], "test": []}
    for file in found.files:
        paths[file.split].append(file.path)
    if not paths["train"]:
        raise DataError(
            f"data.sources: by their names all of the {len(found.files):,} files at {source.path!r} are for validation "
            f"or a test, as {found.files[0].path}: to train on them, name the file itself, or the folder that it is in"
        )
    notes = []
    if paths["held out"]:
        held_out = _describe_paths(paths["held out"])
        notes.append(f"{held_out} held out by name, in place of data.validation_fraction")
    if paths["test"]:
        notes.append(f"{_describe_paths(paths['test'])} left out as a test set")
    if found.ignored:
        notes.append(f"{found.ignored:,} hidden ones and ones of another kind are not read")
    if found.folders:
        notes.append(f"{found.folders:,} folders that match are not read")
    if notes or os.path.isdir(source.path):
        log.info("data.sources: %s", "; ".join([f"{len(paths['train']):,} files in {source.path!r}", *notes]))
    chosen = ChosenFiles(*([stat_file(path) for path in paths[split]] for split in ("train", "held out")))
    for path, size, _ in [*chosen.train, *chosen.held_out]:
        if reason := why_pointer(path, size):
            raise DataError(f"data.sources: {path} {reason}")
    return chosen


def _describe_paths(paths: Sequence[str]) -> str:
    """Return how many files there are, and the first ones."""
    listed = [*paths[:_LISTED], *["..."][: len(paths) - _LISTED]]
    return f"{len(paths):,} files ({', '.join(listed)})"


_LISTED = 3
"""files that a line names"""


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
