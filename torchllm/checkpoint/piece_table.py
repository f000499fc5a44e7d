"""Read and verify the file of one rank in a checkpoint, which `data_file.py` describes and writes. No torch."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchllm.checkpoint.data_file import COUNT, ROW
from torchllm.checkpoint.manifest import DamagedCheckpoint, FileRecord, check_plain_file

ROW_OF_FORMAT_2 = np.dtype([("number", "<u8"), ("length", "<u8"), ("sum", "V32")])
"""its sums are SHA-256"""


class StoredPiece(NamedTuple):
    """The place of a piece of a tensor in its file."""

    offset: int
    """in bytes"""
    length: int
    """in bytes"""
    sum: bytes
    """16 bytes of XXH3-128, or 32 of SHA-256"""


class PieceTable:
    """The pieces in one file, by the number of their tensor."""

    def __init__(
        self, numbers: NDArray[np.int64], offsets: NDArray[np.int64], lengths: NDArray[np.int64], sums: NDArray[np.void]
    ) -> None:
        """Take columns with one entry per piece; `numbers` increase."""
        self.numbers, self.offsets, self.lengths, self.sums = numbers, offsets, lengths, sums

    def __iter__(self) -> Iterator[StoredPiece]:
        for row in range(len(self.numbers)):
            yield self._piece(row)

    def find(self, number: int) -> StoredPiece | None:
        """Return the piece of the tensor with this number; None if the file has none."""
        row = int(np.searchsorted(self.numbers, number))
        if row == len(self.numbers) or self.numbers[row] != number:
            return None
        return self._piece(row)

    def _piece(self, row: int) -> StoredPiece:
        return StoredPiece(int(self.offsets[row]), int(self.lengths[row]), self.sums[row].tobytes())


def read_piece_table(path: Path, record: FileRecord) -> PieceTable:
    """Return the table of a data file, verified. Raises DamagedCheckpoint if it is damaged."""
    check_file_size(path, record)
    damaged = DamagedCheckpoint(f"{path}: damaged: the sha256 of its table is not the manifest's")
    with path.open("rb", buffering=0) as file:
        if record.size < COUNT.size:
            raise damaged
        (count,) = COUNT.unpack(read_range(file.fileno(), record.size - COUNT.size, COUNT.size, path))
        for row in (ROW, ROW_OF_FORMAT_2):
            length = count * row.itemsize + COUNT.size
            if length > record.size:
                raise damaged
            table = read_range(file.fileno(), record.size - length, length, path)
            if hashlib.sha256(table).hexdigest() == record.sha256:
                break
        else:
            raise damaged
    rows = np.frombuffer(table, dtype=row, count=count)
    numbers, lengths = rows["number"].astype(np.int64), rows["length"].astype(np.int64)
    if (lengths < 0).any() or (numbers < 0).any() or (np.diff(numbers) <= 0).any():
        raise DamagedCheckpoint(f"{path}: not a table of pieces: a negative length, or numbers that do not increase")
    if sum(lengths.tolist()) != record.size - length:
        raise DamagedCheckpoint(f"{path}: not a table of pieces: their lengths do not add up to the file's")
    ends = np.cumsum(lengths)
    return PieceTable(numbers, ends - lengths, lengths, rows["sum"])


def read_piece(descriptor: int, piece: StoredPiece, path: Path) -> bytes:
    """Return the bytes of a piece from an open file, verified. Raises DamagedCheckpoint, naming `path`."""
    content = read_range(descriptor, piece.offset, piece.length, path)
    is_new = len(piece.sum) == ROW["sum"].itemsize
    if piece.sum != (xxhash.xxh3_128(content) if is_new else hashlib.sha256(content)).digest():
        raise DamagedCheckpoint(
            f"{path}: damaged: the sum of bytes {piece.offset} to {piece.offset + piece.length} is not the table's"
        )
    return content


def read_range(descriptor: int, offset: int, length: int, path: Path) -> bytes:
    """Return `length` bytes of an open file from `offset`. Raises DamagedCheckpoint if it ends before."""
    blocks = []
    missing = length
    while missing:
        block = os.pread(descriptor, missing, offset + length - missing)  # at most 2 GiB at a time
        if not block:
            raise DamagedCheckpoint(f"{path}: ends before byte {offset + length}")
        blocks.append(block)
        missing -= len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def check_data_file(path: Path, record: FileRecord) -> None:
    """Read all of a data file. Raises DamagedCheckpoint if a single bit is wrong."""
    table = read_piece_table(path, record)
    with path.open("rb", buffering=0) as file:
        for piece in table:
            read_piece(file.fileno(), piece, path)


def check_file_size(path: Path, record: FileRecord) -> None:
    """Raise DamagedCheckpoint if a file is missing, no regular file, or of another size than its record."""
    try:
        size = check_plain_file(path)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path}: missing") from error
    if size != record.size:
        raise DamagedCheckpoint(f"{path}: {size} bytes instead of {record.size}")
