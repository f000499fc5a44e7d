"""Runs the forwards and backwards of a step.

`TrainStep` knows only `ForwardBackward`: micro batches and a scale in, the scaled loss out, gradients in the
parameters. So the step and the recipes need no `if` on the pipeline (`pipeline.py`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchllm.config import Parallel
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder
from torchllm.parallel.fsdp import begin_micro_batch, effective_zero_stage
from torchllm.runtime.heartbeat import beat


class ForwardBackward(Protocol):
    """Runs the forwards and backwards of one step on this rank."""

    stages: Sequence[Decoder]

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """Add the gradients of scale x loss sum; returns scale x loss sum of this rank's batches, float32 ().

        A rank without the last stage returns 0.
        """

    def loss_sum(self, batch: Batch) -> Tensor:
        """Return the loss sum of one batch, float32 (), without gradients; 0 on a rank without the last stage."""


class OneStage:
    """Runs every micro batch in turn through the whole model."""

    def __init__(self, stages: Sequence[Decoder], parallel: Parallel) -> None:
        self.stages = stages
        self.zero_stage = effective_zero_stage(parallel)

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """See `ForwardBackward`."""
        (model,) = self.stages
        losses = []
        for index, batch in enumerate(batches):
            beat("micro batch")
            begin_micro_batch(self.stages, self.zero_stage, last=index == len(batches) - 1)
            loss = forward_stage(model, batch.tokens, batch) * scale
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> Tensor:
        """See `ForwardBackward`."""
        (model,) = self.stages
        return forward_stage(model, batch.tokens, batch)


def forward_stage(stage: Decoder, x: Tensor, batch: Batch) -> Tensor:
    """Run a stage on tokens (B, S), or on the hidden states (B, S, D) of the stage before it."""
    return stage(x, batch.positions, batch.document_ids, batch.labels, batch.document_limit, batch.ahead)
