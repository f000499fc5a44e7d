"""A run that changes its layout at every checkpoint is the run that never stopped."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.lattice import compare_resumed, resumed_at_random
from tests.parity import CPU, Settings, Trainer, tiny, whole, world_size
from tests.workers import run
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.config import Checkpoint, Data, Source
from torchllm.data.loader import DataRanks, build_loader
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Decoder
from torchllm.parallel.mesh import sequence_pieces

T = TypeVar("T")
DATA = Data(sources=(Source(kind="synthetic"),), document_mask=True, workers=0)
FEW_HOPS: list[Settings] = [{"dp_shard": 2, "zero_stage": 3}, {"pp": 2, "schedule": "1F1B"}, {}]
MANY_HOPS: list[Settings] = [
    {"pp": 2, "dp_shard": 2, "tp": 2, "schedule": "ZBVZeroBubble", "zero_stage": 3},
    {"cp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 2},
    {"pp": 2, "schedule": "DualPipeV"},
    {},
    {"dp_shard": 2, "zero_stage": 0},
    {"pp": 4, "schedule": "1F1B"},
    {"pp": 2, "dp_replicate": 2, "cp": 2, "schedule": "Interleaved1F1B", "cp_method": "ulysses", "zero_stage": 1},
]
"""On 8 ranks down to 1 and up again. One step on each, so that all state is what the layout before has changed."""
OPTIMISTIC: Settings = {"dp_shard": 2, "ep": 2, "expert_dispatch": "optimistic"}
EXPERT_HOPS: list[Settings] = [
    OPTIMISTIC,
    {},
    {**OPTIMISTIC, "tp": 2},
    {"dp_shard": 4, "ep": 4},
    {**OPTIMISTIC, "pp": 2, "schedule": "1F1B"},
]
"""Capacities of buffers are no state of a checkpoint: each layout begins with those of even loads."""
EXPERTS: Settings = {"model.experts": 8, "model.top_k": 2, "model.router_bias": True, "model.router_score": "sigmoid"}


class Hop(NamedTuple):
    loaded: dict[str, str]
    """sha256 of each whole parameter and of its optimizer state, before the first step"""
    losses: list[float]
    saved: dict[str, str]
    """as `loaded`, after the last step"""


def tensors(stages: Sequence[Decoder], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of this rank and its state, copies of a tied embedding too, and every buffer."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            yield canonical_name(name), parameter
            for entry, value in sorted(optimizer.state[parameter].items()):
                yield f"{canonical_name(name)}.{entry}", value
        for name, buffer in stage.named_buffers():
            yield canonical_name(name), buffer


def digests(
    stages: Sequence[Decoder], optimizer: torch.optim.Optimizer, extra_state: Mapping[str, Tensor]
) -> dict[str, str]:
    """sha256 of the whole tensors of all ranks, by name; those of one name must be the same."""
    local = []
    for name, tensor in (*tensors(stages, optimizer), *extra_state.items()):
        local.append((name, hashlib.sha256(whole(tensor).tobytes()).hexdigest()))
    by_name: dict[str, str] = {}
    for named_digests in gather(local):
        for name, value in named_digests:
            assert by_name.setdefault(name, value) == value, f"{name}: its copies differ"
    return by_name


def gather(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train(settings: Settings, steps: range, folder: str | None) -> Hop:
    """The steps on this layout, from the newest checkpoint of the folder; saved there after the last one."""
    trainer = Trainer(tiny(settings))
    config, mesh = trainer.config, trainer.mesh
    extra_state = trainer.step.expert_balance.tensors
    ranks = DataRanks(mesh.data_rank, mesh.data_size, pieces=sequence_pieces(mesh))
    data = build_loader(DATA, config.training, config.model, 0, ranks)
    if folder is not None:
        checkpoint = Checkpoint(asynchronous=config.parallel.pp == 4)  # one layout saves in the background
        options: dict[str, Any] = {"host_group": dist.group.WORLD, "extra_state": extra_state}
        checkpoints = Checkpointer(checkpoint, Path(folder), trainer.stages, trainer.optimizer, **options)
        if manifest := checkpoints.resume():
            assert manifest.step == steps[0] - 1
            data.load_state(manifest.data)
        assert checkpoints.missing_extra_state == [] or manifest is None
    loaded = digests(trainer.stages, trainer.optimizer, extra_state)
    losses = [trainer.step(number, data.next_step().unpack(CPU)).loss.item() for number in steps]
    if folder is not None:
        checkpoints.save(steps[-1], data.state())
        checkpoints.close()
    return Hop(loaded, losses, digests(trainer.stages, trainer.optimizer, extra_state))


def hop_over(layouts: Sequence[Settings], common: Settings, folder: Path) -> list[Hop]:
    """Return what one run does that takes a step on each layout, from the checkpoint of the one before."""
    hops = []
    for step, layout in enumerate(layouts, start=1):
        settings = common | layout
        hops.append(run(train, world_size(tiny(settings)), settings, range(step, step + 1), str(folder))[0])
    return hops


@pytest.mark.parametrize(
    ("hops", "model"),
    [
        pytest.param(FEW_HOPS, {}, id="few"),
        pytest.param(MANY_HOPS, {}, id="many", marks=pytest.mark.exhaustive),
        pytest.param(EXPERT_HOPS, EXPERTS, id="experts", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_changes_its_layout_at_every_step(tmp_path: Path, hops: list[Settings], model: Settings) -> None:
    common = {"model.tied_embeddings": True, "training.steps": len(hops), "data.document_mask": True, **model}
    (uninterrupted,) = run(train, 1, common, range(1, len(hops) + 1), None)
    saved = uninterrupted.loaded
    for index, layout in enumerate(hops):
        settings = common | {f"parallel.{key}": value for key, value in layout.items()}
        ranks = world_size(tiny(settings))
        by_rank = run(train, ranks, settings, range(index + 1, index + 2), str(tmp_path))
        for hop in by_rank:
            assert hop.loaded == saved, f"in {layout}"
            # Float32 sums in another order, through up to seven steps of AdamW. Of samples: recipes/test_pretrain.py.
            assert hop.losses == pytest.approx([uninterrupted.losses[index]], rel=1e-5)
            assert hop.saved == by_rank[0].saved != saved
        saved = by_rank[0].saved


PAIRS = 20


@functools.cache
def pairs_at_random() -> list[tuple[Settings, Settings]]:
    return resumed_at_random(PAIRS, seed=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", range(PAIRS))
def test_a_run_resumes_in_another_layout_that_is_drawn(index: int) -> None:
    """Of a model with the parts that the lattice draws."""
    compare_resumed(*pairs_at_random()[index])
