"""Choose the files at data.sources.path by their names and kinds, and say which are left out."""

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from torchllm.config import Source
from torchllm.config.errors import DataError
from torchllm.config.files import why_pointer
from torchllm.data.path_hint import describe_missing
from torchllm.tools.prepare.file_kinds import (
    FILES_OF,
    NO_SUFFIX,
    describe_kinds,
    describe_suffixes,
    kind_of_file,
    most_first,
    source_kind,
)
from torchllm.tools.prepare.file_search import FoundFiles, NamedSplit, find_files
from torchllm.tools.prepare.records import BLOCK
from torchllm.tools.prepare.source_files import ChosenFiles, stat_file
from torchllm.tools.prepare.unpack import open_unpacked

log = logging.getLogger(__name__)


def files_at_path(source: Source, by_name: bool) -> ChosenFiles:
    """Return the files at the path of a source of text, sorted by path. Errors: `choose_files`."""
    files = FILES_OF[source.kind]
    found = find_files(source.path, lambda name: kind_of_file(name) in files)
    if not found.files:
        reason = _why_none(source, found)
        raise DataError(f"data.sources: no file matches {source.path!r} (kind {source.kind!r}): {reason}")
    chosen = choose_by_name(source, found, by_name)
    if source.kind == "text":
        _refuse_json_lines(source, [file.path for file in chosen.train])
    return chosen


def _why_none(source: Source, found: FoundFiles) -> str:
    """Return why a source has no file, with the cure."""
    if not found.ignored:
        if found.outputs:
            return f"{_describe_outputs(found.outputs)}; to read one, name it"
        return "the folder is empty" if os.path.isdir(source.path) else describe_missing(source.path)
    other_kind = source_kind(found.ignored)
    suffixes = [kind for kind in most_first(found.ignored) if kind.startswith(".")]
    advice = ""
    if other_kind:
        advice = f': set kind = "{other_kind}"'
    elif source.kind == "text" and suffixes:
        glob = os.path.join(source.path, "**", f"*{suffixes[0]}")
        advice = f": to read these, name them in a glob, path = {json.dumps(glob)}"
    files = describe_kinds(found.ignored)
    return f"the folder has no file that ends with {describe_suffixes(source.kind)}, but {files}{advice}"


def _describe_outputs(outputs: Mapping[str, str]) -> str:
    """Name the folders that are left out because they are output of torchllm."""
    described = [f"{path} ({kind})" for path, kind in outputs.items()]
    unnamed = len(described) - _LISTED
    if unnamed > 0:
        described[_LISTED:] = [f"{unnamed:,} others"]
    return f"left out as output of torchllm: {', '.join(described)}"


def choose_by_name(source: Source, found: FoundFiles, by_name: bool) -> ChosenFiles:
    """Return the trained and the held-out files at data.sources.path; log files that are not trained, and why.

    by_name: as of `choose_files`. Raises DataError if by their names none is to be trained.
    """
    paths: dict[NamedSplit, list[str]] = {"train": [], "held out": [], "test": []}
    for file in found.files:
        paths[file.split if by_name else "train"].append(file.path)
    if not paths["train"]:
        raise DataError(
            f"data.sources: by their names all of the {len(found.files):,} files at {source.path!r} are for validation "
            f"or a test, as {found.files[0].path}: to train on them, let the path have that word, by the file's name, "
            "its folder's, or a glob such as valid_*"
        )
    notes = []
    if paths["held out"]:
        held_out = _describe_paths(paths["held out"])
        notes.append(f"{held_out} held out by name, in place of data.validation_fraction")
    if paths["test"]:
        notes.append(f"{_describe_paths(paths['test'])} left out as a test set")
    if found.ignored:
        notes.append(f"not read: {describe_kinds(found.ignored)}")
    if found.folders:
        notes.append(f"{found.folders:,} folders that match are not read")
    if found.outputs:
        notes.append(_describe_outputs(found.outputs))
    kinds = Counter(map(kind_of_file, paths["train"]))
    has_others = source.kind == "text" and not kinds.keys() <= {*FILES_OF["text"]} - {NO_SUFFIX}
    if notes or (has_others and not os.path.isfile(source.path)):
        described = f" ({describe_kinds(kinds)})" if has_others else ""
        log.info(
            "data.sources: %s", "; ".join([f"{len(paths['train']):,} files in {source.path!r}{described}", *notes])
        )
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
"""files or folders that a line names"""


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
