"""Functions between the matrices of a feed-forward layer, other than SwiGLU (`layers.py`). All are elementwise."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx


def gelu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, of tensors of one shape, with the tanh form of GELU (arXiv 1606.08415)."""
    return F.gelu(gate, approximate="tanh") * up


def clamped_silu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate * sigmoid(1.702 gate) * (up + 1), where gate is at most 7 and up from -7 to 7 (gpt-oss).

    The published models have these constants; x * sigmoid(1.702 x) approximates GELU (arXiv 1606.08415).
    """
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1.0)


def gelu(x: Tensor) -> Tensor:
    """Return the tanh form of GELU (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 (Primer: So et al. 2021, arXiv 2109.08668)."""
    return _SquaredReLU.apply(x)


class _SquaredReLU(torch.autograd.Function):
    """Keeps max(x, 0) alone. autograd's own backward of the square would take three tensors as large as x, not one."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (gradient * positive).mul_(2.0)
