"""The step profiler: when it profiles, when it calls a rank slow, and that it leaves quiet runs alone."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.parity import CPU, build, my_batches, tiny
from tests.workers import run
from torchllm.metrics import step_profiler
from torchllm.metrics.step_profiler import CONFIRMATIONS, MAX_COST, ProfiledStep, StepProfiler
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.pipeline import build_forward_backward
from torchllm.runtime.phase import phase
from torchllm.train.step import TrainStep


def test_the_line_says_what_the_largest_wait_costs() -> None:
    profiled = ProfiledStep(40, {"forward": 0.6, "backward": 1.2, "exposed fsdp": 0.2}, None)
    assert profiled.describe(None, None) == "step 40, 2 s: backward 60.0%, forward 30.0%, exposed fsdp 10.0%"
    assert profiled.describe(0.36, 0.4).endswith("MFU 36.0% measured, 40.0% planned; exposed fsdp costs 4.0 points")


def _profiled_steps(steps: int, slow: int, seconds: float) -> list[ProfiledStep]:
    """Of a tiny run on this rank; rank `slow` sleeps for so many seconds in each step."""
    config = tiny({"parallel.dp_shard": 4, "parallel.zero_stage": 1})
    mesh, stages = build(config)
    if dist.get_rank() == slow:
        block = stages[0].layers["1"]
        assert isinstance(block, nn.Module)
        block.register_forward_pre_hook(lambda *_: time.sleep(seconds / 2))  # two micro batches
    plain = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)
    optimizer = build_optimizer(stages, config.optimizer)
    rate = LearningRate(config.schedule, config.optimizer.learning_rate, steps)
    step = TrainStep(stages, plain, optimizer, rate, mesh, config.training, CPU)
    group = dist.new_group(backend="gloo")
    assert group is not None
    profiler = StepProfiler(10, mesh, group, CPU)
    profiled = []
    for n in range(1, steps + 1):
        with profiler.step(n):
            step(n, my_batches(config, mesh, 1, False))
        if profiler.latest is not None:
            profiled.append(profiler.latest)
    return profiled


def _steps_to_the_next_profile(stretch: str) -> int:
    """After one whose step had a stretch of 0.5 s that no other step had."""
    config = tiny({})
    mesh, _ = build(config)
    group = dist.new_group(backend="gloo")
    assert group is not None
    profiler = StepProfiler(1, mesh, group, CPU, start=8)
    profiler.next = 20
    for n in range(9, 21):
        with profiler.step(n), phase("forward_backward"):
            time.sleep(0.02)
            if n == 20:
                with phase(stretch):
                    time.sleep(0.5)
    return profiler.next - 20


def _live_profiles(steps: int) -> list[int]:
    """Number of profiles in memory after each of so many profiled steps, without a garbage collection."""
    config = tiny({})
    mesh, _ = build(config)
    group = dist.new_group(backend="gloo")
    assert group is not None
    gc.collect()
    gc.disable()
    numbers = []
    try:
        profiler = StepProfiler(1, mesh, group, CPU)
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


def test_a_profiled_step_that_is_slower_costs_and_one_that_evaluates_does_not() -> None:
    assert run(_steps_to_the_next_profile, 1, "optimizer")[0] > 0.5 / MAX_COST / 0.1  # 0.02 s meant
    assert run(_steps_to_the_next_profile, 1, "evaluate")[0] < 0.5 / MAX_COST / 0.1


def _intervals_with_slow_conclusions(steps: int) -> list[int]:
    """Steps between profiles if rank 0 needs 0.3 s for a conclusion; a step takes 0.02 s."""
    config = tiny({"parallel.dp_shard": 2})
    mesh, _ = build(config)
    group = dist.new_group(backend="gloo")
    assert group is not None
    profiler = StepProfiler(1, mesh, group, CPU)
    find_slow_rank = step_profiler.find_slow_rank
    step_profiler.find_slow_rank = lambda reports: time.sleep(0.3)
    try:
        intervals = []
        for n in range(10, 10 + steps):
            due = profiler.next = n
            with profiler.step(due), phase("forward_backward"):
                time.sleep(0.02)
            intervals.append(profiler.next - due)
        return intervals
    finally:
        step_profiler.find_slow_rank = find_slow_rank


def test_the_time_of_the_conclusion_counts_from_the_next_profile_on() -> None:
    for first, *following in run(_intervals_with_slow_conclusions, 2, 3):
        assert all(interval > first + 0.25 / MAX_COST / 0.1 for interval in following)


def test_a_sleeping_rank_is_named_within_twenty_steps() -> None:
    for profiled in run(_profiled_steps, 4, 20, 2, 0.3):
        slow = [step.slow for step in profiled if step.slow is not None]
        assert [(named.rank, named.part) for named in slow[:1]] == [(2, "forward")], profiled
        assert [step.step for step in profiled[:CONFIRMATIONS]] == [10, 11, 12, 13]
        assert slow[0].seconds > 0.3 > 0.1 > slow[0].peer_seconds


def test_a_quiet_run_raises_no_alarm_and_is_profiled_rarely() -> None:
    start = time.perf_counter()
    for profiled in run(_profiled_steps, 4, 100, 0, 0.0):
        assert not [step for step in profiled if step.slow is not None], profiled
        assert len(profiled) < 10  # steps of 50 ms: every tenth would cost more than
        assert MAX_COST == 0.01
    assert time.perf_counter() - start < 100


def _steps_without_gpu_events(missing_on: list[int]) -> list[bool]:
    """Profile three steps as if on a GPU whose events are missing on some ranks; say of each whether it is known."""
    config = tiny({"parallel.dp_shard": 2})
    mesh, _ = build(config)
    group = dist.new_group(backend="gloo")
    assert group is not None
    profiler = StepProfiler(1, mesh, group, CPU)
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
        time.sleep(0.02)
    if profiler.latest is None:
        return False
    assert profiler.latest.slow is None
    assert profiler.latest.parts["forward"] > 0.01
    return True


@pytest.mark.parametrize(("missing_on", "is_known"), [([0, 1], False), ([0], True)])
def test_a_gpu_without_events_has_no_breakdown(missing_on: list[int], is_known: bool) -> None:
    assert run(_steps_without_gpu_events, 2, missing_on) == [[is_known] * 3] * 2
