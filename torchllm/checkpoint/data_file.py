"""The file of one rank in a checkpoint: its pieces of tensors one after the other, then a table with a sum of each.

    piece, piece, ...                   each piece as torch.save serializes it
    row, row, ...                       per piece: number of its tensor, length in bytes, XXH3-128
    number of rows                      8 bytes

The manifest has the sha256 of the table (rows and their number), so a reader verifies exactly the pieces that it reads,
and all sums together cover every byte. Each piece begins at the end of the previous one: a table cannot make them
overlap or point outside the file. `piece_table.py` reads it. No torch. The sums find damage, not forgery.
"""

import hashlib
import os
import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from torchllm.checkpoint.manifest import FileRecord

ROW = np.dtype([("number", "<u8"), ("length", "<u8"), ("sum", "V16")])
"""a row of the table: number of the tensor in the index, bytes of the piece, its XXH3-128"""
COUNT = struct.Struct("<Q")
"""number of rows"""
SUFFIX = ".distcp"


def data_file_name(rank: int) -> str:
    """Return the name of a rank's file, the same as in torch.distributed.checkpoint."""
    return f"__{rank}_0{SUFFIX}"


class DataFileWriter:
    """Writes a data file. Between two calls of `end_piece`, `write` takes the bytes of one piece."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._digest = xxhash.xxh3_128()
        self._length = 0
        self._rows: list[tuple[int, int, bytes]] = []

    def __enter__(self) -> "DataFileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._file.close()

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes to the piece; torch.save calls this."""
        self._digest.update(content)
        self._length += len(content)
        self._file.write(content)
        return len(content)

    def flush(self) -> None:
        """Flush to the operating system; torch.save calls this."""
        self._file.flush()

    def end_piece(self, number: int) -> None:
        """End the piece of the tensor with this number; numbers must increase."""
        self._rows.append((number, self._length, self._digest.digest()))
        self._digest.reset()
        self._length = 0

    def finish(self) -> FileRecord:
        """Write the table, force the file to disk, and return its record for the manifest."""
        table = np.array(self._rows, dtype=ROW).tobytes() + COUNT.pack(len(self._rows))
        self._file.write(table)
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(self._file.tell(), hashlib.sha256(table).hexdigest())
