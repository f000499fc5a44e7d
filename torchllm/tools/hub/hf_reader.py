"""Read the weights of a published model into this rank's shards.

A rank reads only the byte ranges of its shards, in blocks of at most `BLOCK` bytes, whatever the layout:
nothing is sent between ranks, and none ever holds a whole model.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchllm.checkpoint.load import fill_tied_copies
from torchllm.checkpoint.state import WEIGHTS, Part
from torchllm.tools.hub.dequantize import Box, decode
from torchllm.tools.hub.families.family import StoredPart, StoredTensor, stored_shapes
from torchllm.tools.hub.files import HubConfig, HubFiles
from torchllm.tools.hub.quantization import FilePiece
from torchllm.tools.hub.safetensors_header import ITEM_SIZES, FileTensor, HubFileError
from torchllm.tools.hub.weights import PartsToFill, initial_parts

THREADS = 4
"""of a rank, that read"""
BLOCK = 1 << 24
"""bytes of a tensor that a thread holds at once"""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
BYTES_PER_VALUE = 4
"""of a decoded tensor"""


class PartRead(NamedTuple):
    """A rank's read of one tensor in a file."""

    box: Box
    local: Tensor
    """destination, of the same shape as the box, or transposed; it has each `step`-th row"""
    is_transposed: bool
    step: int = 1


def read_hub_weights(
    files: HubFiles, config: HubConfig, stages: Sequence[nn.Module], to_fill: PartsToFill = initial_parts
) -> int:
    """Fill this rank's part of a model from the files of a published one; return how many bytes were read.

    Rows of the embedding that the files lack, and parameters that a published model cannot have (adapters), stay as
    they are. The tensors have been checked (`check_tensors`). Raises HubFileError if a file is shorter than it was.
    """
    parts = {key.removeprefix(WEIGHTS): part for key, part in to_fill(stages).items()}
    model = replace(config.model, tied_embeddings=False)
    shapes = stored_shapes(model)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="hf-read") as pool:
        reads = []
        for name, part in parts.items():
            if name in shapes:
                stored = files.family.tensors_of(name, shapes, model)
                reads.append(pool.submit(fill_part, files, stored, name, part))
        bytes_read = sum(read.result() for read in reads)
    fill_tied_copies(stages)
    return bytes_read


@torch.no_grad()
def fill_part(files: HubFiles, tensors: Sequence[StoredTensor], name: str, part: Part) -> int:
    """Read this rank's part of one parameter from the tensors that hold it; return how many bytes were read.

    Rows that they lack stay as they are. A tensor for an expert on another rank is skipped, and its file is not opened.
    """
    bytes_read = 0
    for stored in tensors:
        for place in stored.parts:
            if place.name == name:
                read = plan_read(stored, place, part)
                if read is not None:
                    bytes_read += _fill_from(files, stored, read)
    return bytes_read


def _fill_from(files: HubFiles, stored: StoredTensor, read: PartRead) -> int:
    """Read a box of one tensor, block by block; return how many bytes were read."""
    storage = files.quantization.storage_of(stored, files.tensors)
    bytes_per_value = max(BYTES_PER_VALUE, *(ITEM_SIZES[files.tensors[piece.key].dtype] for piece in storage.pieces))
    rows_at_a_time = max(1, BLOCK // (read.box.columns * bytes_per_value))
    together = math.lcm(storage.rows, 1 if read.is_transposed else read.step)
    rows_at_a_time = -(-rows_at_a_time // together) * together
    with PieceReader(files) as pieces:
        for row in range(0, read.box.rows, rows_at_a_time):
            rows = min(rows_at_a_time, read.box.rows - row)
            block = Box(read.box.first_row + row, rows, read.box.first_column, read.box.columns)
            values = decode(storage, stored, block, pieces.read)
            if read.is_transposed:
                read.local[:, row : row + rows].copy_(values[:, :: read.step].t())
            else:
                of_part = values[:: read.step]
                read.local[row // read.step :][: len(of_part)].copy_(of_part)
    return pieces.bytes_read


class PieceReader:
    """Reads boxes of the tensors in a model's files; each file is opened once."""

    def __init__(self, files: HubFiles) -> None:
        self.files = files
        self.bytes_read = 0
        self._handles: dict[Path, int] = {}

    def __enter__(self) -> "PieceReader":
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def read(self, piece: FilePiece, box: Box) -> Tensor:
        """Return a box of a tensor, (rows, columns). Raises HubFileError if the file is shorter than it was."""
        tensor = self.files.tensors[piece.key]
        path = self.files.folder / tensor.file
        if path not in self._handles:
            self._handles[path] = os.open(path, os.O_RDONLY)
        item_size = ITEM_SIZES[tensor.dtype]
        content = _read_block(self._handles[path], tensor, box, piece.columns, item_size)
        if content is None:
            raise HubFileError(f"{path}: {piece.key}: the file was cut short while it was read")
        self.bytes_read += box.rows * box.columns * item_size
        return torch.frombuffer(content, dtype=DTYPES[tensor.dtype]).view(box.rows, box.columns)


def plan_read(stored: StoredTensor, place: StoredPart, part: Part) -> PartRead | None:
    """Return the read of a tensor for this rank's part of a parameter; None if they do not overlap."""
    local, offset, size = part.local, part.region.offset, part.region.size
    if place.experts:
        index = place.expert - offset[0]
        if not 0 <= index < size[0]:
            return None
        local, offset, size = local[index], offset[1:], size[1:]
    if local.dim() == 1:
        local = local.unsqueeze(1)
    first_row = max(offset[0], place.first_own_row)
    # The embedding may have more rows than the file.
    rows = min(offset[0] + size[0], place.first_own_row + place.rows) - first_row
    if rows <= 0 or local.numel() == 0:
        return None
    first_column = place.first_column + (offset[1] if len(offset) == 2 else 0)
    columns = local.shape[1]
    local = local[first_row - offset[0] :][:rows]
    begin = place.first_row + (first_row - place.first_own_row) * place.step
    reached = (rows - 1) * place.step + 1
    if stored.is_transposed:
        return PartRead(Box(first_column, columns, begin, reached), local, True, place.step)
    return PartRead(Box(begin, reached, first_column, columns), local, False, place.step)


def _read_block(handle: int, tensor: FileTensor, block: Box, columns_in_file: int, item_size: int) -> bytearray | None:
    """Return the bytes of a block of rows and columns; None if the file ends before."""
    width = block.columns * item_size
    content = bytearray(block.rows * width)
    view = memoryview(content)
    begin = tensor.begin + (block.first_row * columns_in_file + block.first_column) * item_size
    if block.columns == columns_in_file:
        return content if _read_into(handle, view, begin) else None
    for row in range(block.rows):
        if not _read_into(handle, view[row * width : (row + 1) * width], begin):
            return None
        begin += columns_in_file * item_size
    return content


def _read_into(handle: int, view: memoryview, begin: int) -> bool:
    """Fill a buffer with the bytes of a file from `begin` on; return whether there were enough."""
    done = 0
    while done < len(view):
        count = os.preadv(handle, [view[done:]], begin + done)
        if count == 0:
            return False
        done += count
    return True
