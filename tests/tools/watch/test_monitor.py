"""What the monitor decides and writes; the meter, the profiler and the sinks behind it have tests of their own."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.parity import CPU, build, tiny
from tests.workers import run
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.facts.flops import flops_per_token, parameter_count
from torchllm.tools.watch.monitor import SLOW_NODES, TIMED_STEPS, Bottlenecks, Change, Monitor
from torchllm.tools.watch.slow_rank import SlowRank
from torchllm.tools.watch.step_profiler import ProfiledStep


def monitor_of(
    folder: Path, config: Config, adapt: Callable[[Config, Bottlenecks], Change | None] | None = None, start: int = 0
) -> Monitor:
    """A monitor of this rank, begun; 0.05 s of waiting are enough for a starved loader."""
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
    monitor = Monitor(runtime, adapt, starved_seconds=0.05)
    begin(monitor, config, start)
    return monitor


def begin(monitor: Monitor, config: Config, start: int, rounded_shares: str = "") -> None:
    config = replace(config, metrics=replace(config.metrics, tensorboard=False, breakdown_interval=0))
    mesh, stages = build(config)
    data: Any = SimpleNamespace(
        state=lambda: {"sequences": 0},
        skipped={},
        describe_sources=lambda steps: [f"data.sources.0: read in {steps} steps"],
        corpora=dict,
        describe_rounded_shares=lambda: rounded_shares,
    )
    monitor.begin(config, mesh, stages, data, start)


class LogLines(logging.Handler):
    """Keeps the texts of a rank's log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Give the texts that the library logs inside the context on this rank."""
    logger = logging.getLogger("torchllm")
    handler, level = LogLines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _starved(folder: Path, waits: list[float]) -> list[int | None]:
    """The rank named at checkpoints 0.2 s apart, in which rank 1 waited so many seconds for data."""
    observed: list[int | None] = []
    clock = SimpleNamespace(now=0.0)

    def adapt(config: Config, bottlenecks: Bottlenecks) -> None:
        observed.append(bottlenecks.data_wait.rank if bottlenecks.data_wait else None)

    with mock.patch("torchllm.tools.watch.bottlenecks.time", SimpleNamespace(perf_counter=lambda: clock.now)):
        monitor = monitor_of(folder, tiny({"parallel.dp_shard": 2}), adapt)
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
    monitor = monitor_of(folder, tiny({"parallel.dp_shard": 2}), adapt)
    monitor.data_wait_clock.started = 0.0
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
    fake = mock.patch("torchllm.tools.watch.monitor.time", SimpleNamespace(perf_counter=lambda: clock.now))
    with fake, log_lines() as lines:
        monitor = monitor_of(folder, tiny({}), lambda config, bottlenecks: Change(changed, "another seed"))
        lines.clear()
        with monitor.step(1):
            clock.now += 0.8
        assert monitor.wants_change(1)
        assert monitor.next_config == changed
        begin(monitor, changed, start=1)
        assert monitor.next_config is None
        for n in range(2, 2 + TIMED_STEPS + 1):
            with monitor.step(n):
                clock.now += 0.2
    return lines


def test_a_change_is_logged_and_compared_with_the_steps_before(tmp_path: Path) -> None:
    [(change, comparison)] = run(_log_of_a_change, 1, tmp_path)
    assert change == "step 1: another seed, from this checkpoint on"
    assert comparison == "another seed: steps took 0.8 s, now 0.2 s (-75 %)"


def _log_of_a_finished_run(folder: Path) -> list[str]:
    config = tiny({})
    with log_lines() as lines:
        monitor_of(folder, config, start=config.training.steps)
    return lines


def _log_of_rounded_shares(folder: Path) -> list[str]:
    monitor = monitor_of(folder, tiny({}))
    with log_lines() as lines:
        begin(monitor, tiny({}), 0, rounded_shares="data.sources.1 (text): 1e-06 asked, 0.0001 used")
    return lines


def test_a_run_says_which_shares_of_its_sources_it_rounds(tmp_path: Path) -> None:
    [lines] = run(_log_of_rounded_shares, 1, tmp_path)
    line = lines[-1]
    assert line.startswith("shares of data.sources are rounded: ")
    assert line.endswith("data.sources.1 (text): 1e-06 asked, 0.0001 used")


def test_a_finished_run_says_that_there_is_nothing_to_do(tmp_path: Path) -> None:
    [lines] = run(_log_of_a_finished_run, 1, tmp_path)
    steps = tiny({}).training.steps
    assert lines[-1].startswith(f"nothing to do: the run is at step {steps} of training.steps = {steps}; raise")


def _log_of_a_start(folder: Path) -> list[str]:
    with log_lines() as lines:
        monitor_of(folder, tiny({}), start=1)
    return lines


def test_a_run_says_what_it_trains(tmp_path: Path) -> None:
    config = tiny({})
    steps, tokens = config.training.steps, config.training.global_batch_size * config.training.sequence_length
    assert run(_log_of_a_start, 1, tmp_path) == [
        [
            f"model: {parameter_count(config.model):,} parameters in {config.model.layers} blocks",
            f"data.sources.0: read in {steps} steps",
            f"steps 2 to {steps}: {(steps - 1) * tokens:,} tokens, {tokens:,} per step",
        ]
    ]


