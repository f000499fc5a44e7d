"""What the monitor decides and writes; the meter, the sinks and the observers have tests of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.parity import CPU, build, tiny
from tests.workers import run
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.data.corpus_header import CorpusHeader
from torchllm.metrics.monitor import Monitor
from torchllm.metrics.observer import Change, ObservedRun, Observer
from torchllm.metrics.sinks import Record
from torchllm.train.step import StepResult


def monitor_of(folder: Path, config: Config, observers: Sequence[Observer] = (), start: int = 0) -> Monitor:
    runtime: Any = SimpleNamespace(
        has_given_up=False,
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


def begin(
    monitor: Monitor,
    config: Config,
    start: int,
    rounded_shares: str = "",
    headers: Mapping[str, CorpusHeader] | None = None,
    skipped: dict[str, int] | None = None,
) -> None:
    config = replace(config, metrics=replace(config.metrics, tensorboard=False, breakdown_interval=0))
    data: Any = SimpleNamespace(
        state=lambda: {"sequences": 0},
        skipped=skipped or {},
        describe_sources=lambda steps: [f"data.sources.0 (jsonl 'a'): read in {steps} steps"],
        corpora=lambda: headers or {},
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


def _calls_of_late_observers(folder: Path) -> list[str]:
    """The calls of observers that are added before `begin`, between steps, and within a step."""
    calls = []

    class Late(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self, run: ObservedRun) -> None:
            calls.append(f"{self.name} begins after {run.start}")

        def logged(self, n: int, record: Record) -> None:
            calls.append(f"{self.name} {n}")

    config = tiny({})
    monitor = monitor_of(folder, config, [Late("early")])
    monitor.observers.append(Late("late"))
    zero = torch.zeros(())
    result = StepResult(zero, zero, zero + 1, zero + 1, 0.1, zero, zero)
    with mock.patch.object(monitor.meter, "log", return_value={"step": 1}):
        with monitor.step(1):
            monitor.observers.insert(0, Late("later"))
            monitor.log(1, result, None, force=True)
            monitor.read_health = None
        with monitor.step(2):
            pass
    begin(monitor, config, 2)
    return calls


def test_an_observer_that_is_added_late_begins_too(tmp_path: Path) -> None:
    begun = ["early begins after 0", "late begins after 0", "later begins after 0"]
    logged = ["later 1", "early 1", "late 1"]
    again = [f"{name} begins after 2" for name in ("later", "early", "late")]
    assert run(_calls_of_late_observers, 1, tmp_path) == [[*begun, *logged, *again]]


def _refusal(folder: Path) -> str:
    config = tiny({})
    with pytest.raises(UserError) as error:
        monitor_of(folder, replace(config, checkpoint=replace(config.checkpoint, initial="another run")))
    return str(error.value)


def test_a_recipe_that_ignores_a_key_is_refused_before_its_first_step(tmp_path: Path) -> None:
    [error] = run(_refusal, 1, tmp_path)
    assert 'checkpoint.initial: is "another run", but this recipe does not apply it: call Checkpointer(' in error


def _heard(folder: Path) -> tuple[dict[str, list[Any]], list[str], list[bool]]:
    """What an observer hears of two steps, by event and in order, and whether a change was wanted after each."""
    heard: Any = mock.MagicMock(spec=Observer)
    change = Change(tiny({"run.seed": 7}), "another seed")
    heard.saved.side_effect = [None, change]
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
    assert monitor.change == change
    assert heard.begin.call_args.args[0].start == 0
    assert [call.args[1]["loss"] for call in heard.logged.call_args_list] == [1.0, 2.0]
    events = {name: [call.args[0] for call in getattr(heard, name).call_args_list] for name in EVENTS}
    return events, [name for name, _, _ in heard.mock_calls], changes


EVENTS = ("step", "spent", "logged", "saved")


def test_an_observer_hears_of_each_event_in_order(tmp_path: Path) -> None:
    [(events, order, changes)] = run(_heard, 1, tmp_path)
    assert events == {"step": [1, 2], "spent": ["data", "data", "compile"], "logged": [1, 2], "saved": [1, 2]}
    step = ["step", "step().__enter__", "spent", "step().__exit__"]
    first, second = [*step, "logged", "saved"], [*step, "spent", "logged", "evaluated", "saved"]
    assert order == ["begin", *first, *second, "end", "close"]
    assert changes == [False, True]
