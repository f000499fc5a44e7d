"""Records of verified corpus files, so that each file is verified once and not in every run.

A file is identified by its corpus (whose fingerprint covers the sha256 and sizes of all its files), its index there,
the folder, and its ctime. The record of a corpus has an int64 per file: the ctime of the verified file in nanoseconds
since 1970, 0 for files that are not verified. Any number of processes and nodes read and write it without a lock: each
number has a fixed place. A lost number costs a verification.
"""

import hashlib
import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

_NUMBER = np.dtype("<i8")


class VerifiedFiles:
    """The record of a corpus: in memory, and in a file that other processes and later runs read."""

    def __init__(self, path: Path | None, files: int) -> None:
        """Read the record of a corpus of `files` files; with `path` = None it is in memory only."""
        self._path = path
        self._changed_ns = np.zeros(files, dtype=_NUMBER)
        stored = self._read(0, files)
        self._changed_ns[: len(stored)] = stored

    def has(self, file: int, changed_ns: int) -> bool:
        """Return whether this or another process verified a file with this ctime."""
        if self._changed_ns[file] != changed_ns:
            self._changed_ns[file] = self._read(file, 1).sum()
        return changed_ns != 0 and bool(self._changed_ns[file] == changed_ns)

    def add(self, file: int, changed_ns: int) -> None:
        """Record a file with this ctime as verified. A record that cannot be written is a warning."""
        self._changed_ns[file] = changed_ns
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.pwrite(descriptor, self._changed_ns[file].tobytes(), file * _NUMBER.itemsize)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s cannot be written (%s): the next run verifies the data again", self._path, error.strerror)
            self._path = None

    def _read(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Read the current record of `count` files, or of fewer if it is shorter."""
        if self._path is not None:
            try:
                return np.fromfile(self._path, dtype=_NUMBER, count=count, offset=first * _NUMBER.itemsize)
            except OSError:  # no file has been verified yet, or the next run verifies all of them again
                pass
        return np.zeros(count, dtype=_NUMBER)


def record_path(folder: Path, corpus: Path, fingerprint: str) -> Path:
    """Return the path in `folder` of the record of the corpus with a fingerprint that is in the folder `corpus`."""
    place = hashlib.sha256(os.path.realpath(corpus).encode()).hexdigest()[:8]
    return folder / f"{fingerprint}-{place}"
