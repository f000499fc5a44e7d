"""Read files with known checksums, and refuse damaged bytes.

Files are read by `pread`, not memory-mapped. With a map, a truncated or unreadable file kills the process by SIGBUS,
while a failed read is an error that names the file; a map needs a request per page; and before Python 3.13 each map
keeps a file descriptor. The processes of a node share the page cache either way.

A process checks each MiB of a file against its checksum when it first reads from it; it then reads the whole MiB.
Files that were verified earlier (see `verification.py`) are not checked again.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from torchllm.config.errors import DataError
from torchllm.config.files import open_regular

BLOCK = 2**20
"""bytes under one checksum; the last block of a file is shorter"""

BlockSums = npt.NDArray[np.void]
"""the checksum of each block of a file: 16 bytes of XXH3-128, or 4 of CRC-32 in a corpus of format 2"""


def has_sum(block: bytes, checksum: np.void) -> bool:
    """Return whether a block has its checksum."""
    if checksum.itemsize == 16:
        return xxhash.xxh3_128_digest(block) == checksum.tobytes()
    return zlib.crc32(block).to_bytes(4, "little") == checksum.tobytes()


class CorpusFile(NamedTuple):
    """A file of a corpus, and the size that it must have."""

    path: Path
    size: int
    """in bytes"""

    def block(self, number: int) -> range:
        """Return the range of a block's bytes."""
        return range(number * BLOCK, min((number + 1) * BLOCK, self.size))


def blocks_of(where: range) -> range:
    """Return the numbers of the blocks with these bytes of a file."""
    return range(where.start // BLOCK, -(-where.stop // BLOCK))


class FileState(NamedTuple):
    """A file as it was when it was looked at."""

    path: Path
    changed_ns: int
    """ctime in nanoseconds since 1970"""


class DamagedFile(DataError):
    """A file of a corpus differs from the file that was written."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{path} {fault}: copy or prepare the corpus again")
        self.path = path
        self.fault = fault

    def __reduce__(self) -> tuple[type["DamagedFile"], tuple[Path, str]]:
        return DamagedFile, (self.path, self.fault)  # for pickle, which would copy only the text


def look_at(file: CorpusFile) -> FileState:
    """Return the state of a file. Raises DataError if it is missing or has another size than expected.

    It is opened: then a network file system asks its server, while a stat may be answered from a cache.
    """
    opened = CheckedFile(file)
    opened.close()
    return FileState(file.path, opened.changed_ns)


def damaged_blocks(file: CorpusFile, blocks: Sequence[int]) -> DamagedFile:
    """Return the error of blocks that do not have their checksum."""
    first = file.block(blocks[0])
    fault = f"is damaged: its bytes {first.start:,} to {first.stop - 1:,} do not have their checksum"
    if len(blocks) > 1:
        fault += f", nor do {len(blocks) - 1} other MiB"
    return DamagedFile(file.path, fault)


class Checksums(NamedTuple):
    """How to check the blocks of a file when they are first read."""

    sums: BlockSums
    is_checked: npt.NDArray[np.bool_]
    """whether this process has checked a block, one entry per block; CheckedFile writes it"""


FindChecksums = Callable[[int], Checksums | None]
"""returns the checksums of a file, given its ctime in nanoseconds since 1970; None: do not check it"""


def unchecked(changed_ns: int) -> None:
    """Disable the check of a file; a FindChecksums."""


class CheckedFile:
    """A file open for reading. Its errors are DataErrors that name it."""

    def __init__(self, file: CorpusFile, find_checksums: FindChecksums = unchecked) -> None:
        """Open `file`. Raises DataError if it is missing or has another size."""
        self.file = file
        try:
            self._descriptor = open_regular(file.path)
            status = os.fstat(self._descriptor)
        except FileNotFoundError:
            raise DamagedFile(file.path, "is missing") from None
        except OSError as error:
            raise DataError(f"{file.path} cannot be opened: {error.strerror}") from None
        self.changed_ns = status.st_ctime_ns  # not the mtime, which programs such as `cp -p` set
        if status.st_size != file.size:
            self.close()
            raise DamagedFile(file.path, f"is {status.st_size:,} bytes, the corpus says {file.size:,} bytes")
        self._checksums = find_checksums(self.changed_ns)

    def read(self, dtype: str, count: int, offset: int) -> npt.NDArray[Any]:
        """Return `count` numbers from `offset` (in bytes) on. Raises DataError if they are damaged."""
        size = count * np.dtype(dtype).itemsize
        if self._checksums is not None:
            self._check_blocks(self._checksums, offset, offset + size)
        return np.frombuffer(self._read_bytes(size, offset), dtype)

    def read_block(self, number: int) -> bytes:
        """Return a block, unchecked."""
        where = self.file.block(number)
        return self._read_bytes(len(where), where.start)

    def _check_blocks(self, checksums: Checksums, start: int, stop: int) -> None:
        """Check the blocks with the bytes start <= i < stop that this process has not checked yet."""
        for number in blocks_of(range(start, stop)):
            if not checksums.is_checked[number]:
                if not has_sum(self.read_block(number), checksums.sums[number]):
                    raise damaged_blocks(self.file, [number])
                checksums.is_checked[number] = True

    def _read_bytes(self, size: int, offset: int) -> bytes:
        path = self.file.path
        try:
            content = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise DataError(f"{path} cannot be read at byte {offset:,}: {error.strerror}") from error
        if len(content) != size:
            end = os.fstat(self._descriptor).st_size
            raise DamagedFile(path, f"became shorter while it was open: it ends at byte {end:,}")
        return content

    def close(self) -> None:
        os.close(self._descriptor)
