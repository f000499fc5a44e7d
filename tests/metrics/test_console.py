import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest

from tests.metrics.test_sinks import RECORD
from tests.tiny_run import process_as_it_was
from torchllm.metrics.console import Console
from torchllm.runtime.error_report import report_errors
from torchllm.runtime.terminal import ERASE_LINE


def test_console_without_a_terminal_writes_one_plain_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    sink = Console(1000, stream=stream)
    sink.write(40, RECORD)
    sink.write(50, RECORD | {"mfu": None, "loss": float("nan")} | VALIDATION | OF_A_FORK)
    sink.close()
    first, second = stream.getvalue().splitlines()
    assert first == (
        "step   40/1000  loss 2.3457  gradient 0.812  rate 3.00e-04  12,346 tokens/s  MFU 31.2%  1.23 GiB  left 0:08:00"
    )
    assert "loss nan  validation 2.5000  0.7500 bits/byte" in second
    assert "MFU" not in second
    assert second.endswith("  average/keep 0.5")


VALIDATION = {"validation_loss": 2.5, "validation_bits_per_byte": 0.75}
OF_A_FORK = {"average/keep": 0.5, "gpu/watts": 300.0, "breakdown/data": 0.1}
"""only the first is shown"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_console_on_a_terminal_is_a_progress_bar() -> None:
    stream = Terminal()
    sink = Console(100, start=20, stream=stream)
    sink.write(40, RECORD | {"validation_loss": 2.5})
    sink.write(50, RECORD | OF_A_FORK)
    assert sink.bar is not None
    assert sink.bar.n == 50
    sink.close()
    text = stream.getvalue()
    assert "50/100" in text
    assert "| 50/100 left 0" in text
    assert (
        "loss 2.3457  rate 3.00e-04  12,346 tokens/s  validation 2.5000  MFU 31.2%  average/keep 0.5"
        in text.split("\r")[-1]
    )


def test_a_bar_of_80_columns_shows_what_matters_most() -> None:
    stream = Terminal()
    sink = Console(500_000, start=123_456, stream=stream)
    assert sink.bar is not None
    sink.bar.ncols, sink.bar.dynamic_ncols = 80, None
    sink.write(123_457, RECORD | {"validation_loss": 2.5})
    line = stream.getvalue().split("\r")[-1]
    assert len(line) <= 80
    assert re.search(r"123457/500000 left [\d:]+, loss 2.3457  rate 3.00e-04  12,346 tokens/s", line)
    sink.close()


@contextmanager
def in_a_terminal(rank: int = 0) -> Iterator[Terminal]:
    """Give both outputs of this process, which logs to them as a rank does."""
    terminal = Terminal()
    with redirect_stdout(terminal), redirect_stderr(terminal), process_as_it_was():
        report_errors(rank)
        yield terminal


def say() -> None:
    logging.getLogger("torchllm").warning("saved runs/x")


def warn() -> None:
    warnings.warn("saved runs/x", stacklevel=1)


@pytest.mark.parametrize("speak", [say, warn], ids=["log", "warning of Python"])
def test_a_line_of_the_log_does_not_begin_at_the_end_of_the_bar(speak: Callable[[], None]) -> None:
    with in_a_terminal() as terminal:
        sink = Console(100)
        sink.write(10, RECORD)
        speak()
        sink.write(20, RECORD)
        sink.close()
    line = next(line for line in terminal.getvalue().split("\n") if "saved runs/x" in line)
    before, _, _ = line.partition("saved runs/x")
    erased, _, begin = before.rpartition("\r")
    assert "10/100" in erased
    assert not erased.split("\r")[-1].strip()  # the bar was cleared, and the cursor is at the start of its line
    assert "100" not in begin
    _, _, next_bar = terminal.getvalue().partition("saved runs/x")
    assert "10/100" in next_bar  # and it is drawn again below


def test_a_line_of_another_rank_erases_the_bar() -> None:
    with in_a_terminal(rank=1) as terminal:
        logging.getLogger("torchllm").error("failed")
    assert terminal.getvalue() == f"{ERASE_LINE}rank 1: failed\n"


def test_the_bar_moves_at_every_step_and_is_drawn_rarely() -> None:
    stream = Terminal()
    sink = Console(10_000, stream=stream)
    drawn = stream.getvalue().count("\r")
    for step in range(1, 10_001):
        sink.advance(step)
    assert sink.bar is not None
    assert sink.bar.n == 10_000
    assert stream.getvalue().count("\r") - drawn < 1000  # ten per second, and these steps take microseconds
    sink.close()


def test_the_bar_says_what_else_the_run_does() -> None:
    stream = Terminal()
    sink = Console(100, stream=stream)
    sink.write(50, RECORD)
    with sink.aside("evaluate"):
        line = stream.getvalue().split("\r")[-1]
        assert re.search("50/100 left .*, evaluate$", line.rstrip())
        assert "loss" not in line  # nothing that could be taken for the evaluation's
    line = stream.getvalue().split("\r")[-1]
    assert "loss 2.3457" in line
    assert "evaluate" not in line
    sink.close()


def test_an_output_that_is_full_or_closed_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor, name, reason in (
        (os.open("/dev/full", os.O_WRONLY), "/dev/full", "No space left on device"),
        (writing, "pipe:", "Broken pipe"),
    ):
        caplog.clear()
        stream = open(descriptor, "w")  # noqa: SIM115  # closing it fails too
        sink = Console(100, stream=stream)
        for step in range(1, 4):
            sink.write(step, RECORD)
        sink.close()
        [message] = caplog.messages
        assert message.startswith(f"standard output ({name}")
        assert reason in message
        with suppress(OSError):
            stream.close()


def test_without_standard_output_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after >&-
    sink = Console(100)
    sink.write(1, RECORD)
    sink.close()
