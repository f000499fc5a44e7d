"""The values of a model's tensors, made from the data in its files: a function for each method of `quantization.py`."""

from collections.abc import Callable
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from torchllm.tools.hub.families.family import StoredTensor
from torchllm.tools.hub.quantization import MXFP4_BLOCK, BlockFloat8, FilePiece, Mxfp4, Plain, Quantization, Storage


class Box(NamedTuple):
    """Rows and columns of a tensor in a file; a vector has one column, and a stack has its matrices one after the
    other."""

    first_row: int
    rows: int
    first_column: int
    columns: int


FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""of the lower three bits; the fourth is the sign"""
EXPONENT_BIAS = 127
"""a byte of scales is an exponent of 2 above this"""

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


@_decode.register
def _(method: Mxfp4, storage: Storage, stored: StoredTensor, box: Box, read: ReadPiece) -> Tensor:
    """Multiply each value by its block's power of 2, in float32, which is exact. Files have outputs as rows."""
    packed, scales = storage.pieces
    inputs, outputs = stored.shape[-2:]
    expert, first_input = divmod(box.first_row, inputs)
    first_output = expert * outputs + box.first_column
    first_block, end = first_input // MXFP4_BLOCK, -(-(first_input + box.rows) // MXFP4_BLOCK)
    blocks, half = end - first_block, MXFP4_BLOCK // 2
    exponents = read(scales, Box(first_output, box.columns, first_block, blocks)).int() - EXPONENT_BIAS
    pairs = read(packed, Box(first_output, box.columns, first_block * half, blocks * half))
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(box.columns, blocks, MXFP4_BLOCK)
    table = torch.tensor((*FLOAT4_VALUES, *(-value for value in FLOAT4_VALUES)))
    values = torch.ldexp(table[codes.int()], exponents.unsqueeze(-1)).flatten(1)
    begin = first_input - first_block * MXFP4_BLOCK
    return values[:, begin : begin + box.rows].t()
