"""The step profiler: when it profiles, when it calls a rank slow, and that it leaves quiet runs alone."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.parity import CPU, build, tiny
from tests.workers import run
from torchllm.runtime.heartbeat import phase
from torchllm.tools.watch import step_profiler
from torchllm.tools.watch.step_profiler import CONFIRMATIONS, MAX_COST, ProfiledStep, StepProfiler
from torchllm.tools.watch.trace import TraceWriter

USUAL = 0.25
"""seconds of a step by the fake clock"""
Parts = dict[str, float]


def test_the_line_says_what_the_largest_wait_costs() -> None:
    profiled = ProfiledStep(40, {"forward": 0.6, "backward": 1.2, "exposed fsdp": 0.2}, None)
    assert profiled.describe(None) == "step 40, 2 s: backward 60.0%, forward 30.0%, exposed fsdp 10.0%"
    assert profiled.describe(0.36).endswith("MFU 36.0% measured; exposed fsdp costs 4.0 points")


class FakeClock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


@contextmanager
def fake_clock() -> Iterator[FakeClock]:
    """Give the clock that the profiler reads inside the context."""
    clock = FakeClock()
    with mock.patch.object(step_profiler, "time", clock):
        yield clock


def profiler_of(interval: int, start: int = 0) -> StepProfiler:
    """Return a profiler of this rank, one of all ranks that share their weights."""
    mesh, _ = build(tiny({"parallel.dp_shard": dist.get_world_size()}))
    group = dist.new_group(backend="gloo")
    assert group is not None
    return StepProfiler(interval, mesh, group, CPU, TraceWriter(Path(), range(0), 0), start)


def _profiled_steps(steps: int, parts_of: Callable[[int, int], Parts]) -> list[ProfiledStep]:
    """Return what is profiled of steps with these parts, by rank and step, every tenth step or more often."""
    profiled = []
    rank = dist.get_rank()
    with fake_clock() as clock:
        profiler = profiler_of(10)
        for n in range(1, steps + 1):
            parts = parts_of(rank, n)
            with mock.patch.object(profiler, "_parts", return_value=parts), profiler.step(n):
                clock.now += sum(parts.values())
            if profiler.latest is not None:
                profiled.append(profiler.latest)
    return profiled


def _slow_rank_1(rank: int, step: int) -> Parts:
    return {"forward": 0.75} if rank else {"forward": 0.25, "exposed fsdp": 0.5}


def _slow_by_chance(rank: int, step: int) -> Parts:
    return _slow_rank_1(rank, step) if step in (10, 11) else {"forward": 0.25, "exposed fsdp": 0.5}


def test_a_slow_rank_is_confirmed_in_the_very_next_steps_and_named() -> None:
    for profiled in run(_profiled_steps, 2, 19, _slow_rank_1):
        assert [step.step for step in profiled] == [10, 11, 12, 13]
        assert [step.slow for step in profiled[:-1]] == [None] * (CONFIRMATIONS - 1)
        slow = profiled[-1].slow
        assert slow is not None
        assert (slow.rank, slow.part, slow.seconds, slow.peer_seconds) == (1, "forward", 0.75, 0.25)


def test_a_rank_that_is_slow_by_chance_raises_no_alarm() -> None:
    for profiled in run(_profiled_steps, 2, 20, _slow_by_chance):
        assert [(step.step, step.slow) for step in profiled] == [(10, None), (11, None), (12, None), (20, None)]


def _steps_to_the_next_profile(stretch: str) -> int:
    """After one whose step had a stretch of 0.5 s that no other step had."""
    with fake_clock() as clock:
        profiler = profiler_of(1, start=8)
        profiler.next = 20
        parts = {"forward": USUAL, stretch: 0.5}
        with mock.patch.object(profiler, "_parts", return_value=parts):
            for n in range(9, 21):
                with profiler.step(n):
                    clock.now += USUAL + (0.5 if n == 20 else 0.0)
    return profiler.next - 20


def test_a_profiled_step_that_is_slower_costs_and_one_that_evaluates_does_not() -> None:
    assert run(_steps_to_the_next_profile, 1, "optimizer") == [round(0.5 / MAX_COST / USUAL)]
    assert run(_steps_to_the_next_profile, 1, "evaluate") == [1]


def _intervals_with_slow_conclusions(steps: int) -> list[int]:
    """Return the steps between profiles if each conclusion takes 0.5 s."""
    with fake_clock() as clock:

        def conclude(reports: np.ndarray) -> None:
            clock.now += 0.5

        profiler = profiler_of(1)
        intervals = []
        parts = mock.patch.object(profiler, "_parts", return_value={"forward": USUAL})
        with parts, mock.patch.object(step_profiler, "find_slow_rank", conclude):
            for n in range(10, 10 + steps):
                due = profiler.next = n
                with profiler.step(due):
                    clock.now += USUAL
                intervals.append(profiler.next - due)
    return intervals


def test_the_time_of_the_conclusion_counts_from_the_next_profile_on() -> None:
    after = round(0.5 / MAX_COST / USUAL)
    assert run(_intervals_with_slow_conclusions, 1, 3) == [[1, after, after]]


def _live_profiles(steps: int) -> list[int]:
    """Number of profiles in memory after each of so many profiled steps, without a garbage collection."""
    gc.collect()
    gc.disable()
    numbers = []
    try:
        profiler = profiler_of(1)
        for n in range(1, steps + 1):
            profiler.next = n
            with profiler.step(n), phase("forward_backward"):
                torch.ones(2).sum()
            assert profiler.latest is not None
            numbers.append(sum(type(thing) is profile for thing in gc.get_objects()))
    finally:
        gc.enable()
    return numbers


def test_a_profile_is_freed_with_its_step() -> None:
    assert run(_live_profiles, 1, 5) == [[0] * 5]


def _steps_without_gpu_events(missing_on: list[int]) -> list[bool]:
    """Profile three steps as if on a GPU whose events are missing on some ranks; say of each whether it is known."""
    profiler = profiler_of(1)
    synchronize = torch.cuda.synchronize
    if dist.get_rank() in missing_on:
        profiler.activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]  # as on a GPU
        torch.cuda.synchronize = lambda: None  # type: ignore[assignment]  # there is no GPU
    try:
        return [_is_known(profiler, n) for n in range(10, 13)]
    finally:
        torch.cuda.synchronize = synchronize


def _is_known(profiler: StepProfiler, n: int) -> bool:
    """Profile a step, and return whether its parts are known: the mean of the ranks that know theirs."""
    profiler.next = n
    with profiler.step(n), phase("forward_backward"):
        torch.ones(2).sum()
    if profiler.latest is None:
        return False
    assert profiler.latest.parts["forward"] > 0.0
    return True


@pytest.mark.parametrize(("missing_on", "is_known"), [([0, 1], False), ([0], True)])
def test_a_gpu_without_events_has_no_breakdown(missing_on: list[int], is_known: bool) -> None:
    assert run(_steps_without_gpu_events, 2, missing_on) == [[is_known] * 3] * 2
