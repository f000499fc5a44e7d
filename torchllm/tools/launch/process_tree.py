"""Ends ranks with their launcher. No torch.

    run_train.sh -> launcher -> rank

A rank asks the kernel for SIGKILL at the death of its parent (`torchllm/runtime/parent.py`). A parent that died before
the request is detected by comparing process ids. A rank also holds a pipe, which ends with the launcher even if a
wrapper (e.g. a profiler) is between the two.
"""

import os
import threading

from torchllm.runtime.parent import kill_this_process, request_death_signal
from torchllm.tools.launch.process_identity import is_running

PARENT = "TORCHLLM_PARENT"
"""environment variable: id of the process that a new process ends with"""
PARENT_PIPE = "TORCHLLM_PARENT_PIPE"
"""environment variable, set if standard input is a pipe that only the parent holds open for writing"""


def end_with_parent() -> None:
    """End this process when the process in `PARENT` ends, or now if it has ended; do nothing without the variable.

    The variables are removed from the environment: they do not hold for children of this process.
    """
    parent = os.environ.pop(PARENT, None)
    has_pipe = os.environ.pop(PARENT_PIPE, None) is not None
    if parent is None:
        return
    request_death_signal()
    if os.getppid() != int(parent) and not is_running(int(parent)):
        kill_this_process()
    if has_pipe:
        _watch_pipe()


def tie_children() -> None:
    """Make `end_with_parent`, in processes that this one starts from now on, end them with this process.

    Their standard input is the pipe: a program that reads the terminal must not be started by a launcher.
    """
    reading, _ = os.pipe()  # nothing is ever written; only the end of this process closes the writing side
    os.dup2(reading, 0)
    os.close(reading)
    os.environ[PARENT] = str(os.getpid())
    os.environ[PARENT_PIPE] = "stdin"


def _watch_pipe() -> None:
    """Kill this process at the end of file of standard input, which is empty from now on."""
    pipe = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        kill_this_process()

    threading.Thread(target=wait, name="end of the launcher", daemon=True).start()
