"""RMSNorm whose weight is added to 1: `model.norm_offset`."""

from typing import Any

import torch
from torch import Tensor

from torchllm.models.layers import widened


def offset_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / rms(x) * (1 + weight) in x's dtype: x (..., width), weight (width) -> (..., width).

    In float32 throughout, as published: 1 + weight in 16 bits would lose most digits of a weight.
    """
    return _OffsetRMSNorm.apply(x, weight, epsilon)


class _OffsetRMSNorm(torch.autograd.Function):
    """Keeps its input alone: autograd would keep it in float32, and its normalized self, five times the bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = widened(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * (1.0 + widened(weight))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normalized, wide = widened(x) * scale, widened(gradient)
        d_weight = (wide * normalized).flatten(0, -2).sum(0)
        d_normalized = wide * (1.0 + widened(weight))
        mean = (d_normalized * normalized).mean(-1, keepdim=True)
        return ((d_normalized - normalized * mean) * scale).to(x.dtype), d_weight.to(weight.dtype), None
