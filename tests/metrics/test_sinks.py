import errno
import io
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchllm.metrics.sinks
from torchllm.config import Config, Metrics
from torchllm.metrics.cut_lines import lines_from_end
from torchllm.metrics.sinks import (
    WAITING_RECORDS,
    JsonLines,
    Record,
    TensorBoard,
    TolerantSink,
    open_sinks,
)

RECORD: Record = {
    "step": 40,
    "loss": 2.34567,
    "grad_norm": 0.8124,
    "learning_rate": 3e-4,
    "tokens": 81920,
    "tokens_per_second": 12345.6,
    "targets_per_second": 12345.6,
    "step_seconds": 0.5,
    "data_seconds": 0.001,
    "mfu": 0.312,
    "mfu_unmasked": 0.3,
    "hfu": 0.35,
    "memory_gib": 1.234,
    "memory_reserved_gib": 1.5,  # this and the next one: of a GPU
    "allocation_retries": 0,
    "skipped_steps": 0,
}


def write(path: Path, steps: range, start: int = 0) -> None:
    sink = JsonLines(path, start)
    for step in steps:
        sink.write(step, {"step": step, "loss": step / 2})
    sink.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("rotates", [True, False])
def test_a_file_that_is_rotated_or_deleted_goes_on(
    rotates: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write(1, {"step": 1})
    path.rename(tmp_path / "metrics.jsonl.1") if rotates else path.unlink()
    sink.write(2, {"step": 2})
    sink.write(3, {"step": 3})
    assert steps_in(path) == [2, 3]
    assert len([line for line in caplog.messages if "was deleted or renamed" in line]) == 1
    path.write_text("")  # cut in place
    sink.write(4, {"step": 4})
    assert steps_in(path) == [4]
    sink.close()


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(1, {"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    sink.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None, "mfu": None}


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
    path.write_text('{"step": 1}\n{"step": 2}')  # whole, but without its newline
    write(path, range(3, 4), start=2)
    assert steps_in(path) == [1, 3]


def test_a_failed_resume_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    content = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "ftruncate", fail)
    sink = JsonLines(path, start=3)
    with pytest.raises(OSError, match="disk gone"):
        sink.write(4, {"step": 4})
    assert path.read_bytes() == content


def test_lines_are_read_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (1, 7, 64, 10_000):
        monkeypatch.setattr("torchllm.metrics.cut_lines.BLOCK", block)
        for content in (b"", b"\n", b"one", b"one\n", b"\n\ntwo\nthree\n\nlast", b"a" * 100 + b"\n" + b"b" * 100):
            assert list(lines_from_end(io.BytesIO(content))) == content.splitlines(keepends=True)[::-1]


def test_a_run_without_tensorboard_has_none(tmp_path: Path) -> None:
    for sink in open_sinks(tmp_path, Config(metrics=Metrics(tensorboard=False))):
        sink.write(1, RECORD)
        sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_groups_names_and_hides_what_a_resume_repeats(tmp_path: Path) -> None:
    """It has the config as text too."""
    config = Config(metrics=Metrics(log_interval=7))
    added = {"hfu": None, "temperature": 3.0, "validation_loss": 2.5, "breakdown/forward": 0.4, "gpu/watts": 400.0}
    for start, value in ((0, 1.0), (2, 5.0)):
        for sink in open_sinks(tmp_path, config, start):
            for step in range(start + 1, 5):
                sink.write(step, RECORD | added | {"step": step, "loss": value})
            sink.close()
    folder = tmp_path / "tensorboard"
    events = EventAccumulator(str(folder)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("at_a_glance/1_loss")]
    assert losses == [(1, 1), (2, 1), (3, 5), (4, 5)]
    tags = events.Tags()["scalars"]
    assert "performance/step_seconds" in tags
    assert "other/temperature" in tags  # a key that a fork added
    assert not {"performance/hfu", "other/step"} & set(tags)
    for charts in TensorBoard.LAYOUT.values():
        for _, [pattern] in charts.values():  # several runs would have as many unnamed curves each
            assert pattern in tags
    assert b"Is it fast?" in b"".join(file.read_bytes() for file in folder.iterdir())
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert "    [metrics]\n    log_interval = 7\n" in text.decode()


def test_tensorboard_shows_a_launch_whose_clock_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for moment, steps in ((9000.0, range(1, 8)), (1800.0, range(5, 10)), (1800.0, range(9, 12))):
        monkeypatch.setattr(torchllm.metrics.sinks, "time", SimpleNamespace(time=lambda moment=moment: moment))
        board = TensorBoard(tmp_path, start=steps[0] - 1)
        for step in steps:
            board.write(step, {"step": step, "loss": moment + steps[0]})
        board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    shown = {event.step: event.value for event in events.Scalars("at_a_glance/1_loss")}
    expected = dict.fromkeys(range(1, 5), 9001)
    expected |= dict.fromkeys(range(5, 9), 1805)
    assert shown == expected | dict.fromkeys(range(9, 12), 1809)


class FullDisk:
    """Stands in for `os.write`: takes so many bytes in all, then half of a record at most, then none."""

    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self, descriptor: int, content: memoryview) -> int:
        if not self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = WRITE(descriptor, content[: self.free])
        self.free -= written
        return written


WRITE = os.write


@pytest.mark.parametrize("free", [0, 1, 700])
def test_a_full_disk_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    disk = FullDisk(free)
    monkeypatch.setattr(os, "write", disk)
    sinks = open_sinks(tmp_path, Config())
    for step in range(1, 7):
        if step == 5:
            disk.free = 10**6
        for sink in sinks:
            sink.write(step, {"step": step, "loss": step / 2, "grad_norm": 1.0})
    for sink in sinks:
        sink.close()
    lines = tmp_path / "metrics.jsonl"
    assert steps_in(lines) == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("at_a_glance/1_loss")] == [1, 2, 3, 4, 5, 6]
    [board] = (tmp_path / "tensorboard").iterdir()
    ending = "training goes on, and it is tried again"
    failures = [f"{file}: No space left on device; {ending}" for file in (lines, board)]
    assert sorted(caplog.messages) == sorted([*failures, f"{lines}: works again", f"{board}: works again"])


