import hashlib
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from tests.checkpoint.test_index import publish_again
from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.data_file import ROW, DataFileWriter, data_file_name
from torchllm.checkpoint.manifest import DamagedCheckpoint, FileRecord
from torchllm.checkpoint.piece_table import check_data_file, read_piece, read_piece_table
from torchllm.tools.hub.weights import load_weights

PIECES = {3: b"first", 7: b"", 8: b"the third piece"}


def write(path: Path) -> FileRecord:
    with DataFileWriter(path) as file:
        for number, content in PIECES.items():
            for byte in content:
                file.write(bytes([byte]))
            file.end_piece(number)
        return file.finish()


def test_pieces_come_back(tmp_path: Path) -> None:
    path = tmp_path / data_file_name(5)
    record = write(path)
    assert path.name == "__5_0.distcp"
    check_data_file(path, record)
    table = read_piece_table(path, record)
    assert record.size == path.stat().st_size
    with path.open("rb") as file:
        for number, content in PIECES.items():
            piece = table.find(number)
            assert piece is not None
            assert read_piece(file.fileno(), piece, path) == content
    assert [table.find(number) for number in (0, 4, 9)] == [None] * 3


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "file")
    with pytest.raises(FileExistsError):
        DataFileWriter(tmp_path / "file")


def forge(path: Path, rows: list[tuple[int, int, bytes]], count: int | None = None) -> FileRecord:
    """Write a data file with this table, and a record that agrees with it, as whoever crafts a checkpoint can."""
    table = np.array(rows, dtype=ROW).tobytes() + struct.pack("<Q", len(rows) if count is None else count)
    path.write_bytes(b"content" + table)
    return FileRecord(path.stat().st_size, hashlib.sha256(table).hexdigest())


SUM = xxhash.xxh3_128_digest(b"content")


FORGED: list[tuple[list[tuple[int, int, bytes]], str]] = [
    ([(0, 8, SUM)], "do not add up"),
    ([(0, 6, SUM)], "do not add up"),
    ([(0, 8, SUM), (1, 2**64 - 1, SUM)], "a negative length"),
    ([(0, 2**62, SUM), (1, 2**62, SUM), (2, 2**62, SUM), (3, 2**62, SUM), (4, 7, SUM)], "do not add up"),
    ([(1, 4, SUM), (0, 3, SUM)], "numbers that do not increase"),
    ([(1, 4, SUM), (1, 3, SUM)], "numbers that do not increase"),
    ([(2**63, 7, SUM)], "numbers that do not increase"),
    ([], "do not add up"),
]


def test_a_forged_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    check_data_file(path, forge(path, [(0, 7, SUM)]))
    for rows, message in FORGED:
        with pytest.raises(DamagedCheckpoint, match=message):
            read_piece_table(path, forge(path, rows))
    for count in (2, 2**40, 2**64 - 1):  # a table longer than its file
        with pytest.raises(DamagedCheckpoint, match="damaged"):
            read_piece_table(path, forge(path, [(0, 7, SUM)], count))
    path.write_bytes(b"1")
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        read_piece_table(path, FileRecord(1, hashlib.sha256(b"1").hexdigest()))


class Crafted:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, bait: Path) -> None:
        self.bait = str(bait)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.bait,)


def test_code_in_a_piece_does_not_run(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    Checkpointer(config.Checkpoint(), tmp_path, [model], torch.optim.SGD(model.parameters())).save(1, {})
    folder = manifests.step_folder(tmp_path / "checkpoints", 1)
    path, bait = folder / data_file_name(0), tmp_path / "ran"
    pickle.loads(pickle.dumps(Crafted(bait)))
    assert bait.exists(), "the bait must work, or the test proves nothing"
    bait.rmdir()
    path.unlink()
    with DataFileWriter(path) as file:
        for number in range(3):
            torch.save(Crafted(bait), file)
            file.end_piece(number)
        publish_again(folder, path.name, file.finish())
    with pytest.raises(DamagedCheckpoint, match=r"cannot read its piece of model\."):
        load_weights(folder, [nn.Linear(3, 2)])
    assert not bait.exists()
