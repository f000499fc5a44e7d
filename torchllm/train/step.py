"""One optimizer step: micro batches -> token-normalised backward -> finite check -> clip -> update."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.config import Training
from torchllm.config.errors import UserError
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder
from torchllm.models.head import IGNORED
from torchllm.optim.grad_norm import clip, grad_norm
from torchllm.optim.optimizer import apply_if_finite
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.context import shard_sequence
from torchllm.parallel.mesh import Mesh
from torchllm.parallel.pipeline import ForwardBackward
from torchllm.runtime.phase import phase


class StepResult(NamedTuple):
    """What a step did. The tensors are on the device and equal on all ranks; reading one waits for it."""

    loss: Tensor
    """mean loss in nats over the step's target tokens of all ranks, float32 ()"""
    grad_norm: Tensor
    """global norm before clipping, float64 ()"""
    tokens: Tensor
    """target tokens of all ranks, int64 ()"""
    pairs: Tensor
    """(query, key) pairs that the causal and document masks leave, of all ranks, int64 ()"""
    learning_rate: float
    skipped: Tensor
    """steps of this process so far that were not applied because loss or gradient was not finite, int64 ()"""
    consecutive: Tensor
    """longest run of such steps, the latest included, int64 ()"""


class TrainStep:
    """Takes one step on all ranks; the same call whatever the layout."""

    def __init__(
        self,
        stages: Sequence[Decoder],
        forward_backward: ForwardBackward,
        optimizer: torch.optim.Optimizer,
        learning_rate: LearningRate,
        mesh: Mesh,
        training: Training,
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.forward_backward = forward_backward
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.mesh = mesh
        self.training = training
        self.device = device
        self.skipped, self.run, self.longest = torch.zeros(3, dtype=torch.int64, device=device)

    def __call__(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """Step number `step` (from 1) on this rank's micro batches of it."""
        batches = [shard_sequence(batch.to(self.device), self.mesh) for batch in batches]
        counts = [((batch.labels != IGNORED).sum(), (batch.positions + 1).sum()) for batch in batches]
        sums = torch.stack([torch.stack(pair) for pair in counts]).sum(0)
        dist.all_reduce(sums, group=self.mesh.loss_group)  # before the first backward: every gradient has its scale
        tokens, pairs = sums
        with phase("forward_backward"):
            loss = self.forward_backward(batches, 1.0 / tokens.clamp(min=1))
        # Over all ranks, not the data's alone: a nan on one tp rank must stop its peers, which hold the same loss, too.
        dist.all_reduce(loss)
        loss = loss / self.mesh.tp.size()
        norm = grad_norm(self.stages, self.device)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        clip(self.stages, norm, self.training.max_grad_norm)
        learning_rate = self.learning_rate(step)
        with phase("optimizer"):
            apply_if_finite(self.optimizer, learning_rate, finite)
            self.optimizer.zero_grad()
        self.skipped = self.skipped + ~finite
        self.run = (self.run + 1) * ~finite
        self.longest = torch.maximum(self.longest, self.run)
        return StepResult(loss, norm, tokens, pairs, learning_rate, self.skipped, self.longest)


def check_finite(training: Training, step: int, result: StepResult) -> None:
    """At a logged step: UserError where the run's policy for steps that are not finite says to stop."""
    skipped, consecutive = int(result.skipped), int(result.consecutive)
    if training.on_nonfinite == "stop" and skipped:
        raise UserError(
            f"loss or gradient was not finite in {skipped} step(s) up to step {step} (loss {float(result.loss):g}, "
            f"gradient norm {float(result.grad_norm):g}); none was applied. Lower optimizer.learning_rate, look at the "
            'data of these steps, or set training.on_nonfinite = "skip".'
        )
    if consecutive >= training.max_consecutive_nonfinite:
        raise UserError(
            f"loss or gradient was not finite in {consecutive} steps in a row up to step {step}, the limit of "
            "training.max_consecutive_nonfinite; none was applied. Resume from an earlier checkpoint with a lower "
            "optimizer.learning_rate."
        )
