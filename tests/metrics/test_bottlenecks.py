"""Waits for data and times of stages, the same figures on all ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.workers import run
from torchllm.metrics.bottlenecks import (
    DataWait,
    DataWaitClock,
    ForwardSeconds,
    ForwardTimes,
    StageClock,
    gather_stage_times,
)


def _waits(totals: list[list[float]]) -> list[DataWait]:
    """The longest waits at checkpoints 0.1 s apart; totals: of each checkpoint, by rank."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    clock = DataWaitClock(group)
    waits = []
    for by_rank in totals:
        time.sleep(0.1)
        waits.append(clock.longest(by_rank[dist.get_rank()]))
    return waits


def test_the_longest_wait_since_the_last_checkpoint_is_that_of_one_rank_on_all_ranks() -> None:
    waits, waits_of_rank_1 = run(_waits, 2, [[0.01, 0.05], [0.07, 0.06]])
    assert waits == waits_of_rank_1
    assert [wait.rank for wait in waits] == [1, 0]
    assert [wait.seconds for wait in waits] == pytest.approx([0.05, 0.06])
    assert all(wait.elapsed >= 0.1 for wait in waits)
    assert waits[0].share == waits[0].seconds / waits[0].elapsed


def _gathered() -> ForwardTimes:
    """Two ranks hold stage 0, one of them stage 1 too."""
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    times = {0: ForwardSeconds(1.0 + rank, 1.2 + rank)}
    if rank:
        times[1] = ForwardSeconds(5.0, 4.5)
    return gather_stage_times(times, 2, group)


def test_stage_times_are_medians_over_the_ranks_that_hold_a_stage() -> None:
    for times in run(_gathered, 2):
        assert times.seconds == pytest.approx([1.6, 4.75])
        assert times.noise == pytest.approx(0.5)


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def test_the_clock_takes_medians_of_each_stage_early_and_late() -> None:
    stages = [Sleeper(0.01), Sleeper(0.03)]
    clock = StageClock(stages, (1, 2), torch.device("cpu"))
    for _ in range(3):
        for stage in stages:
            stage(torch.ones(1))
    stages[0].seconds = 0.5  # once: the medians do not see it
    stages[0](torch.ones(1))
    stages[0].seconds = 0.01
    for _ in range(4):
        stages[0](torch.ones(1))
    clock.close()
    stages[0](torch.ones(1))
    times = clock.seconds()
    assert times.keys() == {1, 2}
    assert times[1] == pytest.approx((0.01, 0.01), abs=0.01)
    assert times[2] == pytest.approx((0.03, 0.03), abs=0.01)
    assert len(clock.forwards[1]) == 8
