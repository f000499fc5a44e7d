"""The index of a checkpoint: its tensors, their cuts into pieces, and the rank that wrote each piece.

A sharded tensor is cut per dimension, so its pieces are the cells of a grid. Tensors of one shape and one sharding have
the same cuts and the same writers: their `PieceGrid` is stored once. The index of 2,172 tensors on 1,024 ranks, 2.2 M
pieces, is a JSON file of 0.3 MB, and no piece of a grid can overlap another or be missing. The place of a piece in its
writer's file is in the table at the end of that file (`data_file.py`). No torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchllm.checkpoint.manifest import DamagedCheckpoint

INDEX = "index.json"
Integers = NDArray[np.int64]


class Region(NamedTuple):
    """A box of a tensor's elements."""

    offset: tuple[int, ...]
    """index of its first element, per dimension"""
    size: tuple[int, ...]
    """number of elements, per dimension"""


class TensorPiece(NamedTuple):
    """A stored part of a tensor."""

    region: Region
    writer: int
    """rank whose file has the piece"""


@dataclass(frozen=True)
class PieceGrid:
    """The cuts of tensors of one shape, and the writers of the pieces."""

    cuts: tuple[Integers, ...]
    """per dimension the starts of the pieces, then the size of the dimension: increasing from 0"""
    writers: Integers
    """ranks that wrote the pieces, in row-major order of the grid"""

    def __post_init__(self) -> None:
        """Raise ValueError if the pieces do not fill the tensor exactly, once."""
        pieces = 1
        for cuts in self.cuts:
            if len(cuts) == 0 or cuts[0] != 0 or (np.diff(cuts) <= 0).any():
                raise ValueError("the cuts of a grid must increase from 0")
            pieces *= len(cuts) - 1
        if len(self.writers) != pieces or (self.writers < 0).any():
            raise ValueError(f"a grid of {pieces} pieces has {len(self.writers)} writers, or a negative one")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(cuts[-1]) for cuts in self.cuts)

    def piece(self, number: int) -> TensorPiece:
        """Return a piece by its number in row-major order."""
        writer = int(self.writers[number])
        offset, size = [], []
        for cuts in reversed(self.cuts):
            number, cell = divmod(number, len(cuts) - 1)
            begin, end = cuts[cell : cell + 2].tolist()
            offset.append(begin)
            size.append(end - begin)
        return TensorPiece(Region(tuple(offset[::-1]), tuple(size[::-1])), writer)


class TensorEntry(NamedTuple):
    number: int
    """its index in the order of the keys, as used in the tables of data files"""
    dtype: str
    """without "torch.": float32"""
    grid: PieceGrid


class Index:
    """All tensors of a checkpoint by key."""

    def __init__(self, tensors: Mapping[str, tuple[str, int]], grids: Sequence[PieceGrid]) -> None:
        """Number the tensors in the order of their keys. tensors: key -> dtype and number of the grid."""
        self.grids = list(grids)
        self.tensors: dict[str, TensorEntry] = {}
        for number, key in enumerate(sorted(tensors)):
            dtype, grid = tensors[key]
            self.tensors[key] = TensorEntry(number, dtype, self.grids[grid])

    def written_by(self, rank: int) -> list[str]:
        """Return the keys of the tensors with a piece written by `rank`, in order."""
        written = {id(grid) for grid in self.grids if (grid.writers == rank).any()}
        return [key for key, entry in self.tensors.items() if id(entry.grid) in written]

    def writers(self) -> set[int]:
        """Return the ranks that wrote a piece of any tensor."""
        writers: set[int] = set()
        for grid in self.grids:
            writers.update(np.unique(grid.writers).tolist())
        return writers

    def serialize(self) -> bytes:
        """Return the content of the index file."""
        numbers = {id(grid): number for number, grid in enumerate(self.grids)}
        grids = []
        for grid in self.grids:
            cuts = [cuts.tolist() for cuts in grid.cuts]
            grids.append({"cuts": cuts, "writers": grid.writers.tolist()})
        tensors = {key: [entry.dtype, numbers[id(entry.grid)]] for key, entry in self.tensors.items()}
        return json.dumps({"grids": grids, "tensors": tensors}, separators=(",", ":")).encode()


def parse_index(content: bytes, path: object) -> Index:
    """Return the index that a file holds. Raises DamagedCheckpoint, naming `path`, if it is none."""
    try:
        fields = json.loads(content)
        grids = []
        for entry in fields["grids"]:
            grids.append(PieceGrid(tuple(_integers(cuts) for cuts in entry["cuts"]), _integers(entry["writers"])))
        tensors: dict[str, tuple[str, int]] = {}
        for key, (dtype, grid) in fields["tensors"].items():
            if not isinstance(dtype, str) or not isinstance(grid, int) or not 0 <= grid < len(grids):
                raise ValueError(f"{key} has dtype {dtype!r} and grid {grid!r}")
            tensors[key] = (dtype, grid)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: not an index of tensors: {error}") from error
    return Index(tensors, grids)


def _integers(values: Any) -> Integers:
    """Return a list of whole numbers as an array. Raises ValueError for anything else."""
    array = np.array(values if values else np.zeros(0, np.int64))
    if array.dtype != np.int64 or array.ndim != 1:
        raise ValueError("not a list of whole numbers")
    return array
