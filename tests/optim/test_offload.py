"""The update on the host is the same as the update on the device, in every layout and after a change of the key."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.test_resume_layouts import digests
from tests.checkpoint.test_resume_optimizers import Run
from tests.optim.test_optimizer import give_gradients, plain
from tests.parity import CPU, SHORT, Settings, Trainer, tiny, world_size
from tests.workers import run
from torchllm.config import Optimizer
from torchllm.config.errors import UserError
from torchllm.optim.fused import Group
from torchllm.optim.offload import OffloadedAdamW
from torchllm.optim.optimizer import apply_if_finite, build_optimizer
from torchllm.runtime.device import compute_dtype

OFFLOAD: Settings = {"optimizer.offload": True}
BFLOAT16: Settings = {"optimizer.state_dtype": "bfloat16", "training.weights_dtype": "bfloat16"}
PIPELINE: Settings = {"parallel.pp": 2, "parallel.schedule": "1F1B"}
LAYOUTS: dict[str, Settings] = {
    "one rank": {},
    "zero 3": {"parallel.dp_shard": 2, "parallel.zero_stage": 3},
    "zero 1, bfloat16": {"parallel.dp_shard": 2, "parallel.zero_stage": 1} | BFLOAT16,
    "tied, tp": {"parallel.tp": 2, "parallel.sequence_parallel": True, "model.tied_embeddings": True},
    "pipeline, moments in bfloat16": PIPELINE | {"optimizer.state_dtype": "bfloat16"},
    "experts": {"parallel.dp_shard": 2, "parallel.ep": 2, "model.experts": 4},
    "experts, bfloat16": {"parallel.dp_shard": 2, "parallel.ep": 2, "model.experts": 4} | BFLOAT16,
    "low-rank updates": {"parallel.dp_shard": 2, "lora.rank": 2},
    "frozen on the first rank": PIPELINE | {"model.frozen": r"embed_tokens.*|layers\.0\..*"},
    "HSDP": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2},
    "float8 gathers": {"parallel.dp_shard": 2, "float8.recipe": "tensorwise", "training.dtype": "bfloat16"},
}
BY_DEFAULT = ("one rank", "zero 3", "zero 1, bfloat16", "pipeline, moments in bfloat16", "experts")
NAMES = [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]


class Ended(NamedTuple):
    losses: list[float]
    digests: dict[str, str]
    """of whole weights, moments and counters"""


def trained(settings: Settings) -> Ended:
    """Train on this rank of a layout."""
    config = tiny(SHORT | settings)
    trainer = Trainer(config, compute_dtype(config.training, CPU))
    assert isinstance(trainer.optimizer, OffloadedAdamW) == ("optimizer.offload" in settings)
    losses = [trainer.step(step, trainer.batches(step)).loss.item() for step in (1, 2, 3)]
    return Ended(losses, digests(trainer.stages, trainer.optimizer, {}))


@pytest.mark.parametrize("name", NAMES)
def test_the_host_updates_as_the_device_does(name: str) -> None:
    settings = LAYOUTS[name]
    ranks = world_size(tiny(settings))
    assert run(trained, ranks, settings | OFFLOAD) == run(trained, ranks, settings)


def resumed_with(dial: Settings, other: Settings, folder: Path) -> None:
    """Save a run, and let runs with the other dial, in its layout and in another, go on as it does."""
    sharded: Settings = {**SHORT, "parallel.dp_shard": 2}
    saving = Run(sharded | dial, "", folder, False)
    saving.take(1)
    saved = saving.digests()
    saving.checkpoints.save(1, {})
    losses = saving.take(2, 3)
    last = saving.digests()
    saving.checkpoints.close()
    resumed = Run(sharded | other, "", folder, False)
    assert (resumed.is_resumed, resumed.digests()) == (True, saved)
    assert (resumed.take(2, 3), resumed.digests()) == (losses, last)
    elsewhere = Run({**SHORT, **PIPELINE, **other}, "", folder, False)
    assert (elsewhere.is_resumed, elsewhere.digests()) == (True, saved)
    assert elsewhere.take(2, 3) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("dials", [(OFFLOAD, {}), ({}, OFFLOAD)], ids=["to the device", "to the host"])
def test_a_run_may_change_the_key(dials: tuple[Settings, Settings], tmp_path: Path) -> None:
    run(resumed_with, 2, *dials, tmp_path)


class Recorded(OffloadedAdamW):
    """Notes the memory of what it updates."""

    def update_part(self, group: Group, parameter: Tensor, weight: Tensor, gradient: Tensor) -> None:
        self.weights = [*getattr(self, "weights", []), weight.data_ptr()]
        super().update_part(group, parameter, weight, gradient)


def test_what_the_host_does_not_update_is_refused() -> None:
    with pytest.raises(UserError, match="for AdamW with moments in float32 or bfloat16"):
        build_optimizer([plain()], Optimizer(state_dtype="int8", offload=True))


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_it_does_nothing_to_other_optimizers(name: Literal["muon", "sgd"]) -> None:
    """As a line says where a base file has the key and the command line another optimizer."""
    offloaded, expected = (build_optimizer([plain()], Optimizer(name, offload=offload)) for offload in (True, False))
    assert type(offloaded) is type(expected)


def weights_of(stages: Sequence[nn.Module]) -> list[Tensor]:
    return [parameter.detach().clone() for stage in stages for parameter in stage.parameters()]


def test_two_buffers_are_taken_in_turn_and_weights_written_elsewhere_count() -> None:
    after = []
    for offload in (False, True):
        model = plain()
        optimizer = build_optimizer([model], Optimizer(offload=offload))
        if offload:
            optimizer.__class__ = Recorded
        for step in range(2):
            give_gradients([model], step)
            apply_if_finite(optimizer, 0.1, torch.tensor(True))
            with torch.no_grad():
                model.lm_head.weight.mul_(0.5)  # as an average in place of the weights, or a fork
        after.append(weights_of([model]))
    assert all(map(torch.equal, *after))
    assert isinstance(optimizer, Recorded)
    first, second, *_ = optimizer.weights
    count = len(list(model.parameters()))
    assert optimizer.weights == 2 * [(first, second)[index % 2] for index in range(count)]
    assert not {first, second} & {parameter.data_ptr() for parameter in model.parameters()}
