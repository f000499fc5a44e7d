"""Counts the tokens of each expert in the backward pass of every micro batch.

FOOTGUN: do not count in a forward pass: recomputation runs it twice, and evaluation runs it too. A backward pass runs
once per micro batch of a step.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class RecordingRouter(Protocol):
    """Interface of a router for `RecordRouting`."""

    def record(self, logits: Tensor, experts: Tensor) -> Tensor | None:
        """Record a micro batch in its backward pass: logits (B, S, E), experts (B, S, K).

        Returns a gradient of the logits to add to the gradient of the loss; None: nothing to add.
        """


class RecordRouting(torch.autograd.Function):
    """Identity on the weights of the experts. Its backward pass reports the choices to the router."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, experts: Tensor, router: RecordingRouter) -> Tensor:
        ctx.save_for_backward(logits, experts)
        ctx.router = router
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        return gradient, ctx.router.record(logits, experts), None, None


def tokens_per_expert(chosen: Tensor, experts: int) -> Tensor:
    """Count how often each expert was chosen: (..., N) -> (..., E) int64.

    Not by `bincount`, which a dry run cannot trace.
    """
    counts = torch.zeros(*chosen.shape[:-1], experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(-1, chosen, torch.ones_like(chosen))
