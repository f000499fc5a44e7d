"""Every optimizer, with each setting that changes its state, is saved and resumed in place and on another layout."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.checkpoint.test_resume_layouts import digests
from tests.parity import Settings, Trainer, tiny
from tests.workers import run
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.config import Checkpoint, Optimizer
from torchllm.facts.parameters import canonical_name
from torchllm.optim.average import WeightAverage
from torchllm.optim.optimizer import build_optimizer, parameter_groups
from torchllm.parallel.local_tensor import local_tensor

exhaustive = pytest.mark.exhaustive
SAVED = 2
"""step of the checkpoint"""
SMALL: Settings = {"model.layers": 2, "training.micro_batch_size": 2}
SHARDED: Settings = {**SMALL, "parallel.dp_shard": 2, "parallel.zero_stage": 3}
PIPELINED: Settings = {**SMALL, "parallel.pp": 2, "parallel.schedule": "1F1B"}
SGD: Settings = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1}
MOMENTUM: Settings = SGD | {"optimizer.momentum": 0.9}
MUON: Settings = {"optimizer.name": "muon"}
AVERAGE: Settings = {"optimizer.ema_decay": 0.5}
FROZEN: Settings = {"model.frozen": r"embed_tokens.*|layers\.0\..*"}
"""all of the first rank of a pipeline"""
LORA: Settings = {"lora.rank": 2}
SETTINGS: dict[str, Settings] = {
    "adamw": {},
    "adamw, bfloat16": {"optimizer.state_dtype": "bfloat16"},
    "adamw, int8": {"optimizer.state_dtype": "int8"},
    "adamw, average, frozen": AVERAGE | FROZEN,
    "sgd": SGD,
    "sgd, average": SGD | AVERAGE,
    "sgd, frozen": SGD | FROZEN,
    "sgd, updates": SGD | LORA,
    "sgd, momentum": MOMENTUM,
    "sgd, momentum, average, frozen": MOMENTUM | AVERAGE | FROZEN,
    "muon": MUON,
    "muon, bfloat16": MUON | {"optimizer.state_dtype": "bfloat16"},
    "muon, int8": MUON | {"optimizer.state_dtype": "int8"},
    "muon, average, frozen": MUON | AVERAGE | FROZEN,
}
BY_DEFAULT = (*("adamw, int8", "adamw, average, frozen", "sgd, updates", "muon, average, frozen"),)
"""each optimizer; states in 8 bits and averages with one"""


class ReadsFoundInf(torch.optim.Optimizer):
    """SGD of a fork that skips a step by itself, as torch's fused optimizers do."""

    _step_supports_amp_scaling = True
    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad * (group["lr"] * (self.found_inf == 0)))


