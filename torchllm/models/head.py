"""Output projection and loss in one module: the last thing a pipeline's last stage runs.

Both in one forward, so that chunks of logits live and die inside it, the vocabulary can be sharded, and FSDP gathers
the weight once. It returns sums: only the step knows how many target tokens there are over all ranks, and means of
means are wrong.
"""

from collections.abc import Callable

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

    `cross_entropy` (compiled, vocabulary-parallel) and `project` (with its weight's gradient deferred) are replaceable.
    If `chunk` is over 0, logits of only that many tokens exist at a time, and are computed again in the backward pass.
    """

    def __init__(self, model: Model, chunk: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab, model.hidden))
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
        self.chunk = chunk

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
        losses = []
        for some_rows, some_targets in zip(rows.split(self.chunk), targets.split(self.chunk), strict=True):
            losses.append(checkpoint(self._loss, some_rows, some_targets, use_reentrant=False))
        return torch.stack(losses).sum()

    def _loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return self.cross_entropy(self.project(rows), targets)

    def project(self, rows: Tensor) -> Tensor:
        """Return the logits of hidden states: (..., D) -> (..., V)."""
        return F.linear(rows, self.weight)
