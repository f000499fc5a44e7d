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
    """Sum of -log p(label) in nats over the labels that are not ignored. logits (N, V), labels (N) -> float32 ()"""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


class Head(nn.Module):
    """Hidden states and labels -> loss sum; without labels -> logits.

    Replaceable: `cross_entropy` (compiled, vocabulary-parallel) and `project` (its weight's gradient put off). With
    `chunk` tokens, logits of that many tokens exist at a time and are computed again in the backward pass; 0: all at
    once.
    """

    def __init__(self, model: Model, chunk: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab, model.hidden))
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
        self.chunk = chunk

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """hidden (B, S, D), labels (B, S) -> () float32; labels None -> logits (B, S, V)"""
        if labels is None:
            return self.project(hidden)
        rows, targets = hidden.flatten(0, 1), labels.flatten()
        if not self.chunk:
            return self._loss(rows, targets)
        chunks = zip(rows.split(self.chunk), targets.split(self.chunk), strict=True)
        return torch.stack([checkpoint(self._loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()

    def _loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return self.cross_entropy(self.project(rows), targets)

    def project(self, rows: Tensor) -> Tensor:
        """(..., D) -> logits (..., V)"""
        return F.linear(rows, self.weight)
