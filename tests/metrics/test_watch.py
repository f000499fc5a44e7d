"""The watch: whom it names, when, and that it leaves quiet runs alone."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parity import CPU, build, my_batches, tiny
from tests.workers import run
from torchllm.metrics.watch import CONFIRMED, COST, Profiled, Slow, Watch, slowest
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.pipeline import build_forward_backward
from torchllm.runtime.phase import phase
from torchllm.train.step import TrainStep

USUAL = {"forward": 0.3, "backward": 0.6, "exposed fsdp": 0.1, "data": 0.0, "checkpoint": 0.0}


def late(**more: float) -> dict[str, float]:
    return USUAL | more


def test_a_rank_is_slow_if_it_works_longer_than_its_peers() -> None:
    assert slowest([USUAL] * 4, [0] * 4) is None
    assert slowest([USUAL, USUAL, late(forward=0.8), USUAL], [0] * 4) == (2, "forward", 0.8, pytest.approx(0.3))
    assert slowest([USUAL, late(data=0.9)], [0, 0]) == (1, "data", 0.9, pytest.approx(0.0))
    assert slowest([USUAL, late(forward=0.4)], [0, 0]) is None  # 11 % more work


def test_waiting_and_saving_are_no_work() -> None:
    assert slowest([USUAL, late(**{"exposed fsdp": 9.0}), late(checkpoint=9.0), late(bubble=9.0)], [0] * 4) is None


def test_another_stages_work_is_another() -> None:
    heavy = late(forward=2.0)
    assert slowest([USUAL, USUAL, heavy, heavy], [0, 0, 1, 1]) is None
    assert slowest([USUAL, heavy], [0, 1]) is None  # the only ranks of their stages
    assert slowest([USUAL, USUAL, heavy, USUAL], [0, 0, 1, 1]) == (2, "forward", 2.0, pytest.approx(0.3))


def test_the_line_says_what_the_largest_wait_costs() -> None:
    profiled = Profiled(40, {"forward": 0.6, "backward": 1.2, "exposed fsdp": 0.2}, None)
    assert profiled.text(None, None) == "step 40, 2 s: backward 60.0%, forward 30.0%, exposed fsdp 10.0%"
    assert profiled.text(0.36, 0.4).endswith("MFU 36.0% measured, 40.0% planned; 4.0 points are exposed fsdp")


def _watched(steps: int, sleep: tuple[int, float]) -> list[tuple[int, Slow | None, float]]:
    """The profiled steps of a tiny run on this rank; one rank sleeps in each step."""
    config = tiny({"parallel.dp_shard": 4, "parallel.zero_stage": 1})
    mesh, stages = build(config)
    rank, seconds = sleep
    if dist.get_rank() == rank:
        block = stages[0].layers["1"]
        assert isinstance(block, nn.Module)
        block.register_forward_pre_hook(lambda *_: time.sleep(seconds / 2))  # two micro batches
    plain = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)
    optimizer = build_optimizer(stages, config.optimizer)
    rate = LearningRate(config.schedule, config.optimizer.learning_rate, steps)
    step = TrainStep(stages, plain, optimizer, rate, mesh, config.training, CPU)
    group = dist.new_group(backend="gloo")
    assert group is not None
    watch = Watch(10, mesh, group, CPU)
    found = []
    for n in range(1, steps + 1):
        with watch.step(n):
            step(n, my_batches(config, mesh, 1, False))
        if watch.latest:
            found.append((n, watch.latest.slow, watch.latest.seconds))
    return found


def _steps_to_the_next_profile(stretch: str) -> int:
    """After one whose step had a stretch of 0.5 s that no other step had."""
    config = tiny({})
    mesh, _ = build(config)
    group = dist.new_group(backend="gloo")
    assert group is not None
    watch = Watch(1, mesh, group, CPU, start=8)
    watch.next = 20
    for n in range(9, 21):
        with watch.step(n), phase("forward_backward"):
            time.sleep(0.02)
            if n == 20:
                with phase(stretch):
                    time.sleep(0.5)
    return watch.next - 20


def test_a_profiled_step_that_is_slower_costs_and_one_that_evaluates_does_not() -> None:
    assert run(_steps_to_the_next_profile, 1, "optimizer")[0] > 0.5 / COST / 0.1  # 0.02 s meant
    assert run(_steps_to_the_next_profile, 1, "evaluate")[0] < 0.5 / COST / 0.1


def test_a_sleeping_rank_is_named_within_twenty_steps() -> None:
    for found in run(_watched, 4, 20, (2, 0.3)):
        named = [slow for _, slow, _ in found if slow]
        assert [(slow.rank, slow.part) for slow in named[:1]] == [(2, "forward")], found
        assert [step for step, *_ in found][:CONFIRMED] == [10, 11, 12, 13]
        assert named[0].seconds > 0.3 > 0.1 > named[0].peers


def test_a_quiet_run_raises_no_alarm_and_is_profiled_seldom() -> None:
    start = time.perf_counter()
    for found in run(_watched, 4, 100, (0, 0.0)):
        assert not [slow for _, slow, _ in found if slow], found
        assert len(found) < 10  # steps of 50 ms: every tenth would cost more than
        assert COST == 0.01
    assert time.perf_counter() - start < 100
