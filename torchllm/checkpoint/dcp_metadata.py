"""The `.metadata` file of torch.distributed.checkpoint (DCP): read in checkpoints of version 0.1, written by a command.

    python -P -m torchllm.checkpoint.dcp_metadata STEP_FOLDER

DCP keeps the index of its tensors (name, shape, dtype, and which file holds which part) in `.metadata`, which is a
pickle, and a pickle can call any function while it is read. Checkpoints of version 0.1 (format 1) have one. It is read
only after its hash was found equal to the manifest's, and only the classes that such an index consists of can be named
in it.

The command writes a `.metadata` beside the files of a checkpoint, so that torch's own tools load it; this library never
reads that file.
"""

import hashlib
import io
import os
import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchllm.checkpoint.data_file import ROW, PieceTable, data_file_name, read_piece_table
from torchllm.checkpoint.index import INDEX, Index, Integers, PieceGrid, Region, parse_index
from torchllm.checkpoint.manifest import DamagedCheckpoint, FileRecord, check_plain_file, read_manifest
from torchllm.checkpoint.verify import check_content
from torchllm.runtime.torch_compat import storage_info

METADATA = ".metadata"

_METADATA_CLASSES = (
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = {
    ("torch", "Size"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    ("torch.serialization", "_get_layout"),  # finds a layout by its name
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),  # of the folder when it was written
    ("pathlib._local", "PosixPath"),  # the same, written by Python 3.13
}
"""module and name of everything that an index of tensors may refer to"""


class _RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that finds only the names in `_ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index of tensors")
        return super().find_class(module, name)


def _enum_member(kind: Any, name: str) -> Enum:
    """Return the member of an Enum: Python 3.11.0 to 3.11.3 pickles it as a call of getattr, for which this stands."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(
            f"it asks for {name!r} of what is no Enum, which has no place in an index of tensors"
        )
    return kind[name]


@dataclass(frozen=True)
class OldIndex:
    """What `.metadata` says, as this library keeps it."""

    index: Index
    tables: dict[int, PieceTable]
    """of the data files, by the rank that wrote them"""


def read_metadata(folder: Path, files: Mapping[str, FileRecord]) -> OldIndex:
    """Return the index of a checkpoint of format 1; `files` are those of its manifest.

    Raises DamagedCheckpoint if the file is damaged, is no such index, or points to files outside the manifest. No code
    from the file is run.
    """
    path = folder / METADATA
    if METADATA not in files:
        raise DamagedCheckpoint(f"{folder}: its manifest lists no {METADATA}")
    check_plain_file(path)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != files[METADATA].sha256:
        raise DamagedCheckpoint(f"{path}: damaged: its sha256 is not the manifest's")
    try:
        metadata = _RestrictedUnpickler(io.BytesIO(content)).load()
        is_index = isinstance(metadata, Metadata)
        for entry in metadata.state_dict_metadata.values():
            is_index = is_index and isinstance(entry, TensorStorageMetadata)
        named_files = {part.relative_path for part in metadata.storage_data.values()}
    except Exception as error:  # a crafted pickle can fail in any way
        raise DamagedCheckpoint(f"{path}: not an index of tensors: {error}") from error
    if not is_index:
        raise DamagedCheckpoint(f"{path}: not an index of tensors")
    if outside := named_files - files.keys():
        raise DamagedCheckpoint(f"{path}: points to files that the manifest does not list: {sorted(outside)}")
    try:
        return _convert(metadata)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise DamagedCheckpoint(f"{path}: not an index of tensors: {error}") from error


class _OldPiece(NamedTuple):
    """A piece of a tensor as `.metadata` has it."""

    region: Region
    writer: int
    offset: int
    """of its bytes in the writer's file"""
    length: int
    """in bytes"""


def _convert(metadata: Metadata) -> OldIndex:
    """Return what version 0.1 stored as this library keeps it. Raises ValueError if it is not of whole tensors."""
    pieces: dict[str, list[_OldPiece]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    world_size = sum(key.startswith("rng.cpu.") for key in metadata.state_dict_metadata)
    for old_key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        key, shape, row = old_key, tuple(entry.size), None
        if match := re.fullmatch(r"(rng\.\w+)\.(\d+)", old_key):  # one tensor per rank, now a row of a tensor
            key, row = match[1], int(match[2])
            shape = (world_size, *shape)
        shapes[key] = shape
        dtypes[key] = str(entry.properties.dtype).removeprefix("torch.")
        for chunk in entry.chunks:
            offset, size = tuple(chunk.offsets), tuple(chunk.sizes)
            stored = metadata.storage_data[MetadataIndex(old_key, chunk.offsets)]
            region = Region(offset, size) if row is None else Region((row, *offset), (1, *size))
            if 0 not in size:
                piece = _OldPiece(region, _writer_of(stored.relative_path), stored.offset, stored.length)
                pieces.setdefault(key, []).append(piece)
    grids: list[PieceGrid] = []
    tensors: dict[str, tuple[str, int]] = {}
    for key, shape in shapes.items():
        tensors[key] = (dtypes[key], len(grids))
        grids.append(_grid_of(key, shape, pieces.get(key, [])))
    index = Index(tensors, grids)
    return OldIndex(index, _tables_of(index, pieces))


def _writer_of(file: str) -> int:
    """Return the rank that wrote a data file. Raises ValueError if its name is of another form."""
    match = re.fullmatch(r"__(\d+)_0\.distcp", file)
    if not match:
        raise ValueError(f"{file!r} is not the name of a rank's file")
    return int(match[1])


def _grid_of(key: str, shape: tuple[int, ...], pieces: list[_OldPiece]) -> PieceGrid:
    """Return how a tensor is cut. Raises ValueError if the pieces are not the cells of a grid."""
    cuts = []
    for dimension, length in enumerate(shape):
        begins = {piece.region.offset[dimension] for piece in pieces}
        cuts.append(np.array([*sorted(begins), length], dtype=np.int64))
    by_offset = {piece.region.offset: piece for piece in pieces}
    grid = PieceGrid(tuple(cuts), np.zeros(len(pieces), dtype=np.int64))
    writers = []
    expected = 1
    for cuts_of_dimension in cuts:
        expected *= len(cuts_of_dimension) - 1
    if expected != len(pieces):
        raise ValueError(f"the pieces of {key} are not the cells of a grid")
    for cell in grid.pieces_in(Region((0,) * len(shape), shape)):
        if by_offset[cell.region.offset].region != cell.region:
            raise ValueError(f"the pieces of {key} are not the cells of a grid")
        writers.append(by_offset[cell.region.offset].writer)
    return PieceGrid(tuple(cuts), np.array(writers, dtype=np.int64))


def _tables_of(index: Index, pieces: Mapping[str, list[_OldPiece]]) -> dict[int, PieceTable]:
    """Return where the pieces lie, by file."""
    rows: dict[int, list[tuple[int, int, int]]] = {}
    for key, entry in index.tensors.items():
        for piece in pieces.get(key, []):
            rows.setdefault(piece.writer, []).append((entry.number, piece.offset, piece.length))
    tables = {}
    for writer, rows_of_file in rows.items():
        columns: Integers = np.array(rows_of_file, dtype=np.int64)
        if (np.diff(columns[:, 0]) <= 0).any() or (columns < 0).any():
            raise ValueError(f"{data_file_name(writer)} holds two pieces of a tensor, or one at a negative offset")
        no_sums = np.zeros(0, dtype=ROW["sha256"])
        tables[writer] = PieceTable(columns[:, 0], columns[:, 1], columns[:, 2], no_sums)
    return tables


def write_metadata(folder: Path) -> Path:
    """Write a `.metadata` beside the files of a checkpoint, for torch's own tools, and return its path.

    Verifies the index and every table, not the tensors. Raises CheckpointError.
    """
    manifest = read_manifest(folder)
    check_content(folder / INDEX, manifest.files[INDEX])
    index = parse_index((folder / INDEX).read_bytes(), folder / INDEX)
    tables = {}
    for writer in sorted(index.writers()):
        name = data_file_name(writer)
        tables[writer] = read_piece_table(folder / name, manifest.files[name])
    metadata = Metadata(state_dict_metadata={}, storage_data={})
    for key, entry in index.tensors.items():
        shape = entry.grid.shape
        chunks = []
        for piece in entry.grid.pieces_in(Region((0,) * len(shape), shape)):
            offset, size = torch.Size(piece.region.offset), torch.Size(piece.region.size)
            stored = tables[piece.writer].find(entry.number)
            if stored is None:
                raise DamagedCheckpoint(f"{folder / data_file_name(piece.writer)}: holds no piece of {key}")
            chunks.append(ChunkStorageMetadata(offset, size))
            info = storage_info(data_file_name(piece.writer), stored.offset, stored.length)
            metadata.storage_data[MetadataIndex(key, offset)] = info
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    path = folder / METADATA
    temporary = folder / f"{METADATA}.tmp"
    temporary.write_bytes(pickle.dumps(metadata))
    os.rename(temporary, path)
    return path


if __name__ == "__main__":
    print(f"wrote {write_metadata(Path(sys.argv[1]))}")
