"""Run the `train` of a recipe on every rank of a layout, and record its results, without a change to it.

`train` gets a monitor that records instead of one that observes, and the optimizer calls back before it updates the
weights: so the gradients come from a fork's own loss, model and data.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchllm.checkpoint.checkpointer import CHECKPOINTERS
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.facts.parameters import canonical_name
from torchllm.parallel.local_tensor import local_tensor
from torchllm.runtime.process import Runtime
from torchllm.runtime.stop import StopSource
from torchllm.tools.proof.float64 import Float64
from torchllm.tools.proof.forced_routing import ChoiceRecord, Choices, RouterUse, force_choices
from torchllm.tools.proof.gather import FloatArray, ParameterFinding, gather_state, gather_whole, set_part
from torchllm.train.step import StepResult

RecipeTrain = Callable[[Any, Runtime, Any], None]
"""a recipe's `train(config, runtime, monitor)`"""


NO_CHOICES: Mapping[RouterUse, Choices] = {}
"""each router chooses by its own scores"""


class Recording(NamedTuple):
    """Options for recording a training, and changes to it."""

    steps: int
    """the number of the last step that is recorded"""
    choices: Mapping[RouterUse, Choices] = NO_CHOICES
    """experts of one process, which the routers are forced to choose"""
    weights: Sequence[Mapping[str, FloatArray]] = ()
    """of one process after each step: the training continues from them, so that gradients are at equal weights"""
    nudge: float = 0.0
    """added to, or subtracted from, each element of a gradient before the update, as a share of its `scales`"""
    in_float64: bool = False
    """float64 in place of float32"""
    saves: bool = False
    """whether the training ends after the checkpoint of its last step, not before"""


@dataclass
class Trained:
    """The results of a training; whole tensors, by canonical parameter name."""

    losses: list[float] = field(default_factory=list)
    """per step, in nats per target token"""
    norms: list[float] = field(default_factory=list)
    """of the gradient before clipping, per step"""
    validation_losses: dict[int, float] = field(default_factory=dict)
    """by step"""
    gradients: list[dict[str, FloatArray]] = field(default_factory=list)
    """per step, before clipping"""
    tokens_per_expert: list[list[list[int]]] = field(default_factory=list)
    """per step, block with experts and expert"""
    weights: list[dict[str, FloatArray]] = field(default_factory=list)
    """after the update of each step, buffers too"""
    extra_state: dict[str, FloatArray] = field(default_factory=dict)
    """of the recipe's checkpoints, after the last step"""
    start: int = 0
    """steps of the run that this one has resumed"""
    choices: dict[RouterUse, Choices] = field(default_factory=dict)
    """of the experts, by router; of one process"""
    smallest_gap: float = math.inf
    """between experts that were chosen and others (`forced_routing.gap`); of one process"""
    findings: list[str] = field(default_factory=list)
    """disagreements between ranks: step, parameter and how"""
    rounded: str = ""
    """file:line where float64 became float32; of a training in float64"""

    def since(self, start: int) -> "Trained":
        """Return the results after step `start`."""
        return replace(
            self,
            losses=self.losses[start:],
            norms=self.norms[start:],
            validation_losses={step: loss for step, loss in self.validation_losses.items() if step > start},
            gradients=self.gradients[start:],
            tokens_per_expert=self.tokens_per_expert[start:],
            weights=self.weights[start:],
        )

    @property
    def is_finite(self) -> bool:
        """Whether all losses, norms and weights are finite, so that others can be compared with them."""
        numbers = [*self.losses, *self.norms, *self.validation_losses.values()]
        weights = itertools.chain.from_iterable(state.values() for state in self.weights)
        return bool(np.isfinite(numbers).all()) and all(np.isfinite(weight).all() for weight in weights)


class StepsRecorded(Exception):
    """The recipe has taken all steps that are recorded."""


class LayoutRefused(UserError):
    """A rule of the model, or of the recipe, refuses a layout before the first step."""


