"""Run the `train` of a recipe on every rank of a layout, and record what it computes, without a change to it.

`train` gets a monitor that records instead of one that observes, and the optimizer calls back before it updates the
weights: so the gradients are those that a fork's own loss, model and data have made.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.proof.forced_routing import ChoiceRecord, Choices, RouterUse, force_choices
from torchllm.proof.gather import FloatArray, ParameterFinding, gather_whole
from torchllm.runtime.process import Runtime
from torchllm.runtime.stop import StopRequests
from torchllm.train.step import StepResult

RecipeTrain = Callable[[Any, Runtime, Any], None]
"""a recipe's `train(config, runtime, monitor)`"""


NO_CHOICES: Mapping[RouterUse, Choices] = {}
"""each router chooses by its own scores"""


@dataclass
class Trained:
    """What a training has computed; whole tensors, by canonical parameter name."""

    losses: list[float] = field(default_factory=list)
    """per step, in nats per target token"""
    norms: list[float] = field(default_factory=list)
    """of the gradient before clipping, per step"""
    validation_losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, FloatArray]] = field(default_factory=list)
    """per step, before clipping"""
    tokens_per_expert: list[list[list[int]]] = field(default_factory=list)
    """per step, block with experts and expert"""
    parameters: dict[str, FloatArray] = field(default_factory=dict)
    """after the last step, buffers too"""
    choices: dict[RouterUse, Choices] = field(default_factory=dict)
    """of the experts, by router; of one process"""
    smallest_gap: float = math.inf
    """between experts that were chosen and others (`forced_routing.gap`); of one process"""
    findings: list[str] = field(default_factory=list)
    """what ranks do not agree on: step, parameter and how"""


class StepsRecorded(Exception):
    """The recipe has taken all steps that are recorded."""


class Recorder:
    """Stands in for the `Monitor` of a recipe: records steps instead of observing them, and ends the training."""

    def __init__(self, steps: int, choices: Mapping[RouterUse, Choices]) -> None:
        """Record `steps` steps. choices: those that the routers are made to take; of none are a process's recorded."""
        self.steps = steps
        self.choices = choices
        self.choice_record: ChoiceRecord | None = None
        self.trained = Trained()
        self.stages: Sequence[nn.Module] = ()
        self.max_grad_norm = 0.0
        self.gradients: dict[str, FloatArray] | None = None
        """of the step that is under way, on rank 0, as the optimizer gets them"""
        self.has_gradients = False

    def begin(self, config: Config, mesh: object, stages: Sequence[nn.Module], data: object, start: int) -> None:
        """Take note of the model, right before its first step."""
        self.stages = stages
        self.max_grad_norm = config.training.max_grad_norm
        if self.choices:
            force_choices(stages, self.choices)
        elif dist.get_world_size() == 1:
            self.choice_record = ChoiceRecord(stages)

    def before_update(self, *optimizer_and_arguments: object) -> None:
        """Gather the gradients of a step: a hook before an optimizer's step. A second optimizer finds them gathered."""
        if self.has_gradients:
            return
        self.has_gradients = True
        whole = gather_whole(self.stages, lambda parameter: parameter.grad)
        if whole is not None:
            self.gradients = whole.tensors
            self.note(f"step {len(self.trained.losses) + 1}", whole.findings)

    def note(self, when: str, findings: Sequence[ParameterFinding]) -> None:
        """Keep what ranks do not agree on."""
        for finding in findings:
            self.trained.findings.append(f"{when}, {finding.parameter}: {finding.message}")

    def log(
        self,
        n: int,
        result: StepResult,
        validation_loss: float | None = None,
        force: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Record step `n`. Raises StepsRecorded after the last one, so that nothing is saved."""
        norm = float(result.grad_norm)
        self.trained.losses.append(float(result.loss))
        self.trained.norms.append(norm)
        if result.routing is not None:
            self.trained.tokens_per_expert.append(result.routing.tokens_per_expert.tolist())
        if validation_loss is not None:
            self.trained.validation_losses.append(validation_loss)
        if self.gradients is not None:
            self.trained.gradients.append(unclipped(self.gradients, norm, self.max_grad_norm))
        self.gradients, self.has_gradients = None, False
        if n < self.steps:
            return
        weights = gather_whole(self.stages, lambda parameter: parameter)
        if weights is not None:
            self.trained.parameters = weights.tensors
            self.note(f"weights after step {n}", weights.findings)
        if self.choice_record is not None:
            self.trained.choices = self.choice_record.choices()
            self.trained.smallest_gap = self.choice_record.smallest_gap
        raise StepsRecorded

    def step(self, n: int) -> AbstractContextManager[None]:
        """Return a context around a step."""
        return nullcontext()

    def data_wait(self) -> AbstractContextManager[None]:
        """Return a context around the call that waits for the next batch."""
        return nullcontext()

    def pause(self, cause: str) -> AbstractContextManager[None]:
        """Return a context around an evaluation or a checkpoint."""
        return nullcontext()

    def add_sink(self, sink: object) -> None:
        """Write no records to a fork's sink."""

    def wants_change(self, n: int) -> bool:
        """Go on with the same config."""
        return False

    def end(self) -> None:
        """End what `begin` started: nothing."""


def unclipped(gradients: dict[str, FloatArray], norm: float, max_norm: float) -> dict[str, FloatArray]:
    """Return gradients as they were before `torchllm.optim.grad_norm.clip` scaled them."""
    if not max_norm or norm + 1e-6 <= max_norm:
        return gradients
    factor = (norm + 1e-6) / max_norm
    return {name: gradient * factor for name, gradient in gradients.items()}


def record_training(
    train: RecipeTrain, config: Config, steps: int, choices: Mapping[RouterUse, Choices] = NO_CHOICES
) -> Trained | None:
    """Take `steps` steps of a recipe, on every rank of the layout of `config`; returns the record on rank 0 alone.

    choices: of one process, which the routers are made to take. Call it on all ranks, inside the default process
    group. UserError if the recipe ends earlier.
    """
    rank, folder = dist.get_rank(), Path(config.run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.run.seed)
    runtime = Runtime(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=rank,
        device=torch.device("cpu"),
        folder=folder,
        host_group=dist.new_group(backend="gloo"),
        collect_interval=0,
        stop_requests=StopRequests(folder, rank, dist.get_world_size()),
    )
    recorder = Recorder(steps, choices)
    hook = register_optimizer_step_pre_hook(recorder.before_update)
    try:
        train(config, runtime, recorder)
    except StepsRecorded:
        runtime.end_votes()
        return recorder.trained if rank == 0 else None
    finally:
        hook.remove()
    raise UserError(f"train() of the recipe ended after {len(recorder.trained.losses)} of {steps} steps")
