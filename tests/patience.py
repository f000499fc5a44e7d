"""Time limits of tests: generous, for a loaded machine is no failure. TEST_TIME_SCALE=3 makes all of them longer."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SCALE = float(os.environ.get("TEST_TIME_SCALE", "1"))


def patience(seconds: float) -> float:
    """Return a time limit in seconds, scaled for a slow machine."""
    return seconds * SCALE


def until(happened: Callable[[], T], seconds: float = 20) -> T:
    """Return the first true value of `happened`. Raises AssertionError if there is none in so many seconds, scaled."""
    deadline = time.monotonic() + patience(seconds)
    while not (value := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def text_with(file: Path, words: str = "", seconds: float = 20) -> str:
    """Return the text of a file as soon as it has these words, or any."""
    return until(lambda: file.exists() and words in file.read_text() and file.read_text(), seconds)
