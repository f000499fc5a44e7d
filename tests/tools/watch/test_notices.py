"""What a run logs before its first step, and its events."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.metrics.test_monitor import begin, monitor_of
from tests.parity import Settings, tiny
from tests.workers import run
from torchllm.config import MixtureStage
from torchllm.facts.flops import parameter_count
from torchllm.tools.watch.notices import Events, Notices, describe_peak


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


def _log_of_a_start(folder: Path, start: int, settings: Settings | None = None) -> list[str]:
    with log_lines() as lines:
        monitor_of(folder, tiny(settings or {}), [Notices()], start)
    return lines


def test_a_run_says_what_it_trains_or_that_there_is_nothing_to_do(tmp_path: Path) -> None:
    config = tiny({})
    steps, tokens = config.training.steps, config.training.global_batch_size * config.training.sequence_length
    assert run(_log_of_a_start, 1, tmp_path, 1) == [
        [
            f"model: {parameter_count(config.model):,} parameters in {config.model.layers} blocks",
            f"data.sources.0 (jsonl 'a'): read in {steps} steps",
            f"steps 2 to {steps}: {(steps - 1) * tokens:,} tokens, {tokens:,} per step",
        ]
    ]
    stages = (MixtureStage(until=1), MixtureStage(until=2, global_batch_size=4), MixtureStage())
    for start, figures in ((0, f"{2.5 * tokens:,.0f} tokens, {tokens // 2:,} to"), (2, f"{tokens:,} tokens,")):
        [[*_, line]] = run(_log_of_a_start, 1, tmp_path, start, {"data.stage": stages})
        assert line == f"steps {start + 1} to {steps}: {figures} {tokens:,} per step"
    [[*_, last]] = run(_log_of_a_start, 1, tmp_path, steps)
    assert last.startswith(f"nothing to do: the run is at step {steps} of training.steps = {steps}; raise")


def _log_of_data(folder: Path) -> list[str]:
    monitor = monitor_of(folder, tiny({}), [Notices()])
    with log_lines() as lines:
        begin(monitor, tiny({}), 0, "data.sources.1 (text): 1e-06 asked, 0.0001 used", skipped={"broken JSON": 2})
    return lines


def test_a_run_says_which_shares_of_its_sources_it_rounds_and_what_it_skips(tmp_path: Path) -> None:
    [lines] = run(_log_of_data, 1, tmp_path)
    assert lines[-2:] == [
        "records skipped: {'broken JSON': 2}",
        "shares of data.sources are rounded: data.sources.1 (text): 1e-06 asked, 0.0001 used",
    ]


def _log_of_conversations(folder: Path) -> list[str]:
    counts = {"conversations": 2, "examples": 3, "trained tokens": 5, "tokens of examples": 20}
    counts |= {"tokens across the border of a prompt and its answer, which inference never sees": 4}
    header: Any = SimpleNamespace(counts=counts, tokens=20, plan={}, text_bytes=400)
    monitor = monitor_of(folder, tiny({}))
    monitor.observers.append(Notices())
    with log_lines() as lines:
        begin(monitor, tiny({}), 0, headers={"data.sources.0 (jsonl 'a')": header})
    return [line for line in lines if line.startswith("data.sources")]


def test_a_source_is_one_line(tmp_path: Path) -> None:
    steps = tiny({}).training.steps
    assert run(_log_of_conversations, 1, tmp_path) == [
        [
            f"data.sources.0 (jsonl 'a'): read in {steps} steps; 2 conversations, 3 examples: 25.0% of their tokens "
            "are trained; 0.0% of the sequences is padding; tokens across the border of a prompt and its answer, which "
            "inference never sees: 4"
        ]
    ]


def _log_of_a_float8_peak() -> list[str]:
    with log_lines() as lines:
        for recipe, peak, given in (("none", 2, 0), ("rowwise", None, 0), ("rowwise", 4, 2), ("rowwise", 2, 0)):
            config = tiny({"float8.recipe": recipe, "metrics.peak_tflops": float(given)})
            meter = SimpleNamespace(peak=peak and peak * 1e12)
            describe_peak(SimpleNamespace(config=config, runtime=SimpleNamespace(world_size=2), meter=meter))
    return lines


def test_a_run_in_float8_says_what_its_utilization_is_a_share_of() -> None:
    assert _log_of_a_float8_peak() == ["MFU and HFU are against 1 TFLOP/s per rank, float8's"]


def _events(folder: Path) -> list[str]:
    """What `run.on_event` was called with in twelve logged steps."""
    config = tiny({"run.on_event": "tell me"})
    calls: list[str] = []

    def call(*arguments: object) -> None:
        calls.append(" ".join(map(str, arguments)))

    with mock.patch("torchllm.tools.launch.on_event.call_on_event", call):
        events = Events()
        monitor_of(folder, config, [events])
        for n in range(1, 13):
            events.logged(n, {"skipped_steps": n // 3})
    return calls


def test_a_skipped_step_is_an_event_once(tmp_path: Path) -> None:
    assert run(_events, 1, tmp_path) == [[f"tell me nan {tmp_path}"]]
