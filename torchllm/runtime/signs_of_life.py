"""Lines in the log while a piece of work takes long, so that nobody takes it for a hang."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("torchllm")

PACKAGE = Path(__file__).parents[1]
INTERVAL = 10.0
"""seconds between two lines"""


@contextmanager
def signs_of_life(work: str, interval: float = INTERVAL) -> Iterator[None]:
    """Log every `interval` seconds that `work` goes on, and in which function of torchllm: a context around it."""
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


def _speak(work: str, interval: float, working_thread: int, ended: threading.Event) -> None:
    started = time.monotonic()
    while not ended.wait(interval):
        log.info("%s: %.0f s so far%s", work, time.monotonic() - started, _place(working_thread))


def _place(thread: int) -> str:
    """Return where a thread is, by the innermost function of torchllm that it is in: ", in write_corpus (build.py)"."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f", in {frame.f_code.co_name} ({path.name})"
        frame = frame.f_back
    return ""