class MovesFromStart(torch.optim.Optimizer):
    """SGD of a fork whose state does not begin with zeros: it is the weights from before the first step."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            for weight in group["params"]:
                start = self.state[weight].setdefault("start", weight.detach().clone())
                weight.lerp_(start, 0.1).sub_(weight.grad * group["lr"])


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "reads found_inf": ReadsFoundInf,
    "moves from its start": MovesFromStart,
    "Adam": torch.optim.Adam,
    "Adam, fused": lambda groups: torch.optim.Adam(groups, fused=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "ASGD": torch.optim.ASGD,
    "SGD": torch.optim.SGD,
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
}
"""of forks; those of torch.optim are in a list of docs/fork_a_recipe.md"""
QUICK = ("reads found_inf", "AdamW, fused")


class Run:
    """What a recipe builds on this rank, for steps from a checkpoint on."""

    def __init__(self, settings: Settings, optimizer: str, folder: Path, asynchronous: bool) -> None:
        self.trainer = Trainer(tiny(settings))
        if optimizer:
            made = OPTIMIZERS[optimizer](parameter_groups(self.trainer.stages, self.trainer.config.optimizer))
            self.trainer.optimizer = self.trainer.step.optimizer = made
        average = WeightAverage(self.trainer.stages, self.trainer.config.optimizer.ema_decay)
        average.follow(self.trainer.optimizer)
        self.checkpoints = Checkpointer(
            Checkpoint(asynchronous=asynchronous),
            folder,
            self.trainer.stages,
            self.trainer.optimizer,
            host_group=dist.group.WORLD,
            record={"config": asdict(self.trainer.config)},
            extra_state=average.tensors,
        )
        self.is_resumed = self.checkpoints.resume() is not None
        assert not (self.is_resumed and self.checkpoints.missing_extra_state)
        average.restart(self.checkpoints.missing_extra_state)
        self.average = average

    def take(self, *steps: int) -> list[float]:
        return [self.trainer.step(step, self.trainer.batches(step)).loss.item() for step in steps]

    def digests(self) -> dict[str, str]:
        return digests(self.trainer.stages, self.trainer.optimizer, self.average.tensors)


def save_and_resume(settings: Settings, optimizer: str, folder: Path, asynchronous: bool) -> None:
    saving = Run(SHARDED | settings, optimizer, folder, asynchronous)
    saving.take(*range(1, SAVED + 1))
    saved = saving.digests()
    saving.checkpoints.save(SAVED, {})
    losses = saving.take(SAVED + 1, SAVED + 2)
    last = saving.digests()
    saving.checkpoints.close()
    assert saved != last

    in_place = Run(SHARDED | settings, optimizer, folder, asynchronous)
    assert (in_place.is_resumed, in_place.digests()) == (True, saved)
    assert (in_place.take(SAVED + 1, SAVED + 2), in_place.digests()) == (losses, last)

    elsewhere = Run(PIPELINED | settings, optimizer, folder, asynchronous)
    assert (elsewhere.is_resumed, elsewhere.digests()) == (True, saved)
    assert elsewhere.take(SAVED + 1, SAVED + 2) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else pytest.param(name, marks=exhaustive) for name in SETTINGS]
)
def test_an_optimizer_of_the_library_goes_on(name: str, tmp_path: Path) -> None:
    run(save_and_resume, 2, SETTINGS[name], "", tmp_path, False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.exhaustive]) for name in OPTIMIZERS]
)
def test_an_optimizer_of_a_fork_goes_on(name: str, tmp_path: Path) -> None:
    """With saves in the background: their memory is taken before some optimizers have a state."""
    run(save_and_resume, 2, {"optimizer.learning_rate": 1e-3}, name, tmp_path, True)


def thaw(optimizer: str, folder: Path) -> None:
    """Save a run that freezes some parameters, and go on without freezing them."""
    saving = Run(SHARDED | FROZEN, optimizer, folder, False)
    saving.take(*range(1, SAVED + 1))
    saved = saving.digests()
    saving.checkpoints.save(SAVED, {})
    saving.checkpoints.close()

    thawed = Run(SHARDED, optimizer, folder, False)
    assert (thawed.is_resumed, thawed.digests()) == (True, saved)  # no other parameter has a state
    weights = {name: weight.detach().clone() for name, weight in thawed.trainer.stages[0].named_parameters()}
    thawed.take(SAVED + 1)
    for name, weight in thawed.trainer.stages[0].named_parameters():
        is_new = torch.equal(local_tensor(thawed.trainer.optimizer.state[weight]["start"]), local_tensor(weights[name]))
        assert is_new == tiny(FROZEN).model.freezes(canonical_name(name)), name


def test_a_parameter_that_is_not_frozen_any_more_has_the_state_of_a_new_run(tmp_path: Path) -> None:
    run(thaw, 2, "moves from its start", tmp_path)


def test_a_parameter_that_is_not_the_models_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer([torch.nn.Sequential()], Optimizer())
    optimizer.add_param_group({"params": model.parameters()})
    with pytest.raises(CheckpointError, match=r"parameter \(2, 3\) that is not the model's: .*register_block"):
        Checkpointer(Checkpoint(), tmp_path, [torch.nn.Sequential()], optimizer)
    Checkpointer(Checkpoint(), tmp_path, [model], optimizer).close()
