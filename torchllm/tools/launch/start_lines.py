"""Lines on stderr while the launcher and its ranks import torch, which takes minutes on a slow disk. No torch."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torchllm.tools.launch import rank_notes

INTERVAL = 10.0
"""seconds between two lines"""


def say_that_imports_go_on() -> None:
    """Print every `INTERVAL` seconds that imports go on, until a rank has joined the job; in a thread."""
    threading.Thread(target=_speak, name="imports", daemon=True).start()


def _speak(sleep: Callable[[float], None] = time.sleep) -> None:
    began = time.monotonic()
    while True:
        sleep(INTERVAL)
        if rank_notes.members():
            return
        with suppress(OSError):  # the terminal may be closed
            print(f"importing torch: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
