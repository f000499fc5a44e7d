"""Output projection and loss in one module: the last thing a pipeline's last stage runs.

Both in one forward, so that chunks of logits live and die inside it, the vocabulary can be sharded, and FSDP gathers
the weight once. It returns sums: only the step knows how many target tokens there are over all ranks, and means of
means are wrong.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchllm.config import Model

IGNORED = -100
"""label of a position that has no target"""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log p(label), in nats, over the labels that are not `IGNORED`.

    logits (N, V), labels (N) -> () float32.
    """
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


class Head(nn.Module):
    """Computes the sum of the loss from hidden states and labels, or logits if there are no labels.

    `cross_entropy` (compiled, vocabulary-parallel), `project` (with its weight's gradient deferred) and `local` (the
    part of a sharded factor that is on this rank) are replaceable. If `chunk` is over 0, logits of only that many
    tokens exist at a time.
    """

    def __init__(self, model: Model, chunk: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab, model.hidden))
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
        self.local: Callable[[Tensor], Tensor] = lambda factor: factor
        self.chunk = chunk
        self.recomputes_logits = False
        """with a chunk: compute the logits again in the backward pass, instead of all gradients in the forward pass.
        For pipeline schedules that defer the weight's gradient, or run many forward passes before a backward pass,
        each of which would keep a gradient as large as the weight"""

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the sum of the loss in nats, () float32; with labels None, the logits (B, S, V).

        hidden: (B, S, D). labels: (B, S).
        """
        if labels is None:
            return self.project(hidden)
        rows = hidden.flatten(0, 1)
        targets = labels.flatten()
        if not self.chunk:
            return self._loss(rows, targets)
        if torch.is_grad_enabled() and not self.recomputes_logits:
            loss: Tensor = _LossWithGradients.apply(self.local(rows), self.local(self.weight), targets, self)
            return loss
        losses = []
        for some_rows, some_targets in zip(rows.split(self.chunk), targets.split(self.chunk), strict=True):
            losses.append(checkpoint(self._loss, some_rows, some_targets, use_reentrant=False))
        return torch.stack(losses).sum()

    def _loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return self.cross_entropy(self.project(rows), targets)

    def project(self, rows: Tensor) -> Tensor:
        """Return the logits of hidden states: (..., D) -> (..., V)."""
        return F.linear(rows, self.weight)


class _LossWithGradients(torch.autograd.Function):
    """The loss of chunks of tokens, whose gradients are computed in the forward pass, while their logits exist.

    That is three products per chunk; a recomputation in the backward pass has four (fused linear cross entropy, Hsu et
    al. 2024, arXiv 2410.10989). The gradients are linear in that of the loss, a number that the backward pass brings.
    Kept for it: the gradients of the rows and of the weight.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, head: Head) -> Tensor:
        d_weight = torch.zeros_like(weight)
        losses = []
        d_rows = []
        for some_rows, some_targets in zip(rows.split(head.chunk), targets.split(head.chunk), strict=True):
            chunk = _run_chunk(some_rows, weight, some_targets, head.cross_entropy, d_weight)
            losses.append(chunk.loss)
            d_rows.append(chunk.d_rows)
        ctx.save_for_backward(torch.cat(d_rows), d_weight)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_weight = ctx.saved_tensors
        return d_rows * d_loss, d_weight * d_loss, None, None


class _Chunk(NamedTuple):
    """Results of some tokens of a micro batch."""

    loss: Tensor
    """sum in nats, ()"""
    d_rows: Tensor
    """gradient of their hidden states, (n, D)"""


def _run_chunk(
    rows: Tensor, weight: Tensor, targets: Tensor, cross_entropy: Callable[[Tensor, Tensor], Tensor], d_weight: Tensor
) -> _Chunk:
    """Run forward and backward of n tokens: rows (n, D), targets (n); adds to d_weight, like weight (V, D)."""

    def add_to_weight(d_logits: Tensor) -> None:
        torch.addmm(d_weight, d_logits.t(), rows, out=d_weight)  # in place: there may be no larger tensor

    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        logits = F.linear(leaf, weight.detach())
        logits.register_hook(add_to_weight)
        loss = cross_entropy(logits, targets)
    del logits  # before the backward pass
    (d_rows,) = torch.autograd.grad(loss, leaf)
    return _Chunk(loss.detach(), d_rows)
