import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.data_file import DataFileWriter, data_file_name
from torchllm.checkpoint.index import INDEX, Index, PieceGrid, parse_index
from torchllm.checkpoint.manifest import CheckpointError, DamagedCheckpoint, FileRecord
from torchllm.checkpoint.piece_table import read_piece_table
from torchllm.tools.hub.weights import load_weights

pytestmark = pytest.mark.quick


def piece_grid(cuts: list[list[int]], writers: list[int]) -> PieceGrid:
    return PieceGrid(tuple(np.array(entry, dtype=np.int64) for entry in cuts), np.array(writers, dtype=np.int64))


def test_what_is_written_is_read() -> None:
    grids = [piece_grid([[0, 3, 7], [0, 5]], [4, 0]), piece_grid([], [2]), piece_grid([[0]], [])]
    index = Index({"b": ("float32", 0), "a": ("int64", 1), "empty": ("bool", 2)}, grids)
    parsed = parse_index(index.serialize(), "x")
    assert parsed.serialize() == index.serialize()
    assert [(key, entry.number, entry.dtype, entry.grid.shape) for key, entry in parsed.tensors.items()] == [
        ("a", 0, "int64", ()),
        ("b", 1, "float32", (7, 5)),
        ("empty", 2, "bool", (0,)),
    ]
    assert parsed.written_by(0) == parsed.written_by(4) == ["b"]
    assert parsed.written_by(2) == ["a"]
    assert parsed.writers() == {0, 2, 4}


@pytest.mark.parametrize("cuts", [[[0, 2, 7], [0, 5], [0, 1, 2, 3]], [[0, 4]], []])
def test_pieces_are_numbered_in_row_major_order(cuts: list[list[int]]) -> None:
    writers = list(range(10, 10 + int(np.prod([len(entry) - 1 for entry in cuts]))))
    grid = piece_grid(cuts, writers)
    numbers = np.full(grid.shape, -1)
    for number, writer in enumerate(writers):
        piece = grid.piece(number)
        assert piece.writer == writer
        box = tuple(slice(o, o + s) for o, s in zip(*piece.region, strict=True))
        assert (numbers[box] == -1).all()
        numbers[box] = number
    assert list(dict.fromkeys(numbers.flatten().tolist())) == list(range(len(writers)))


GOOD = {"grids": [{"cuts": [[0, 2], [0, 3]], "writers": [0]}], "tensors": {"model.weight": ["float32", 0]}}
FORGED = {
    "no JSON": b"{",
    "no object": b"[]",
    "nothing in it": b"{}",
    "deep": b"[" * 100_000,
    "a negative cut": {"grids": [{"cuts": [[-1, 2], [0, 3]], "writers": [0]}]},
    "a hole at the begin": {"grids": [{"cuts": [[1, 2], [0, 3]], "writers": [0]}]},
    "cuts that go back": {"grids": [{"cuts": [[0, 2, 1], [0, 3]], "writers": [0, 0]}]},
    "an empty piece": {"grids": [{"cuts": [[0, 2, 2], [0, 3]], "writers": [0, 0]}]},
    "no cut": {"grids": [{"cuts": [[], [0, 3]], "writers": []}]},
    "a writer too few": {"grids": [{"cuts": [[0, 1, 2], [0, 3]], "writers": [0]}]},
    "a negative writer": {"grids": [{"cuts": [[0, 2], [0, 3]], "writers": [-1]}]},
    "a fraction": {"grids": [{"cuts": [[0, 2.0], [0, 3]], "writers": [0]}]},
    "a huge number": {"grids": [{"cuts": [[0, 2**70], [0, 3]], "writers": [0]}]},
    "a text": {"grids": [{"cuts": ["02", [0, 3]], "writers": [0]}]},
    "no such grid": {"tensors": {"model.weight": ["float32", 1]}},
    "a grid from the end": {"tensors": {"model.weight": ["float32", -1]}},
    "no dtype": {"tensors": {"model.weight": [0, 0]}},
    "no pair": {"tensors": {"model.weight": []}},
}


def is_refused(content: bytes) -> bool:
    try:
        parse_index(content, "index.json")
    except DamagedCheckpoint as error:
        return str(error).startswith("index.json: not an index of tensors")
    return False


def test_a_forged_index_is_refused() -> None:
    assert not is_refused(json.dumps(GOOD).encode())
    for name, forged in FORGED.items():
        assert is_refused(forged if isinstance(forged, bytes) else json.dumps(GOOD | forged).encode()), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = nn.Linear(3, 2)
    Checkpointer(config.Checkpoint(), tmp_path, [model], torch.optim.SGD(model.parameters())).save(1, {})
    return manifests.step_folder(tmp_path / "checkpoints", 1)


def plant(folder: Path, fields: dict[str, Any]) -> None:
    """Replace the index and make the manifest agree with it, as whoever crafts a checkpoint can."""
    publish_again(folder, INDEX, manifests.write_file(folder / INDEX, json.dumps(fields).encode()))


def publish_again(folder: Path, name: str, record: FileRecord) -> None:
    """Publish a checkpoint of which a file has been replaced."""
    manifest = manifests.read_manifest(folder)
    hidden = folder.rename(folder.with_name("being-changed"))
    manifests.publish(hidden, folder, replace(manifest, files={**manifest.files, name: record}))


def test_an_index_cannot_point_outside_the_manifest(folder: Path) -> None:
    fields = json.loads((folder / INDEX).read_bytes())
    fields["grids"][0]["writers"] = [7]
    plant(folder, fields)
    with pytest.raises(CheckpointError, match=r"files that the manifest does not list: \['__7_0\.distcp'\]"):
        load_weights(folder, [nn.Linear(3, 2)])


def test_a_tensor_that_its_file_lacks_is_refused(folder: Path) -> None:
    path = folder / data_file_name(0)
    first, *_ = read_piece_table(path, manifests.read_manifest(folder).files[path.name])
    content = path.read_bytes()[: first.length]
    path.unlink()
    with DataFileWriter(path) as file:
        file.write(content)
        file.end_piece(0)
        publish_again(folder, path.name, file.finish())
    with pytest.raises(DamagedCheckpoint, match=r"holds no piece of model\.weight"):
        load_weights(folder, [nn.Linear(3, 2)])


@pytest.mark.parametrize(("key", "value"), [("cuts", [[0, 2], [0, 4]]), ("dtype", "int32")])
def test_a_piece_that_is_not_what_the_index_says_is_refused(folder: Path, key: str, value: Any) -> None:
    fields = json.loads((folder / INDEX).read_bytes())
    number = fields["tensors"]["model.weight"][1]
    if key == "cuts":
        fields["grids"][number][key] = value
    else:
        fields["tensors"]["model.weight"] = [value, number]
    plant(folder, fields)
    model = nn.Linear(4, 2) if key == "cuts" else nn.Linear(3, 2)
    if key == "dtype":
        model.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.int32), requires_grad=False)
    with pytest.raises(DamagedCheckpoint, match=r"its piece of model\.weight is not a tensor of"):
        load_weights(folder, [model])
