"""Progress lines in the log during long work, so that users do not mistake it for a hang."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("torchllm")

PACKAGE = Path(__file__).parents[1]
INTERVAL = 10.0
"""seconds between two lines"""


class _Progress:
    """Progress of this process's work, if it reports it."""

    text: Callable[[], str] | None = None


def show_progress(text: Callable[[], str] | None) -> None:
    """Set the progress of the current work, such as "32 of 64 sequences"; None: it is not known."""
    _Progress.text = text


@contextmanager
def signs_of_life(work: str, interval: float = INTERVAL) -> Iterator[None]:
    """Return a context around `work` that logs its progress every `interval` seconds.

    Work that does not call `show_progress` is logged with its current function of torchllm.
    """
    _Progress.text = None  # of work that was not inside such a context
    ended = threading.Event()
    thread = threading.Thread(
        target=_speak, args=(work, interval, threading.get_ident(), ended), name="signs of life", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _Progress.text = None


def _speak(work: str, interval: float, working_thread: int, ended: threading.Event) -> None:
    started = time.monotonic()
    while not ended.wait(interval):
        text = _Progress.text  # once: the working thread may clear it
        progress = f", {text()}" if text else _place(working_thread)
        log.info("%s: %.0f s so far%s", work, time.monotonic() - started, progress)


def _place(thread: int) -> str:
    """Return the innermost function of torchllm in a thread's stack: ", in write_corpus (build.py)"."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f", in {frame.f_code.co_name} ({path.name})"
        frame = frame.f_back
    return ""