class Recorder:
    """Stands in for the `Monitor` of a recipe: records steps instead of observing them, and ends the training."""

    def __init__(self, recording: Recording) -> None:
        """Record as requested. In one process the choices of experts are recorded too."""
        self.recording = recording
        self.observers: list[object] = []
        """a fork's, which are not called"""
        self.choice_record: ChoiceRecord | None = None
        self.trained = Trained()
        self.stages: Sequence[nn.Module] = ()
        self.parameters: list[tuple[str, nn.Parameter]] = []
        """by canonical name; taken while FSDP's weights are sharded"""
        self.max_grad_norm = 0.0
        self.gradients: dict[str, FloatArray] | None = None
        """of the current step, on rank 0, as the optimizer gets them"""
        self.has_gradients = False
        self.optimizer: object = None
        """whose update found the gradients"""

    def begin(self, config: Config, mesh: object, stages: Sequence[nn.Module], data: object, start: int) -> None:
        """Take note of the model, right before its first step."""
        self.stages = stages
        self.trained.start = start
        for stage in stages:
            for name, parameter in stage.named_parameters():
                self.parameters.append((canonical_name(name), parameter))
        self.max_grad_norm = config.training.max_grad_norm
        is_alone = dist.get_world_size() == 1
        if self.recording.choices:
            force_choices(stages, self.recording.choices, in_order=is_alone)
        if is_alone:
            self.choice_record = ChoiceRecord(stages)

    def before_update(self, optimizer: object, *arguments: object) -> None:
        """Gather the gradients of a step: a hook before an optimizer's step. A second optimizer finds them gathered.

        A second update of the same one is of a step that is repeated (`parallel/optimistic.py`).
        """
        if not self.stages:  # an optimizer may make its state by a step when a run is resumed
            return
        if self.has_gradients and optimizer is not self.optimizer:
            return
        self.has_gradients, self.optimizer = True, optimizer
        whole = gather_whole(self.stages, lambda parameter: parameter.grad)
        if whole is not None:
            self.gradients = whole.tensors
            self.note(f"step {self.trained.start + len(self.trained.losses) + 1}", whole.findings)
        if self.recording.nudge:
            nudge_gradients([parameter for _, parameter in self.parameters], self.recording.nudge)

    def note(self, when: str, findings: Sequence[ParameterFinding]) -> None:
        """Keep disagreements between ranks."""
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
        """Record step `n`. Raises StepsRecorded after the last one, so that nothing is saved, unless that is wanted."""
        norm = float(result.grad_norm)
        self.trained.losses.append(float(result.loss))
        self.trained.norms.append(norm)
        if result.routing is not None:
            self.trained.tokens_per_expert.append(result.routing.tokens_per_expert.tolist())
        if validation_loss is not None:
            self.trained.validation_losses[n] = validation_loss
        self.trained.gradients.append(unclipped(self.gradients or {}, norm, self.max_grad_norm))
        self.gradients, self.has_gradients = None, False
        weights = gather_whole(self.stages, lambda parameter: parameter)
        if weights is not None:
            self.trained.weights.append(weights.tensors)
            self.note(f"weights after step {n}", weights.findings)
        if n <= len(self.recording.weights):
            for name, parameter in self.parameters:
                if name in self.recording.weights[n - 1]:
                    set_part(parameter, self.recording.weights[n - 1][name])
        if n < self.recording.steps:
            return
        self._record_extra_state()
        if self.choice_record is not None:
            self.trained.choices = self.choice_record.choices()
            self.trained.smallest_gap = self.choice_record.smallest_gap
        if not self.recording.saves:
            raise StepsRecorded

    def _record_extra_state(self) -> None:
        """Gather the tensors that the recipe gives to its checkpoints besides model and optimizer."""
        tensors: dict[str, Tensor] = {}
        for checkpointer in CHECKPOINTERS:
            tensors |= checkpointer.extra_state
        whole = gather_state(tensors)
        if whole is not None:
            self.trained.extra_state = whole.tensors
            self.note(f"extra state after step {self.recording.steps}", whole.findings)

    def step(self, n: int) -> AbstractContextManager[None]:
        """Return a context around a step. Raises StepsRecorded if all have been taken."""
        if n > self.recording.steps:
            raise StepsRecorded
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


SMALLEST_SCALE = 1e-3
"""share of the model's largest gradient: errors of smaller gradients are relative to this share"""


def scales(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the scales that the errors of gradients are relative to. sizes: of the gradients."""
    smallest = SMALLEST_SCALE * max(sizes.values(), default=0.0)
    return {name: max(size, smallest) for name, size in sizes.items()}


@torch.no_grad()
def nudge_gradients(parameters: Sequence[nn.Parameter], nudge: float) -> None:
    """Change each nonzero element of one process's gradients by a share of its scale, up or down at random.

    The sign of `nudge` swaps up and down; the directions are the same in each step.
    """
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    sizes = {str(index): float(gradient.abs().max()) for index, gradient in enumerate(gradients)}
    generator = torch.Generator().manual_seed(0)
    for gradient, scale in zip(gradients, scales(sizes).values(), strict=True):
        signs = torch.randint(2, gradient.shape, generator=generator) * 2 - 1
        gradient.add_(signs * (gradient != 0) * (nudge * scale))


def record_training(train: RecipeTrain, config: Config, recording: Recording) -> Trained | None:
    """Take some steps of a recipe, on every rank of the layout of `config`; returns the record on rank 0 alone.

    Call it on all ranks, inside the default process group. LayoutRefused if the recipe raises a UserError before its
    first step, UserError if it ends before the last one.
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
        stop_requests=StopSource(),
    )
    recorder, float64 = Recorder(recording), Float64()
    hook = register_optimizer_step_pre_hook(recorder.before_update)
    try:
        with float64 if recording.in_float64 else nullcontext():
            train(config, runtime, recorder)
    except StepsRecorded:
        runtime.end_votes()
        recorder.trained.rounded = float64.rounded
        return recorder.trained if rank == 0 else None
    except UserError as error:
        if recorder.stages:
            raise
        raise LayoutRefused(str(error)) from error
    finally:
        hook.remove()
    taken = recorder.trained.start + len(recorder.trained.losses)
    raise UserError(f"train() of the recipe ended after {taken} of {recording.steps} steps")
