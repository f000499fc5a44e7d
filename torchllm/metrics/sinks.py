"""Where logged steps go: a file of JSON lines, TensorBoard, the console. Only rank 0 has sinks.

A fork adds one by writing a class with `write` and `close` and giving an instance to `monitor.add_sink`, after
`monitor.begin`.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchllm.config import Metrics

log = logging.getLogger("torchllm")

BLOCK = 2**16
"""bytes of a file that are read at once from its end"""

Record = dict[str, float | None]
"""a logged step; `metrics/meter.py` describes the keys"""


class Sink(Protocol):
    """Takes every logged step, and every profiled one."""

    def write(self, step: int, record: Record) -> None:
        """Take the record of a step."""

    def close(self) -> None:
        """Write what is not written yet."""


def open_sinks(folder: Path, metrics: Metrics, *, steps: int, start: int = 0) -> list[Sink]:
    """Open the sinks of a run that has done `start` of its `steps` steps; for rank 0."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", start), Console(steps, start)]
    if metrics.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", start))
    return sinks


class JsonLines:
    """Writes metrics.jsonl: one object per record, on disk as soon as it is written.

    A run resumed after step `start` first cuts off the lines of later steps, so that no step is in the file twice.
    Lines after the last record up to `start` that are no records (the end of a killed run) are cut off too, with a
    warning. Only what is cut off is read, and the block before it. Values that are not finite become null: JSON has no
    NaN.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _cut_lines_after(path, start)
        self.file = path.open("a", encoding="utf-8")

    def write(self, step: int, record: Record) -> None:
        finite = {key: _finite(value) for key, value in record.items()}
        self.file.write(json.dumps(finite, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _cut_lines_after(path: Path, start: int) -> None:
    with path.open("r+b") as file:
        length = cut_position(file, start)
        if length < file.seek(0, os.SEEK_END):
            os.ftruncate(file.fileno(), length)
            os.fsync(file.fileno())


def cut_position(file: BinaryIO, start: int) -> int:
    """Return the length of a metrics.jsonl up to its last record of a step up to `start`."""
    length = file.seek(0, os.SEEK_END)
    for line in lines_from_end(file):
        step = _step_of(line)
        if step is not None and step <= start:
            break
        length -= len(line)
        if step is None:
            log.warning(
                "%s: %d bytes from byte %d on are not the record of a step; dropped", file.name, len(line), length
            )
    return length


def lines_from_end(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends, the last one first; the file is read in blocks from its end."""
    position = file.seek(0, os.SEEK_END)
    unfinished = b""
    """the begin of the earliest line read so far, as far as it was read"""
    while position > 0:
        size = min(BLOCK, position)
        position -= size
        file.seek(position)
        first, *lines = (file.read(size) + unfinished).splitlines(keepends=True)
        yield from reversed(lines)
        unfinished = first
    if unfinished:
        yield unfinished


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of metrics.jsonl; None if the line is no record, or not complete."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) and line.endswith(b"\n") else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class TensorBoard:
    """Writes TensorBoard files. What an earlier launch wrote after step `start` is hidden.

    TensorBoard shows groups of curves in the order of the alphabet. Their names are chosen for it: loss, performance,
    progress, system, time_share, update.
    """

    TAGS: Mapping[str, str] = {
        "loss": "loss/train",
        "validation_loss": "loss/validation",
        "tokens_per_second": "performance/tokens_per_second",
        "mfu": "performance/mfu",
        "mfu_unmasked": "performance/mfu_unmasked",
        "hfu": "performance/hfu",
        "step_seconds": "performance/step_seconds",
        "data_seconds": "performance/data_seconds",
        "tokens": "progress/tokens",
        "memory_gib": "system/memory_gib",
        "grad_norm": "update/grad_norm",
        "learning_rate": "update/learning_rate",
        "skipped_steps": "update/skipped_steps",
    }
    """key of a record -> name of its curve"""

    GROUPS: Mapping[str, str] = {"breakdown": "time_share", "gpu": "system"}
    """keys with a slash: what stands before it -> group of the curve"""

    LAYOUT: Mapping[str, Mapping[str, Sequence[str | Sequence[str]]]] = {
        "Does it learn?": {
            "loss": ["Multiline", ["loss/train", "loss/validation"]],
            "gradient norm": ["Multiline", ["update/grad_norm"]],
        },
        "Is it fast?": {
            "utilization": ["Multiline", ["performance/mfu", "performance/hfu"]],
            "where a step's time goes": ["Multiline", ["time_share/.*"]],
            "seconds": ["Multiline", ["performance/step_seconds", "performance/data_seconds"]],
        },
        "Is the machine well?": {
            "memory": ["Multiline", ["system/memory_gib"]],
            "the GPU": ["Multiline", ["system/(busy|watts|mhz|celsius)"]],
        },
    }
    """the page "custom scalars", in the order in which a person asks"""

    def __init__(self, folder: Path, start: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and not every run asks for it

        self.writer = SummaryWriter(str(folder), purge_step=start + 1)
        self.writer.add_custom_scalars(self.LAYOUT)

    def write(self, step: int, record: Record) -> None:
        for key, value in record.items():
            if key != "step" and value is not None:
                self.writer.add_scalar(self.tag(key), value, step)
        self.writer.flush()

    def tag(self, key: str) -> str:
        """Return the name of a key's curve; a key that a fork added is in the group "other", or in its own."""
        if key in self.TAGS:
            return self.TAGS[key]
        group, slash, name = key.partition("/")
        if not slash:
            return f"other/{key}"
        return f"{self.GROUPS.get(group, group)}/{name}"

    def close(self) -> None:
        self.writer.close()


class Console:
    """Shows a progress bar where the output is a terminal, else one line per logged step. '-' stands for unknown."""

    def __init__(self, steps: int, start: int = 0, stream: TextIO | None = None) -> None:
        self.steps = steps
        self.stream = stream or sys.stdout
        self.bar: tqdm[None] | None = None
        self.validation: float | None = None
        """the latest validation loss: the bar shows it until the next one"""
        self.redirection = ExitStack()
        if self.stream.isatty():
            # Otherwise every line of the log would begin at the end of the bar.
            self.redirection.enter_context(logging_redirect_tqdm())
            self.bar = tqdm(total=steps, initial=start, file=self.stream, unit="step", dynamic_ncols=True)
            if (self.bar.ncols or 80) < 0:  # a terminal that was never given a size: tqdm would draw nothing
                self.bar.ncols, self.bar.nrows, self.bar.dynamic_ncols = 80, 20, None

    def write(self, step: int, record: Record) -> None:
        if "loss" not in record:  # a profiled step: the first has a line in the log
            return
        if self.bar is None:
            print(self._line(step, record), file=self.stream, flush=True)
            return
        self.validation = record.get("validation_loss", self.validation)
        words = [f"loss {_number(record.get('loss'), '.4f')}"]
        if self.validation is not None:
            words.append(f"validation {_number(self.validation, '.4f')}")
        self.bar.set_postfix_str("  ".join([*words, *_speed(record)]), refresh=False)
        self.bar.update(step - self.bar.n)
        self.bar.refresh()

    def _line(self, step: int, record: Record) -> str:
        width = len(str(self.steps))
        words = [f"step {step:{width}d}/{self.steps}", f"loss {_number(record.get('loss'), '.4f')}"]
        if "validation_loss" in record:
            words.append(f"validation {_number(record['validation_loss'], '.4f')}")
        words.append(f"gradient {_number(record.get('grad_norm'), '.3f')}")
        words.append(f"rate {_number(record.get('learning_rate'), '.2e')}")
        words.extend(_speed(record))
        words.append(f"{_number(record.get('memory_gib'), '.2f')} GiB")
        seconds = record.get("step_seconds")
        time_left = "-" if seconds is None else str(timedelta(seconds=round((self.steps - step) * seconds)))
        words.append(f"left {time_left}")
        return "  ".join(words)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.redirection.close()


def _speed(record: Record) -> list[str]:
    tokens_per_second = _number(record.get("tokens_per_second"), ",.0f")
    return [f"{tokens_per_second} tokens/s", f"MFU {_number(record.get('mfu'), '.1%')}"]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
