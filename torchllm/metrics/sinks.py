"""Where logged steps go: a file of JSON lines, TensorBoard, the console. Only rank 0 has sinks.

A fork adds one by writing a class with `write` and `close` and putting an instance in the list that it gives `Meter`.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TextIO

from tqdm import tqdm

from torchllm.config import Metrics

Record = dict[str, float | None]
"""One logged step; the keys are described in `metrics/meter.py`"""


class Sink(Protocol):
    """Takes every logged step."""

    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


def open_sinks(folder: Path, metrics: Metrics, *, steps: int, start: int = 0) -> list[Sink]:
    """The sinks of a run that has done `start` of its `steps` steps; for rank 0."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", start), Console(steps, start)]
    return [*sinks, TensorBoard(folder / "tensorboard", start)] if metrics.tensorboard else sinks


class JsonLines:
    """metrics.jsonl: one object a logged step, on disk as soon as it is logged.

    A run resumed after step `start` first drops the lines of later steps, whole file or not at all, so no step is in it
    twice. Lines that are no records (the end of a killed run, a damaged file) are dropped too, with a warning.
    What is not finite becomes null: JSON has no NaN.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_lines_after(path, start)
        self.file = path.open("a", encoding="utf-8")

    def write(self, step: int, record: Record) -> None:
        self.file.write(json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _drop_lines_after(path: Path, start: int) -> None:
    old = path.read_bytes()
    kept = []
    for number, line in enumerate(old.splitlines(keepends=True), 1):
        try:
            step = json.loads(line)["step"]
            whole = isinstance(step, int) and line.endswith(b"\n")
        except (ValueError, TypeError, KeyError):
            whole = False
        if not whole:
            logging.getLogger(__name__).warning("%s:%d: not the record of a step; dropped", path, number)
        elif step <= start:
            kept.append(line)
    new = b"".join(kept)
    if new != old:
        temporary = path.with_name(path.name + ".partial")
        with temporary.open("wb") as file:
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class TensorBoard:
    """TensorBoard files; curves are grouped by what they tell. What was written after step `start` is hidden."""

    GROUPS: Mapping[str, str] = {
        "loss": "loss/train",
        "validation_loss": "loss/validation",
        "grad_norm": "optimizer/grad_norm",
        "learning_rate": "optimizer/learning_rate",
        "skipped_steps": "optimizer/skipped_steps",
        "tokens": "progress/tokens",
        "tokens_per_second": "speed/tokens_per_second",
        "step_seconds": "speed/step_seconds",
        "data_seconds": "speed/data_seconds",
        "mfu": "utilization/mfu",
        "mfu_unmasked": "utilization/mfu_unmasked",
        "hfu": "utilization/hfu",
        "memory_gib": "memory/gib",
    }

    LAYOUT: Mapping[str, Mapping[str, Sequence[str | Sequence[str]]]] = {
        "Does it learn?": {
            "loss": ["Multiline", ["loss/train", "loss/validation"]],
            "gradient norm": ["Multiline", ["optimizer/grad_norm"]],
        },
        "Is it fast?": {
            "utilization": ["Multiline", ["utilization/mfu", "utilization/hfu"]],
            "where a step's time goes": ["Multiline", ["breakdown/.*"]],
            "seconds": ["Multiline", ["speed/step_seconds", "speed/data_seconds"]],
        },
        "Is the machine well?": {
            "memory": ["Multiline", ["memory/gib"]],
            "the GPU": ["Multiline", ["gpu/.*"]],
        },
    }
    """the page "custom scalars": what a person asks first, first"""

    def __init__(self, folder: Path, start: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and not every run asks for it

        self.writer = SummaryWriter(str(folder), purge_step=start + 1)
        self.writer.add_custom_scalars(self.LAYOUT)

    def write(self, step: int, record: Record) -> None:
        for key, value in record.items():
            if key != "step" and value is not None:
                self.writer.add_scalar(self.GROUPS.get(key, key if "/" in key else f"other/{key}"), value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Console:
    """A progress bar where the output is a terminal, else one line a logged step. '-' is what is not known."""

    def __init__(self, steps: int, start: int = 0, stream: TextIO | None = None) -> None:
        self.steps = steps
        self.stream = stream or sys.stdout
        self.bar: tqdm[None] | None = None
        self.validation: float | None = None
        if self.stream.isatty():
            self.bar = tqdm(total=steps, initial=start, file=self.stream, unit="step", dynamic_ncols=True)
            if (self.bar.ncols or 80) < 0:  # a terminal that was never given a size: tqdm would draw nothing
                self.bar.ncols, self.bar.nrows, self.bar.dynamic_ncols = 80, 20, None

    def write(self, step: int, record: Record) -> None:
        get = record.get
        if "loss" not in record:  # of a profiled step: it has a line in the log
            return
        speed = [f"{_number(get('tokens_per_second'), ',.0f')} tokens/s", f"MFU {_number(get('mfu'), '.1%')}"]
        loss = [f"loss {_number(get('loss'), '.4f')}"]
        if self.bar is not None:
            self.validation = record.get("validation_loss", self.validation)  # the bar keeps showing the last one
            shown = [] if self.validation is None else [f"validation {_number(self.validation, '.4f')}"]
            self.bar.set_postfix_str("  ".join(loss + shown + speed), refresh=False)
            self.bar.update(step - self.bar.n)
            self.bar.refresh()
            return
        if "validation_loss" in record:
            loss.append(f"validation {_number(record['validation_loss'], '.4f')}")
        seconds = get("step_seconds")
        left = "-" if seconds is None else str(timedelta(seconds=round((self.steps - step) * seconds)))
        rest = [f"gradient {_number(get('grad_norm'), '.3f')}", f"rate {_number(get('learning_rate'), '.2e')}", *speed]
        rest += [f"{_number(get('memory_gib'), '.2f')} GiB", f"left {left}"]
        place = f"step {step:{len(str(self.steps))}d}/{self.steps}"
        print("  ".join([place, *loss, *rest]), file=self.stream, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
