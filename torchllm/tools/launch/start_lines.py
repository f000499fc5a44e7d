"""Lines on stderr while torch is imported, which takes minutes on a slow disk. No torch."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

INTERVAL = 10.0
"""seconds between two lines"""
IMPORTER = "<frozen importlib._bootstrap>"
"""file name of Python's import in a stack"""


def say_what_is_started(started: str) -> None:
    """Say it, and while this process, node 0's launcher, imports."""
    say_line(f"starting {started}, this node is {os.uname().nodename}: importing torch")
    say_while_this_imports()


def say_that_nodes_have_joined(node: int, nodes: int, attempt: int) -> None:
    """Say on a node after the first that all nodes of the job are there, and whether they have started again."""
    event = "have joined" if attempt == 1 else f"have started again, attempt {attempt}; node 0's output says why"
    say_line(f"node {node} is {os.uname().nodename}: all {nodes} nodes {event}")


def say_while_this_imports() -> None:
    """Say every `INTERVAL` seconds that the imports of this process go on, if it is rank 0; in a thread."""
    if os.environ.get("RANK", "0") == "0":
        threading.Thread(target=_speak, name="imports", daemon=True).start()


def _this_imports() -> bool:
    """Return whether the main thread is importing a module."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename == IMPORTER:
            return True
        frame = frame.f_back
    return False


def _speak(sleep: Callable[[float], None] = time.sleep) -> None:
    began = time.monotonic()
    while True:
        sleep(INTERVAL)
        if not _this_imports():
            return
        say_line(f"importing torch: {time.monotonic() - began:.0f} s so far")


def say_line(line: str) -> None:
    """Print a line to stderr, if it can be."""
    with suppress(OSError):  # the terminal may be closed
        print(line, file=sys.stderr, flush=True)
