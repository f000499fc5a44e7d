"""The values of a model's tensors, made of what its files hold: a function for each method of `quantization.py`."""

from collections.abc import Callable
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from torchllm.tools.hub.families.family import StoredTensor
from torchllm.tools.hub.quantization import BlockFloat8, FilePiece, Plain, Quantization, Storage


class Box(NamedTuple):
    """Rows and columns of a tensor in a file; a vector has one column, and a stack has its matrices one after the
    other."""

    first_row: int
    rows: int
    first_column: int
    columns: int


ReadPiece = Callable[[FilePiece, Box], Tensor]
"""function that reads a box of a file's tensor, as it is there: (rows, columns)"""


def decode(storage: Storage, stored: StoredTensor, box: Box, read: ReadPiece) -> Tensor:
    """Return the values of a box of a tensor, (rows, columns), reading no more of its pieces than they are made of."""
    return _decode(storage.method, storage, stored, box, read)


@singledispatch
def _decode(method: Quantization, storage: Storage, stored: StoredTensor, box: Box, read: ReadPiece) -> Tensor:
    raise NotImplementedError(f"no function of dequantize.py reads {method}")


@_decode.register
def _(method: Plain, storage: Storage, stored: StoredTensor, box: Box, read: ReadPiece) -> Tensor:
    (piece,) = storage.pieces
    return read(piece, box)


@_decode.register
def _(method: BlockFloat8, storage: Storage, stored: StoredTensor, box: Box, read: ReadPiece) -> Tensor:
    """Multiply each value by the scale of its block, in float32."""
    weight, scale = storage.pieces
    rows_of_matrix = stored.shape[-2]
    scale_rows = [method.scale_row(box.first_row + row, rows_of_matrix) for row in range(box.rows)]
    scale_columns = [(box.first_column + column) // method.block_columns for column in range(box.columns)]
    first_row, first_column = scale_rows[0], scale_columns[0]
    rows, columns = scale_rows[-1] - first_row + 1, scale_columns[-1] - first_column + 1
    scales = read(scale, Box(first_row, rows, first_column, columns)).float()
    of_rows = scales[torch.tensor(scale_rows) - first_row]
    return read(weight, box).float() * of_rows[:, torch.tensor(scale_columns) - first_column]
