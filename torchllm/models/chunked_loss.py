"""The sum of the loss of a head whose logits exist for a chunk of tokens at a time."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchllm.models.head import Head
from torchllm.models.layers import soft_capped


class SumsWithGradients(torch.autograd.Function):
    """The sums of chunks of tokens, whose gradients are computed in the forward pass, while their logits exist.

    That is three products per chunk; a recomputation in the backward pass has four (fused linear cross entropy, Hsu et
    al. 2024, arXiv 2410.10989). The backward pass multiplies these gradients by the gradient of the loss, a number; the
    gradient of a z-loss's sum is always z_loss times the same number. Saved for the backward pass: the gradients of the
    rows and of the weight.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, head: Head) -> Tensor:
        d_weight = torch.zeros_like(weight) if weight.requires_grad else None
        sums = []
        d_rows = []
        for some_rows, some_targets in zip(rows.split(head.chunk), targets.split(head.chunk), strict=True):
            chunk = _run_chunk(some_rows, weight, some_targets, head, d_weight)
            sums.append(chunk.sums)
            d_rows.append(chunk.d_rows)
        ctx.save_for_backward(torch.cat(d_rows), d_weight)
        return torch.stack(sums).sum(0)

    @staticmethod
    def backward(ctx: Any, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_weight = ctx.saved_tensors
        d_loss = d_sums.flatten()[0]
        return d_rows * d_loss, None if d_weight is None else d_weight * d_loss, None, None


class _Chunk(NamedTuple):
    """Results of one chunk of tokens."""

    sums: Tensor
    """as `Head.cross_entropy` returns them"""
    d_rows: Tensor
    """gradient of their hidden states, (n, D)"""


def _add_product(d_weight: Tensor, rows: Tensor, d_logits: Tensor) -> None:
    """Add the weight's gradient of n tokens, in place: there may be no larger tensor."""
    if d_weight.dtype == d_logits.dtype:
        torch.addmm(d_weight, d_logits.t(), rows, out=d_weight)
    else:  # under autocast, whose products are in 16 bits
        d_weight += d_logits.t() @ rows.to(d_logits.dtype)


def _run_chunk(rows: Tensor, weight: Tensor, targets: Tensor, head: Head, d_weight: Tensor | None) -> _Chunk:
    """Run forward and backward of n tokens: rows (n, D), targets (n); adds to d_weight, like weight (V, D).

    d_weight: None if the weight is frozen.
    """
    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        logits = F.linear(leaf, weight.detach())
        if d_weight is not None:  # added as soon as the gradient of these logits exists, which is then freed
            logits.register_hook(partial(_add_product, d_weight, rows))
        sums = head.cross_entropy(soft_capped(logits, head.softcap), targets)
        objective = sums[0] + head.z_loss * sums[1] if head.z_loss else sums
    del logits  # before the backward pass
    (d_rows,) = torch.autograd.grad(objective, leaf)
    return _Chunk(sums.detach(), d_rows)
