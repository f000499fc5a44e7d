"""Appends whole records to a file: metrics.jsonl, or TensorBoard's."""

import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


class AppendedFile:
    """Appends records, each on disk when `write` returns. One that cannot be written leaves nothing of it in the file.

    It is made at the first record, so that a disk that is full when a run starts does not end it, and made again if it
    was deleted or renamed: the records behind an open descriptor would be lost in silence.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._length = 0
        """bytes of the file up to the end of its last whole record"""
        self._torn = False
        """a part of a record may follow"""

    def write(self, record: bytes) -> None:
        """Append a record. Raises OSError if it cannot be written; nothing of it is left before the next record."""
        if self._descriptor is not None and not self._is_at_path(self._descriptor):
            log.warning("%s was deleted or renamed: later records are in a new file of that name", self.path)
            self.close()
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._cut(self._descriptor)
        self._length = os.fstat(self._descriptor).st_size
        self._torn = True
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):  # tried again before the next record
                self._cut(self._descriptor)
            raise
        self._torn = False
        self._length += len(record)

    def _is_at_path(self, descriptor: int) -> bool:
        """Return whether the open file is the one that its path leads to."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        return False

    def _cut(self, descriptor: int) -> None:
        """Cut off the written part of a record that failed."""
        if self._torn:
            os.ftruncate(descriptor, self._length)
            self._torn = False

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        if self._descriptor is not None:
            with suppress(OSError):
                self._cut(self._descriptor)
            self._torn = False
            os.close(self._descriptor)
            self._descriptor = None
