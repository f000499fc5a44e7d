"""All-to-alls between a part of the sequence and a part of the heads (DeepSpeed Ulysses, Jacobs et al. 2023).

n ranks share each sequence, of S tokens. (n - 1) / n of a rank's tensors are sent; the gradients go the same way back.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.runtime.torch_operations import all_to_all


def to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Map (B, S / n, heads, ...) -> (B, S, heads / n, ...), all tensors in one all-to-all."""
    ranks = dist.get_world_size(group)
    shapes = [(x.shape[2] // ranks, *x.shape[3:]) for x in tensors]
    x = torch.cat([x.unflatten(2, (ranks, -1)).flatten(3) for x in tensors], dim=3)  # (B, S / n, n, of a rank's heads)
    x = _AllToAll.apply(x.permute(2, 0, 1, 3).contiguous(), group)
    x = x.transpose(0, 1).flatten(1, 2)  # (B, S, of this rank's heads)
    parts = x.split([math.prod(shape) for shape in shapes], dim=2)
    return [part.unflatten(2, shape) for part, shape in zip(parts, shapes, strict=True)]


def to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Map (B, S, heads / n, ...) -> (B, S / n, heads, ...)."""
    x = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()  # (n, B, S / n, heads / n, ...)
    return _AllToAll.apply(x, group).movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """Maps (n, ...) -> (n, ...): element i of rank j becomes element j of rank i. Gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_to_all(gradient.contiguous(), ctx.group), None
