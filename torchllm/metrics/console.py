"""The output of a run where it was started: a progress bar in a terminal, else one line per logged step."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from tqdm import tqdm

from torchllm.metrics.sinks import Record, TensorBoard
from torchllm.runtime.tolerance import Tolerance

BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} left {remaining}{postfix}"
"""of tqdm; a terminal cuts the line at its edge, so the values that matter most come first"""


class Console:
    """Shows a progress bar where the output is a terminal, else one line per logged step. '-' stands for unknown.

    The bar moves at every step; while the run does something else, the bar says so in place of the step's values. An
    output that cannot be written (a full disk, a pipe whose reader has ended) is logged once and ends nothing.
    """

    def __init__(self, steps: int, start: int = 0, stream: TextIO | None = None) -> None:
        self.steps = steps
        # A process that was started without standard output has None in its place.
        self.stream = stream or sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # it is open as long as the process
        self.tolerance = Tolerance(_name_of_output(self.stream))
        self.bar: tqdm[None] | None = None
        self.validation: list[str] = []
        """words of the latest validation loss: the bar shows it until the next one"""
        if self.stream.isatty():
            with self.tolerance.attempt():
                self._open_bar(start)

    def _open_bar(self, start: int) -> None:
        self.bar = tqdm(
            total=self.steps, initial=start, file=self.stream, dynamic_ncols=True, bar_format=BAR, postfix=""
        )
        if (self.bar.ncols or 80) < 0:  # a terminal that was never given a size: tqdm would draw nothing
            self.bar.ncols, self.bar.nrows, self.bar.dynamic_ncols = 80, 20, None

    def advance(self, step: int) -> None:
        """Move the bar to `step`. Cheap enough for every step: the bar is drawn ten times per second at most."""
        if self.bar is not None:
            with self.tolerance.attempt():
                self.bar.update(step - self.bar.n)

    @contextmanager
    def aside(self, work: str) -> Iterator[None]:
        """Return a context around work between steps, which the bar names meanwhile."""
        values = self.bar.postfix if self.bar is not None else ""
        self._set_values(work)
        try:
            yield
        finally:
            self._set_values(values)

    def _set_values(self, text: str) -> None:
        if self.bar is not None:
            with self.tolerance.attempt():
                self.bar.set_postfix_str(text)

    def write(self, step: int, record: Record) -> None:
        """Show a logged step."""
        if "loss" not in record:  # a profiled step: the first has a line in the log
            return
        with self.tolerance.attempt():
            if self.bar is None:
                print(self._line(step, record), file=self.stream, flush=True)
            else:
                self._draw(self.bar, step, record)

    def _draw(self, bar: "tqdm[None]", step: int, record: Record) -> None:
        self.validation = _validation(record) or self.validation
        loss, rate = _number(record.get("loss"), ".4f"), _number(record.get("learning_rate"), ".2e")
        tokens_per_second, *mfu = _speed(record)
        words = [f"loss {loss}", f"rate {rate}", tokens_per_second]
        words += self.validation
        bar.set_postfix_str("  ".join([*words, *mfu, *_load(record), *_extra(record)]), refresh=False)
        bar.update(step - bar.n)
        bar.refresh()

    def _line(self, step: int, record: Record) -> str:
        width = len(str(self.steps))
        words = [f"step {step:{width}d}/{self.steps}", f"loss {_number(record.get('loss'), '.4f')}"]
        words.extend(_validation(record))
        words.append(f"gradient {_number(record.get('grad_norm'), '.3f')}")
        words.append(f"rate {_number(record.get('learning_rate'), '.2e')}")
        words.extend(_load(record))
        words.extend(_speed(record))
        words.append(f"{_number(record.get('memory_gib'), '.2f')} GiB")
        seconds = record.get("step_seconds")
        time_left = "-" if seconds is None else str(timedelta(seconds=round((self.steps - step) * seconds)))
        words.append(f"left {time_left}")
        words.extend(_extra(record))
        return "  ".join(words)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            with self.tolerance.attempt():
                self.bar.close()


def _validation(record: Record) -> list[str]:
    """Return the loss of an evaluation, [] without one."""
    if "validation_loss" not in record:
        return []
    words = [f"validation {_number(record['validation_loss'], '.4f')}"]
    if "validation_bits_per_byte" in record:
        words.append(f"{_number(record['validation_bits_per_byte'], '.4f')} bits/byte")
    return words


def _speed(record: Record) -> list[str]:
    """Return the tokens per second, and the MFU where it is known."""
    words = [f"{_number(record.get('tokens_per_second'), ',.0f')} tokens/s"]
    if (mfu := record.get("mfu")) is not None:
        words.append(f"MFU {mfu:.1%}")
    return words


def _load(record: Record) -> list[str]:
    """Return how many times the mean tokens the largest expert has; nothing without experts."""
    if "experts/largest_load" not in record:
        return []
    return [f"load {_number(record['experts/largest_load'], '.2f')}x"]


def _extra(record: Record) -> list[str]:
    """Return the values that a forked recipe has added to a record."""
    words = []
    for key, value in record.items():
        group = key.partition("/")[0]
        if key != "step" and key not in TensorBoard.TAGS and group not in TensorBoard.GROUPS:
            words.append(f"{key} {_number(value, '.4g')}")
    return words


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _name_of_output(stream: TextIO) -> str:
    """Return "standard output", with its file where it is redirected to one."""
    try:
        return f"standard output ({os.readlink(f'/proc/self/fd/{stream.fileno()}')})"
    except (OSError, ValueError):  # no file, or no /proc
        return "standard output"
