"""Lines on stderr while the ranks import torch, which takes minutes on a slow disk. No torch."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torchllm.runtime.launcher_notes import notes_folder
from torchllm.tools.launch import rank_notes

INTERVAL = 10.0
"""seconds between two lines"""


def say_that_imports_go_on(started: str) -> None:
    """Say what is started, and every `INTERVAL` seconds that imports go on, until a rank has joined; in a thread."""
    _say(f"starting {started}, this node is {os.uname().nodename}: importing torch")
    threading.Thread(target=_speak, name="imports", daemon=True).start()


def _speak(sleep: Callable[[float], None] = time.sleep) -> None:
    began = time.monotonic()
    while True:
        sleep(INTERVAL)
        folder = notes_folder()
        if rank_notes.members() or (folder is not None and not folder.exists()):  # or the attempt is over
            return
        _say(f"importing torch: {time.monotonic() - began:.0f} s so far")


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be closed
        print(line, file=sys.stderr, flush=True)