def _log_of_a_float8_peak(folder: Path) -> list[str]:
    monitor = monitor_of(folder, tiny({}))
    with log_lines() as lines:
        monitor.describe_peak(tiny({}), 1e12)
        monitor.describe_peak(tiny({"float8.recipe": "rowwise"}), None)
        monitor.describe_peak(tiny({"float8.recipe": "rowwise"}), 1e12)
    return lines


def test_a_run_in_float8_says_what_its_utilization_is_a_share_of(tmp_path: Path) -> None:
    assert run(_log_of_a_float8_peak, 1, tmp_path) == [
        ["MFU and HFU are against 1 TFLOP/s per rank, bfloat16's, for a CPU emulates float8"]
    ]


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


def _unadapted(folder: Path) -> bool:
    return monitor_of(folder, tiny({})).wants_change(1)


def test_without_adaptation_a_run_keeps_its_config(tmp_path: Path) -> None:
    assert run(_unadapted, 1, tmp_path) == [False]


def _stage_times(folder: Path) -> list[bool]:
    """At each checkpoint: whether stage times were measured. Six steps are needed; they are measured once."""
    observed: list[bool] = []

    def adapt(config: Config, bottlenecks: Bottlenecks) -> None:
        observed.append(bottlenecks.stage_times is not None)

    config = tiny({"parallel.pp": 2, "parallel.rebalance": True})
    monitor = monitor_of(folder, config, adapt)
    clock = monitor.stage_clock
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


def _slow_nodes(folder: Path) -> str:
    monitor = monitor_of(folder, tiny({}))
    for step, host in enumerate(("node-7", "node-7", "node-3"), 1):
        monitor.profiler.latest = ProfiledStep(step, {"forward": 1.0}, SlowRank(step, host, "forward", 1.0, 0.5))
        monitor._report(monitor.profiler.latest)
    return (folder / SLOW_NODES).read_text()


def test_the_nodes_of_slow_ranks_are_written_for_slurm(tmp_path: Path) -> None:
    assert run(_slow_nodes, 1, tmp_path) == ["node-7,node-3"]


def _events(folder: Path) -> list[str]:
    """What `run.on_event` was called with where the meter warns of the load of experts."""
    config = tiny({"model.experts": 4, "model.top_k": 1, "model.router_renormalize": False, "run.on_event": "tell me"})
    calls: list[str] = []

    def call(*arguments: object) -> None:
        calls.append(" ".join(map(str, arguments)))

    with mock.patch("torchllm.tools.watch.monitor.call_on_event", call):
        monitor = monitor_of(folder, config)
        monitor.meter.on_imbalance()
    return calls


def test_unequal_loads_of_experts_are_an_event_of_the_run(tmp_path: Path) -> None:
    assert run(_events, 1, tmp_path) == [[f"tell me imbalance {tmp_path}"]]


def _refusal(folder: Path) -> str:
    config = tiny({})
    with pytest.raises(UserError) as error:
        monitor_of(folder, replace(config, checkpoint=replace(config.checkpoint, initial="another run")))
    return str(error.value)


def test_a_recipe_that_ignores_a_key_is_refused_before_its_first_step(tmp_path: Path) -> None:
    [error] = run(_refusal, 1, tmp_path)
    assert 'checkpoint.initial: is "another run", but this recipe does not apply it: call Checkpointer(' in error


def _report_two_steps(folder: Path) -> tuple[list[Any], list[str], float]:
    """The records and lines of two profiled steps on a device whose peak is 1 MFLOP/s; the MFU of the first."""
    records: list[Any] = []
    sink: Any = SimpleNamespace(write=lambda step, record: records.append(record), close=lambda: None)
    config = tiny({})
    with log_lines() as lines:
        monitor = monitor_of(folder, config, None)
        monitor.add_sink(sink)
        monitor.meter.peak = 1e6
        before = len(lines)
        monitor._report(ProfiledStep(4, {"forward": 0.5, "backward": 1.0, "exposed fsdp": 0.5}, None))
        monitor._report(ProfiledStep(8, {"forward": 2.0}, SlowRank(2, "node-7", "forward", 0.9, 0.3)))
        monitor.end()
    length = config.training.sequence_length
    return (
        records,
        lines[before:],
        config.training.global_batch_size * length / 2.0 * flops_per_token(config.model, length) / 1e6,
    )


def test_a_profiled_step_has_a_record_of_its_own_and_the_first_a_line(tmp_path: Path) -> None:
    [(records, lines, mfu)] = run(_report_two_steps, 1, tmp_path)
    shares = {"breakdown/forward": 0.25, "breakdown/backward": 0.5, "breakdown/exposed fsdp": 0.25}
    assert records == [{"step": 4} | shares, {"step": 8, "breakdown/forward": 1.0}]
    assert lines[0].startswith("step 4, 2 s: backward 50.0%, ")
    assert f"MFU {mfu:.1%} measured; exposed fsdp costs {100 * (mfu / 0.75 - mfu):.1f} points" in lines[0]
    assert lines[1] == "step 8: rank 2 (node-7) is slow: forward takes 0.9 s, 0.3 s on its peers"
