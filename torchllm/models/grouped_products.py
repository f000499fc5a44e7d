"""Products of groups of rows with one matrix per group, for the experts of a layer.

Rows are sorted by group, and `ends` says where each group ends; a group may be empty. Where it can,
`torch.nn.functional.grouped_mm` computes all groups: on a GPU in bfloat16 by one kernel, without waiting for the
device. Elsewhere each group is a separate product, which must read `ends`: slower, but right for every dtype and size.

Each function is one operation to torch (`torch.library.custom_op`), with shapes that do not depend on `ends`: the dry
run needs no numbers, and selective recomputation saves its result as it does for any product.

FOOTGUN: rows past the last group are in no product: garbage is in their places in the results, and in their gradients.

Shapes: T rows, E groups, M width of the input, N width of the output. ends: (E) int32, ascending, the last one is at
most T.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

ROW_BYTES = 16
"""the bytes of every row that `grouped_mm` takes are a multiple of this"""
DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
"""those that `grouped_mm` takes without waiting for the device, by type of device"""
MatrixShape = tuple[int, int]
StackShape = tuple[int, int, int]
"""of one matrix per group"""


@torch.library.custom_op("torchllm::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by the transposed matrix of its group: x (T, M), weight (E, N, M) -> (T, N)."""
    if _has_kernel(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out = _empty_rows(x, weight, ends)
    for group, rows in enumerate(_groups(ends)):
        matrix = weight[group].t()
        torch.mm(x[rows], matrix, out=out[rows])
    return out


@torch.library.custom_op("torchllm::grouped_weight_gradient", mutates_args=())
def grouped_weight_gradient(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the weights of `grouped_linear`: gradient (T, N), x (T, M) -> (E, N, M)."""
    if _has_kernel(gradient, x):
        return F.grouped_mm(gradient.t(), x, offs=ends)
    out = _empty_matrices(gradient, x, ends)
    for group, rows in enumerate(_groups(ends)):
        columns = gradient[rows].t()
        torch.mm(columns, x[rows], out=out[group])
    return out


def add_bias(rows: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Add to each row the bias of its group: rows (T, N), bias (E, N) -> (T, N)."""
    total: Tensor = _AddBias.apply(rows, bias.to(rows.dtype), ends)
    return total


class _AddBias(torch.autograd.Function):
    """Reads biases by row. autograd's own gradient of that would add up rows in an order that changes on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        row = torch.arange(len(rows), dtype=ends.dtype, device=ends.device)
        group = torch.searchsorted(ends, row, right=True)
        return rows + bias.index_select(0, group.clamp_(max=len(bias) - 1))  # rows past the last group have none

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (ends,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        ones = gradient.new_ones(len(gradient), ROW_BYTES // gradient.itemsize)  # the fewest that the kernel takes
        return gradient, grouped_weight_gradient(gradient, ones, ends)[..., 0], None


def _has_kernel(first: Tensor, second: Tensor) -> bool:
    """Return whether `grouped_mm` takes these factors. It needs a row, and with ep a rank may get none."""
    if not len(first) or first.dtype not in DTYPES.get(first.device.type, ()):
        return False
    for width in (*first.shape[1:], *second.shape[1:]):
        if width * first.itemsize % ROW_BYTES:
            return False
    return not first.is_cuda or torch.cuda.get_device_capability() >= (8, 0)


def _groups(ends: Tensor) -> Iterator[slice]:
    """Yield the rows of each group. Waits for the device."""
    start = 0
    for end in ends.tolist():
        yield slice(start, end)
        start = end


def _empty_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return a tensor for the result of `grouped_linear`."""
    rows, width = x.shape[0], weight.shape[1]
    return x.new_empty(rows, width)


def _empty_matrices(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return a tensor for the result of `grouped_weight_gradient`."""
    groups = ends.shape[0]
    height, width = gradient.shape[1], x.shape[1]
    return x.new_empty(groups, height, width)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    needs_d_x, needs_d_weight, _ = ctx.needs_input_grad
    gradient = gradient.contiguous()  # the gradient of a sum is an expanded number
    d_x = d_weight = None
    if needs_d_x:
        d_x = grouped_linear(gradient, weight.transpose(1, 2), ends)
    if needs_d_weight:
        d_weight = grouped_weight_gradient(gradient, x, ends)
    return d_x, d_weight, None


grouped_linear.register_fake(_empty_rows)
grouped_weight_gradient.register_fake(_empty_matrices)
grouped_linear.register_autograd(_backward, setup_context=_save_inputs)
for device_type in ("cpu", "cuda"):  # like torch's own products, so that torch.autocast includes experts
    grouped_linear.register_autocast(device_type, torch.bfloat16)


@register_flop_formula(torch.ops.torchllm.grouped_linear)
def _linear_flops(x: MatrixShape, weight: StackShape, *_: Any, **__: Any) -> int:
    """Return the operations of `grouped_linear` by the shapes of its inputs."""
    rows, input_width = x
    output_width = weight[1]
    return 2 * rows * input_width * output_width


@register_flop_formula(torch.ops.torchllm.grouped_weight_gradient)
def _weight_gradient_flops(gradient: MatrixShape, x: MatrixShape, *_: Any, **__: Any) -> int:
    """Return the operations of `grouped_weight_gradient` by the shapes of its inputs."""
    rows, output_width = gradient
    input_width = x[1]
    return 2 * rows * input_width * output_width
