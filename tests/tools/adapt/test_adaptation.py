from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from tests.metrics.test_monitor import begin, monitor_of
from tests.parity import tiny
from tests.tools.watch.test_notices import log_lines
from tests.workers import run
from torchllm.config import Config
from torchllm.metrics.observer import Change
from torchllm.tools.adapt.adaptation import TIMED_STEPS, Adaptation
from torchllm.tools.watch.bottlenecks import Bottlenecks


def _starved(folder: Path, waits: list[float]) -> list[int | None]:
    """The rank named at checkpoints 0.2 s apart, in which rank 1 waited so many seconds for data."""
    observed: list[int | None] = []
    clock = SimpleNamespace(now=0.0)

    def adapt(config: Config, bottlenecks: Bottlenecks) -> None:
        observed.append(bottlenecks.data_wait.rank if bottlenecks.data_wait else None)

    with mock.patch("torchllm.tools.watch.bottlenecks.time", SimpleNamespace(perf_counter=lambda: clock.now)):
        monitor = monitor_of(folder, tiny({"parallel.dp_shard": 2}), [Adaptation(adapt, starved_seconds=0.05)])
        for wait in waits:
            clock.now += 0.2
            monitor.meter.total_data_wait += wait * dist.get_rank()
            assert not monitor.wants_change(1)
    return observed


def test_a_starved_loader_is_seen_on_all_ranks(tmp_path: Path) -> None:
    assert run(_starved, 2, tmp_path, [0.001, 0.1]) == [[None, 1]] * 2
    assert run(_starved, 2, tmp_path, [0.04]) == [[None]] * 2  # over 5 % of the time, but not worth it


def _clocks_apart(folder: Path) -> bool:
    """Rank 1 waited 0.2 s of 2 s; rank 0's clock says that 0.2 s have passed, all of them waited."""
    changes: list[Bottlenecks] = []

    def adapt(config: Config, bottlenecks: Bottlenecks) -> None:
        changes.append(bottlenecks)

    now = 2.0 if dist.get_rank() else 0.2
    adaptation = Adaptation(adapt, starved_seconds=0.05)
    monitor = monitor_of(folder, tiny({"parallel.dp_shard": 2}), [adaptation])
    adaptation.data_wait_clock.started = 0.0
    monitor.meter.total_data_wait = 0.2 * dist.get_rank()
    with mock.patch("torchllm.tools.watch.bottlenecks.time", SimpleNamespace(perf_counter=lambda: now)):
        monitor.wants_change(10)
    return changes[0].data_wait is not None


def test_ranks_decide_alike_whatever_their_clocks_say(tmp_path: Path) -> None:
    assert run(_clocks_apart, 2, tmp_path) == [True, True]


def _log_of_a_change(folder: Path) -> list[str]:
    """What a run logs that changes its config after its first step, and takes six steps with the new one."""
    changed = tiny({"run.seed": 7})
    clock = SimpleNamespace(now=0.0)
    fake = mock.patch("torchllm.tools.adapt.adaptation.time", SimpleNamespace(perf_counter=lambda: clock.now))
    with fake, log_lines() as lines:
        adaptation = Adaptation(lambda config, bottlenecks: Change(changed, "another seed"))
        monitor = monitor_of(folder, tiny({}), [adaptation])
        lines.clear()
        with monitor.step(1):
            clock.now += 0.8
        assert monitor.wants_change(1)
        assert monitor.change is not None
        assert monitor.change.config == changed
        begin(monitor, changed, start=1)
        assert monitor.change is None
        for n in range(2, 2 + TIMED_STEPS + 1):
            with monitor.step(n):
                clock.now += 0.2
    return lines


def test_a_change_is_logged_and_compared_with_the_steps_before(tmp_path: Path) -> None:
    [(change, comparison)] = run(_log_of_a_change, 1, tmp_path)
    assert change == "step 1: another seed, from this checkpoint on"
    assert comparison == "another seed: steps took 0.8 s, now 0.2 s (-75 %)"


def _stage_times(folder: Path) -> list[bool]:
    """At each checkpoint: whether stage times were measured. Six steps are needed; they are measured once."""
    observed: list[bool] = []

    def adapt(config: Config, bottlenecks: Bottlenecks) -> None:
        observed.append(bottlenecks.stage_times is not None)

    config = tiny({"parallel.pp": 2, "parallel.rebalance": True})
    adaptation = Adaptation(adapt)
    monitor = monitor_of(folder, config, [adaptation])
    clock = adaptation.stage_clock
    assert clock is not None
    for index in clock.forwards:
        clock.forwards[index] += 2 * [(0.0, 1.0 + index)]
    for n in range(1, TIMED_STEPS + 3):
        with monitor.step(n):
            pass
        monitor.wants_change(n)
    return observed


def test_stages_are_timed_once_in_the_first_steps(tmp_path: Path) -> None:
    assert run(_stage_times, 2, tmp_path) == [[False] * TIMED_STEPS + [True, False]] * 2
