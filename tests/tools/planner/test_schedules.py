"""Our orders against torch's: the same actions, entry by entry."""

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from torchllm.config import SCHEDULES, Config, Parallel, PipelineSchedule, Training
from torchllm.config import Model as ModelConfig
from torchllm.facts.stages import stage_of_rank
from torchllm.tools.config.checks import problems
from torchllm.tools.dry_run import trace as dry_run
from torchllm.tools.planner.schedules import Action, Entry, flat, orders

RANKS = (2, 4, 8)
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16, 17, 20, 24, 32, 33, 40)
VIRTUAL = {"Interleaved1F1B": (1, 2, 3, 4), "LoopedBFS": (1, 2, 3), "InterleavedZeroBubble": (1, 2, 3, 4)}
LOOPED = [name for name, kind in SCHEDULES.items() if kind.default_stages > 1]


@pytest.fixture(scope="module")
def fake_ranks() -> Any:
    """One process that stands for any number of ranks, on which torch can make its lists."""
    with dry_run.fake_ranks(0, 8):
        yield {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}


def allowed(parallel: Parallel, micro_batches: int) -> bool:
    """Whether the config lets a step have so many micro batches."""
    training = Training(micro_batch_size=1, global_batch_size=micro_batches)
    config = Config(model=ModelConfig(layers=64), training=training, parallel=parallel)
    return not list(problems(config, parallel.pp))


def theirs(parallel: Parallel, micro_batches: int, group: Any) -> list[list[Entry]]:
    """torch's own order, which it makes for all ranks on each; without the gaps it keeps for pictures."""
    stages = [
        PipelineStage(torch.nn.Identity(), index, parallel.stages, torch.device("cpu"), group=group)
        for index in stage_of_rank(parallel, 0)
    ]
    schedule = get_schedule_class(parallel.schedule)(stages, micro_batches)
    by_rank = [schedule.pipeline_order[rank] for rank in range(parallel.pp)]
    return [[entry_of(action) for action in order if action is not None] for order in by_rank]


def entry_of(action: Any) -> Entry:
    parts = action.sub_actions or (action,)
    return tuple(Action(part.computation_type.value, part.stage_index, part.microbatch_index) for part in parts)


@pytest.mark.parametrize("schedule", LOOPED)
def test_orders_are_torchs(fake_ranks: Any, schedule: PipelineSchedule) -> None:
    compared = Counter[int]()
    for ranks, virtual in product(RANKS, VIRTUAL.get(schedule, (2,))):
        parallel = Parallel(pp=ranks, schedule=schedule, virtual_stages=virtual)
        for micro_batches in MICRO_BATCHES:
            if allowed(parallel, micro_batches):
                compared[ranks] += 1
                assert orders(parallel, micro_batches) == theirs(parallel, micro_batches, fake_ranks[ranks])
    assert min(compared[ranks] for ranks in RANKS) >= 6


class Recorder(SimpleNamespace):
    """A stage that computes nothing and writes down what it is told to."""

    is_last = False
    has_backward = True

    def __init__(self, index: int, stages: int) -> None:
        super().__init__(stage_index=index, num_stages=stages, calls=[])
        nothing = {name: lambda _: [] for name in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send")}
        self.__dict__.update({f"get_{name}_ops": function for name, function in nothing.items()})

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.calls.append((Action("F", self.stage_index, number),))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.calls.append((Action("B", self.stage_index, number),))

    def perform_reduce_grad(self, _: int) -> None:
        pass

    def release_fwd_send_outputs(self, _: int) -> None:
        """Let go of what was sent: torch calls it from 2.15 on."""


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_single_stage_orders_are_what_torch_runs(schedule: PipelineSchedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch runs these two without a list (the one it keeps for 1F1B begins the last rank with micro batch 1)."""
    kind = get_schedule_class(schedule)
    monkeypatch.setattr(kind, "_initialize_stage", lambda *_: None)
    compared = Counter[int]()
    for ranks, micro_batches in product(RANKS, MICRO_BATCHES):
        parallel = Parallel(pp=ranks, schedule=schedule)
        if allowed(parallel, micro_batches):
            stages: list[Any] = [Recorder(rank, ranks) for rank in range(ranks)]
            for stage in stages:
                kind(stage, micro_batches)._step_microbatches([()] * micro_batches, [{}] * micro_batches)
            assert orders(parallel, micro_batches) == [stage.calls for stage in stages]
            compared[ranks] += 1
    assert min(compared[ranks] for ranks in RANKS) >= 6


def test_one_rank_takes_turns() -> None:
    for schedule in SCHEDULES:
        (order,) = orders(Parallel(schedule=schedule), 2)
        assert list(flat(order)) == [Action(kind, 0, number) for number in (0, 1) for kind in ("F", "B")], schedule
