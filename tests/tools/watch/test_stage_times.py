"""Times of stages, the same figures on all ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tools.watch.test_step_profiler import FakeClock
from tests.workers import run
from torchllm.tools.watch import stage_times
from torchllm.tools.watch.stage_times import ForwardTimes, StageClock


def _gathered() -> ForwardTimes:
    """Two ranks hold stage 0, one of them stage 1 too."""
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    clock = StageClock([], [], torch.device("cpu"))
    clock.forwards = {0: [(0.0, 1.0 + rank), (0.0, 1.2 + rank)]}
    if rank:
        clock.forwards[1] = [(0.0, 5.0), (0.0, 4.5)]
    return clock.gather(2, group)


def test_stage_times_are_medians_over_the_ranks_that_hold_a_stage() -> None:
    for times in run(_gathered, 2):
        assert times.seconds == pytest.approx([1.6, 4.75])
        assert times.noise == pytest.approx(0.5)


class Stage(nn.Module):
    """A stage whose forward takes so many seconds of a clock."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.seconds
        return x


def test_the_clock_takes_medians_of_each_stage_early_and_late(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeClock()
    monkeypatch.setattr(stage_times, "time", fake)
    stages = [Stage(fake, 0.25), Stage(fake, 0.5)]
    clock = StageClock(stages, (0, 1), torch.device("cpu"))
    for seconds in (0.25, 0.25, 0.25, 8.0, 0.125, 0.125, 0.125, 0.125):  # once 8 s: the medians do not see it
        stages[0].seconds = seconds
        stages[0](torch.ones(1))
    for _ in range(3):
        stages[1](torch.ones(1))
    monkeypatch.setattr(stage_times, "gather_records", lambda local, group: local[None])
    assert clock.gather(2, mock.Mock()) == ([(0.25 + 0.125) / 2, 0.5], 0.125)
    stages[0](torch.ones(1))
    assert len(clock.forwards[0]) == 8
