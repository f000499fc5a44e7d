"""The files of a raw source, with the properties that show whether they have to be read again."""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torchllm.config.errors import DataError
from torchllm.config.files import check_regular, is_url, sha256_of

SOURCE = "source.json"
"""name of the file that says which text a corpus was made from"""


class SourceFile(NamedTuple):
    """A file of a source, with the properties that show whether it has to be read again."""

    path: str
    size: int
    """in bytes"""
    changed_ns: int
    """time of its last change, in nanoseconds since 1970; of a URL a number of its version"""


class ChosenFiles(NamedTuple):
    train: list[SourceFile]
    held_out: list[SourceFile]
    """the held-out part, by their names; none: it is a part of the others"""


def stat_file(path: str) -> SourceFile:
    """Return size and time of change of a file. Raises DataError for a FIFO or a device, which have no size."""
    if is_url(path):
        from torchllm.tools.prepare.remote_files import facts_of  # most sources are on this machine

        return SourceFile(path, *(facts_of(path) or (0, 0)))
    try:
        status = os.stat(path)
    except OSError:
        return SourceFile(path, 0, 0)  # a dangling link: a bad record when it is read
    try:
        check_regular(path)
    except OSError as error:
        raise DataError(f"data.sources: {path} {error.strerror}") from error
    return SourceFile(path, status.st_size, status.st_mtime_ns)


def changes_of(files: Sequence[SourceFile]) -> str:
    """Return a hash of the ctimes of files, which no program can set: it changes if one of them is written."""
    digest = hashlib.sha256()
    for file in files:
        with suppress(OSError):  # a dangling link
            changed = file.changed_ns if is_url(file.path) else os.stat(file.path).st_ctime_ns
            digest.update(f"{changed}\n".encode())
    return digest.hexdigest()[:16]


def content_of(files: Sequence[SourceFile]) -> str:
    """Return a hash of the content of files. Raises OSError."""
    sums = [str(file.changed_ns) if is_url(file.path) else sha256_of(file.path) for file in files]
    return hashlib.sha256(" ".join(sums).encode()).hexdigest()[:16]
