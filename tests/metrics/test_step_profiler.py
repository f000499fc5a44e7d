"""The step profiler: which rank it calls slow, when, and that it leaves quiet runs alone."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from tests.parity import CPU, build, my_batches, tiny
from tests.workers import run
from torchllm.metrics.step_profiler import (
    CONFIRMATIONS,
    MAX_COST,
    ProfiledStep,
    RankReport,
    SlowRank,
    StepProfiler,
    find_slow_rank,
)
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.pipeline import build_forward_backward
from torchllm.runtime.phase import phase
from torchllm.train.step import TrainStep

USUAL = {"forward": 0.3, "backward": 0.6, "exposed fsdp": 0.1, "data": 0.0, "checkpoint": 0.0}
"""seconds by part of a step"""


def slow_rank(*ranks: dict[str, float], peers: Sequence[int] = ()) -> SlowRank | None:
    """Whom parts of each rank that differ from the usual ones make slow; peers: group of each, by default one."""
    groups = peers or [0] * len(ranks)
    reports = []
    for rank, (parts, group) in enumerate(zip(ranks, groups, strict=True)):
        reports.append(RankReport(USUAL | parts, group, f"host-{rank}"))
    return find_slow_rank(reports)


def test_a_rank_is_slow_if_it_works_longer_than_its_peers() -> None:
    assert slow_rank({}, {}, {}, {}) is None
    assert slow_rank({}, {}, {"forward": 0.8}, {}) == (2, "host-2", "forward", 0.8, 0.3)
    assert slow_rank({}, {"data": 0.9}) == (1, "host-1", "data", 0.9, 0.0)
    assert slow_rank({}, {"forward": 0.4}) is None  # 11 % more work
    assert slow_rank({}, {}, {"forward": 0.8}, {"forward": 1.8}) == (3, "host-3", "forward", 1.8, 0.3)


def test_a_rank_waits_for_others_or_saves_without_being_slow() -> None:
    assert slow_rank({}, {"exposed fsdp": 9.0}, {"checkpoint": 9.0}, {"bubble": 9.0}) is None


def test_ranks_of_other_stages_are_no_peers() -> None:
    heavy = {"forward": 2.0}
    assert slow_rank({}, {}, heavy, heavy, peers=[0, 0, 1, 1]) is None
    assert slow_rank({}, heavy, peers=[0, 1]) is None  # the only ranks of their stages
    assert slow_rank({}, {}, heavy, {}, peers=[0, 0, 1, 1]) == (2, "host-2", "forward", 2.0, 0.3)


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


def test_a_profiled_step_that_is_slower_costs_and_one_that_evaluates_does_not() -> None:
    assert run(_steps_to_the_next_profile, 1, "optimizer")[0] > 0.5 / MAX_COST / 0.1  # 0.02 s meant
    assert run(_steps_to_the_next_profile, 1, "evaluate")[0] < 0.5 / MAX_COST / 0.1


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
