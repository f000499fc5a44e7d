"""Pipeline stages: which blocks and ends of the model this rank holds, and how a step's micro batches go through them.

The step asks only `ForwardBackward`: micro batches and a scale in, the scaled loss out, gradients in the parameters.
One stage holds everything today, and its schedule is one forward and one backward a micro batch.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchllm.config import Parallel
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder
from torchllm.parallel.fsdp import begin_micro_batch, effective_zero_stage


class ForwardBackward(Protocol):
    """One step's forwards and backwards on this rank."""

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """Add d(scale x loss sum) to the gradients; returns scale x loss sum of this rank's batches, float32 ()."""


class OneStage:
    """Every micro batch in turn through the whole model."""

    def __init__(self, stages: Sequence[Decoder], parallel: Parallel) -> None:
        self.stages = stages
        self.zero_stage = effective_zero_stage(parallel)

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """See `ForwardBackward`."""
        (model,) = self.stages
        losses = []
        for index, batch in enumerate(batches):
            begin_micro_batch(self.stages, self.zero_stage, last=index == len(batches) - 1)
            loss = model(batch.tokens, batch.positions, batch.document_ids, batch.labels) * scale
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()
