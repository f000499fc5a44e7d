import io
import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchllm.metrics.sinks
from torchllm.config import Metrics
from torchllm.metrics.sinks import (
    BLOCK,
    Console,
    JsonLines,
    Record,
    TensorBoard,
    cut_position,
    lines_from_end,
    open_sinks,
)

RECORD: Record = {
    "step": 40,
    "loss": 2.34567,
    "grad_norm": 0.8124,
    "learning_rate": 3e-4,
    "tokens": 81920,
    "tokens_per_second": 12345.6,
    "step_seconds": 0.5,
    "data_seconds": 0.001,
    "mfu": 0.312,
    "mfu_unmasked": 0.3,
    "hfu": 0.35,
    "memory_gib": 1.234,
    "skipped_steps": 0,
}


def write(path: Path, steps: range, start: int = 0) -> None:
    sink = JsonLines(path, start)
    for step in steps:
        sink.write(step, {"step": step, "loss": step / 2})
    sink.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_json_line_is_on_disk_when_written(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "run" / "metrics.jsonl")
    sink.write(40, RECORD)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == RECORD
    sink.close()


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(1, {"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": None, "grad_norm": None, "mfu": None}


def test_resume_writes_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    write(path, range(5, 10), start=4)
    assert steps_in(path) == list(range(1, 10))
    write(path, range(10, 12), start=9)
    assert steps_in(path) == list(range(1, 12))
    write(path, range(1, 3))
    assert steps_in(path) == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_resume_drops_the_line_that_a_kill_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    damaged = [b"\x00\x00\x00\n", b"7\n", b'{"loss": 1}\n', b"\xff\n", b'{"step": 4, "los']
    with path.open("ab") as file:
        file.writelines(damaged)
    with caplog.at_level(logging.WARNING):
        write(path, range(4, 6), start=3)
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert len(caplog.messages) == len(damaged)
    assert caplog.messages[0].startswith(f"{path}: {len(damaged[-1])} bytes from byte ")


def test_a_complete_last_line_without_its_newline_is_not_glued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    write(path, range(3, 4), start=2)
    assert steps_in(path) == [1, 3]


def test_a_failed_resume_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    content = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match="disk gone"):
        JsonLines(path, start=3)
    assert path.read_bytes() == content


@pytest.mark.parametrize("block", [1, 7, 64, 10_000])
def test_lines_are_read_from_the_end(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(torchllm.metrics.sinks, "BLOCK", block)
    for content in (b"", b"\n", b"one", b"one\n", b"\n\ntwo\nthree\n\nlast", b"a" * 100 + b"\n" + b"b" * 100 + b"\n"):
        assert list(lines_from_end(io.BytesIO(content))) == content.splitlines(keepends=True)[::-1]


class CountedReads(io.BytesIO):
    """A file in memory that counts the bytes which are read."""

    name = "metrics.jsonl"
    bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.bytes_read += len(content)
        return content


@pytest.mark.parametrize("records", [1_000, 20_000])
def test_a_resume_reads_the_end_of_the_file_however_long_it_is(records: int) -> None:
    lines = [json.dumps(RECORD | {"step": step}) for step in range(1, records + 1)]
    file = CountedReads("".join(f"{line}\n" for line in lines).encode())
    assert cut_position(file, start=records - 5) == sum(len(line) + 1 for line in lines[:-5])
    assert file.bytes_read == BLOCK


def test_tensorboard_groups_names_and_hides_what_a_resume_repeats(tmp_path: Path) -> None:
    for start, value in ((0, 1.0), (2, 5.0)):
        sink = TensorBoard(tmp_path, start)
        for step in range(start + 1, 5):
            sink.write(step, RECORD | {"step": step, "loss": value, "mfu": None, "temperature": 3.0})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/train")] == [(1, 1), (2, 1), (3, 5), (4, 5)]
    tags = events.Tags()["scalars"]
    assert "performance/tokens_per_second" in tags
    assert "other/temperature" in tags  # a key that a fork added
    assert not {"performance/mfu", "other/step"} & set(tags)


def test_every_key_has_a_curve() -> None:
    assert TensorBoard.TAGS.keys() == RECORD.keys() - {"step"} | {"validation_loss"}


def test_console_without_a_terminal_writes_one_plain_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    sink = Console(1000, stream=stream)
    sink.write(40, RECORD)
    sink.write(50, RECORD | {"mfu": None, "validation_loss": 2.5, "loss": float("nan")})
    sink.close()
    first, second = stream.getvalue().splitlines()
    assert first == (
        "step   40/1000  loss 2.3457  gradient 0.812  rate 3.00e-04  12,346 tokens/s  MFU 31.2%  1.23 GiB  left 0:08:00"
    )
    assert "loss nan  validation 2.5000" in second
    assert "MFU -" in second


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_console_on_a_terminal_is_a_progress_bar() -> None:
    stream = Terminal()
    sink = Console(100, start=20, stream=stream)
    sink.write(40, RECORD | {"validation_loss": 2.5})
    sink.write(50, RECORD)
    assert sink.bar is not None
    assert sink.bar.n == 50
    sink.close()
    text = stream.getvalue()
    assert "50/100" in text
    assert "<" in text  # the bar's elapsed<left
    assert "loss 2.3457  validation 2.5000  12,346 tokens/s  MFU 31.2%" in text.split("\r")[-1]


def test_a_line_of_the_log_does_not_begin_at_the_end_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    handlers = [logging.StreamHandler(terminal)]
    monkeypatch.setattr(logging.root, "handlers", handlers)
    sink = Console(100)
    sink.write(10, RECORD)
    logging.getLogger("torchllm").warning("saved runs/x")
    sink.write(20, RECORD)
    sink.close()
    bar, next_bar = terminal.getvalue().split("saved runs/x\n")
    assert bar.endswith("\r")  # the bar was cleared, and the cursor is at the start of its line
    assert "10/100" not in bar.split("\r")[-2]
    assert "10/100" in next_bar.split("\r")[1]  # and it is drawn again below
    assert logging.root.handlers == handlers


@pytest.mark.parametrize("tensorboard", [True, False])
def test_a_run_has_the_sinks_that_it_asks_for(tmp_path: Path, tensorboard: bool) -> None:
    sinks = open_sinks(tmp_path, Metrics(tensorboard=tensorboard), steps=10)
    for sink in sinks:
        sink.write(1, RECORD)
        sink.close()
    assert (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "tensorboard").exists() == tensorboard


def test_the_layout_shows_curves_that_are_written(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.write(10, RECORD | {"validation_loss": 2.5, "breakdown/forward": 0.4, "gpu/busy": 0.9})
    sink.close()
    curves = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    for charts in TensorBoard.LAYOUT.values():
        for _, patterns in charts.values():
            for pattern in patterns:
                assert any(re.fullmatch(pattern, curve) for curve in curves), pattern
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"Is it fast?" in written


def test_tensorboard_shows_loss_and_throughput_first(tmp_path: Path) -> None:
    """It sorts the groups by name."""
    sink = TensorBoard(tmp_path)
    keys = [*RECORD, "validation_loss", "breakdown/forward", "gpu/busy"]
    groups = sorted({sink.tag(key).partition("/")[0] for key in keys if key != "step"})
    sink.close()
    assert groups == ["loss", "performance", "progress", "system", "time_share", "update"]
    assert sink.tag("tokens_per_second").startswith("performance/")
    assert sink.tag("experts/load") == "experts/load"  # a group that a fork added