@pytest.mark.parametrize("frees_before_the_end", [False, True])
def test_a_sink_works_again_only_if_a_record_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, frees_before_the_end: bool
) -> None:
    disk = FullDisk(free=0)
    monkeypatch.setattr(os, "write", disk)
    lines = tmp_path / "metrics.jsonl"
    sink, *_ = open_sinks(tmp_path, Config())
    for step in range(1, 4):
        sink.write(step, {"step": step})
    disk.free = 1000 if frees_before_the_end else 0
    sink.close()
    failure = f"{lines}: No space left on device; training goes on, and it is tried again"
    end = f"{lines}: works again" if frees_before_the_end else f"{lines}: the last 3 records were not written"
    assert caplog.messages == [failure, end]
    assert steps_in(lines) == ([1, 2, 3] if frees_before_the_end else [])


class BrokenSink:
    def __init__(self, error: Exception) -> None:
        self.error = error
        self.steps: list[int] = []
        self.calls = 0

    def write(self, step: int, record: Record) -> None:
        self.calls += 1
        if self.calls % 2:
            raise self.error
        self.steps.append(step)

    def close(self) -> None:
        raise self.error


def test_a_sink_that_raises_misses_that_record_only(caplog: pytest.LogCaptureFixture) -> None:
    broken = BrokenSink(KeyError("run_id"))
    sink = TolerantSink("Wandb", broken)
    for step in range(1, 5):
        sink.write(step, {"step": step})
    sink.close()
    assert broken.steps == [2, 4]
    first = caplog.records[0]
    assert first.message.startswith("Wandb: KeyError('run_id'); training goes on")
    assert first.exc_info is not None  # its author wants to know where


def test_only_so_many_records_wait(caplog: pytest.LogCaptureFixture) -> None:
    broken = BrokenSink(OSError(errno.EIO, "no answer"))
    sink = TolerantSink("Wandb", broken)
    for step in range(1, WAITING_RECORDS + 10):
        broken.calls = 0
        sink.write(step, {"step": step})
    assert len(sink.waiting) == WAITING_RECORDS
    assert caplog.messages == ["Wandb: no answer; training goes on, and it is tried again"]
