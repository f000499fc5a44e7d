"""What the monitor decides and writes; the meter, the sinks and the observers have tests of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity import CPU, build, tiny
from tests.workers import run
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.metrics.monitor import Monitor
from torchllm.metrics.observer import Change, ObservedRun, Observer
from torchllm.metrics.sinks import Record
from torchllm.train.step import StepResult


def monitor_of(folder: Path, config: Config, observers: Sequence[Observer] = (), start: int = 0) -> Monitor:
    """A monitor of this rank, begun."""
    runtime: Any = SimpleNamespace(
        folder=folder,
        rank=dist.get_rank(),
        is_main=dist.get_rank() == 0,
        world_size=dist.get_world_size(),
        ranks_on_node=dist.get_world_size(),
        device=CPU,
        host_group=dist.new_group(backend="gloo"),
        check_owner=lambda: None,
    )
    monitor = Monitor(runtime, observers)
    begin(monitor, config, start)
    return monitor


def begin(monitor: Monitor, config: Config, start: int, rounded_shares: str = "") -> None:
    config = replace(config, metrics=replace(config.metrics, tensorboard=False, breakdown_interval=0))
    data: Any = SimpleNamespace(
        state=lambda: {"sequences": 0},
        skipped={},
        describe_sources=lambda steps: [f"data.sources.0: read in {steps} steps"],
        corpora=dict,
        describe_rounded_shares=lambda: rounded_shares,
    )
    mesh, stages = build(config)
    monitor.begin(config, mesh, stages, data, start)


def _records_of_another_sink(folder: Path) -> tuple[int, bool]:
    """How many records it got, and whether it was closed."""
    records = []
    closed = []
    sink: Any = SimpleNamespace(write=lambda n, record: records.append(record), close=lambda: closed.append(True))
    monitor = monitor_of(folder, tiny({"parallel.dp_shard": 2}))
    monitor.add_sink(sink)
    monitor.meter.write(1, {"step": 1})
    monitor.end()
    return len(records), closed == [True]


def test_another_sink_gets_the_records_of_rank_0(tmp_path: Path) -> None:
    assert run(_records_of_another_sink, 2, tmp_path) == [(1, True), (0, False)]


def _refusal(folder: Path) -> str:
    config = tiny({})
    with pytest.raises(UserError) as error:
        monitor_of(folder, replace(config, checkpoint=replace(config.checkpoint, initial="another run")))
    return str(error.value)


def test_a_recipe_that_ignores_a_key_is_refused_before_its_first_step(tmp_path: Path) -> None:
    [error] = run(_refusal, 1, tmp_path)
    assert 'checkpoint.initial: is "another run", but this recipe does not apply it: call Checkpointer(' in error


class Heard(Observer):
    """Notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, run: ObservedRun) -> None:
        self.calls.append(("begin", run.start))

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        self.calls.append(("before", n))
        yield
        self.calls.append(("after", n))

    def spent(self, cause: str, seconds: float) -> None:
        self.calls.append(("spent", cause))

    def logged(self, n: int, record: Record) -> None:
        self.calls.append(("logged", n, record["loss"]))

    def evaluated(self, n: int, loss: float) -> None:
        self.calls.append(("evaluated", n, loss))

    def saved(self, n: int) -> Change | None:
        self.calls.append(("saved", n))
        return Change(tiny({"run.seed": 7}), "another seed") if n == 2 else None

    def end(self) -> None:
        self.calls.append("end")

    def close(self) -> None:
        self.calls.append("close")


def _heard(folder: Path) -> tuple[list[Any], list[bool], int]:
    """What an observer hears of two steps, whether a change was wanted, and the seed to go on with."""
    heard = Heard()
    monitor = monitor_of(folder, tiny({"metrics.log_interval": 1}), [Observer(), heard], start=0)
    zero = torch.zeros((), dtype=torch.float64)
    changes = []
    for n in (1, 2):
        with monitor.step(n), monitor.data_wait():
            pass
        result = StepResult(zero + n, zero, zero + 1, zero + 1, 0.1, zero, zero)
        monitor.log(n, result, 2.5 if n == 2 else None, force=True)
        changes.append(monitor.wants_change(n))
    monitor.end()
    monitor.close()
    assert monitor.change is not None
    return heard.calls, changes, monitor.change.config.run.seed


def test_an_observer_hears_of_each_event_in_order(tmp_path: Path) -> None:
    [(calls, changes, seed)] = run(_heard, 1, tmp_path)
    first = [("before", 1), ("spent", "data"), ("after", 1), ("logged", 1, 1.0), ("saved", 1)]
    second = [("before", 2), ("spent", "data"), ("after", 2), ("spent", "compile"), ("logged", 2, 2.0)]
    assert calls == [("begin", 0), *first, *second, ("evaluated", 2, 2.5), ("saved", 2), "end", "close"]
    assert changes == [False, True]
    assert seed == 7
