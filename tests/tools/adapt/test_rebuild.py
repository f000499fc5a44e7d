"""A run that starts again leaves nothing of its former self: no tensor, process group, thread or descriptor."""

import gc
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from tests.recipes.warm import pretrain
from tests.workers import POOL
from torchllm.metrics.observer import Change, ObservedRun, Observer
from torchllm.models.decoder import Decoder

REBUILDS = 3


class Held(NamedTuple):
    """What a rank holds before it builds a model."""

    models: int
    tensor_bytes: int
    groups: int
    threads: int
    descriptors: int

    def is_more_than(self, before: "Held") -> bool:
        """Whether something is left that was not there before."""
        return any(now > then for now, then in zip(self, before, strict=True))


def held_now() -> Held:
    models, tensor_bytes = 0, 0
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would also ask objects that answer with a warning
        models += issubclass(kind, Decoder)
        if issubclass(kind, torch.Tensor) and not thing.is_meta:
            tensor_bytes += thing.nbytes
    groups = len(dist.distributed_c10d._world.pg_map)
    return Held(models, tensor_bytes, groups, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


class Restless(Observer):
    """In place of the adaptation: starts the run again from every checkpoint."""

    def __init__(self, starved_seconds: float) -> None:
        """It looks at nothing."""

    def begin(self, run: ObservedRun) -> None:
        self.config = run.config

    def saved(self, n: int) -> Change:
        config = self.config
        return Change(replace(config, checkpoint=replace(config.checkpoint, resume="auto")), "a test")


def _start_again_and_again(folder: Path, recipe: Any, rank: int) -> None:
    train, supervise = recipe.train, recipe.supervise
    counts: list[Held] = []

    def train_and_count(*arguments: Any) -> None:
        limit = time.monotonic() + patience(10)
        held = held_now()
        while len(counts) > 1 and held.is_more_than(counts[1]) and time.monotonic() < limit:
            time.sleep(0.01)  # a thread of the last training ends a moment after it
            held = held_now()
        counts.append(held)
        with (folder / f"held-{rank}").open("a") as file:
            print(*held, file=file)
        train(*arguments)

    def supervise_restlessly(_: Any, *arguments: Any) -> None:
        with mock.patch("torchllm.tools.adapt.supervise.Adaptation", Restless):
            supervise(train_and_count, *arguments)

    recipe.supervise = supervise_restlessly


FSDP = ["--parallel.dp_shard=2"]
PIPELINE = ["--parallel.pp=2", "--parallel.dp_shard=1", "--checkpoint.asynchronous=true"]


@pytest.mark.parametrize(
    "layout", [pytest.param(FSDP, id="fsdp", marks=pytest.mark.exhaustive), pytest.param(PIPELINE, id="pipeline")]
)
def test_a_rank_holds_as_much_after_many_rebuilds_as_after_one(tmp_path: Path, layout: list[str]) -> None:
    POOL.stop(range(2))  # fresh ranks: what a failed test has left would end meanwhile, and be counted
    settings = [f"--training.steps={REBUILDS + 1}", "--checkpoint.interval=1", "--checkpoint.keep=1"]
    settings += ["--evaluate.interval=2", "--training.micro_batch_size=4"]
    assert pretrain(2, tmp_path, *layout, *settings, change=partial(_start_again_and_again, tmp_path)) == ["", ""]
    for rank in range(2):
        lines = (tmp_path / f"held-{rank}").read_text().splitlines()
        held = [Held(*map(int, line.split())) for line in lines]
        assert len(held) == REBUILDS + 1
        assert [state.models for state in held] == [0] * len(held)
        assert not [later for later in held[2:] if later.is_more_than(held[1])]
