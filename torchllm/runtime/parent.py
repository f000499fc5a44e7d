"""End a process together with its parent, so that a killed launcher leaves no processes behind. No torch.

    run_train.sh -> launcher -> rank -> workers of its data loader

Each of them asks the kernel for SIGKILL at the death of its parent, which works even if the process hangs. The kernel
tracks the thread that started the process: start processes from the main thread. A parent that died before the request
is detected by comparing process ids. A rank also holds a pipe, which ends with the launcher even if a wrapper (e.g. a
profiler) is between the two.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

PARENT = "TORCHLLM_PARENT"
"""environment variable: id of the process that a new process ends with"""
PARENT_PIPE = "TORCHLLM_PARENT_PIPE"
"""environment variable, set if standard input is a pipe that only the parent holds open for writing"""
_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>"""


def end_with_parent() -> None:
    """End this process when the process in `PARENT` ends, or now if it has ended; do nothing without the variable.

    The variables are removed from the environment: they do not hold for children of this process.
    """
    parent = os.environ.pop(PARENT, None)
    has_pipe = os.environ.pop(PARENT_PIPE, None) is not None
    if parent is None:
        return
    _request_death_signal()
    if os.getppid() != int(parent) and not is_running(int(parent)):
        _kill_this_process()
    if has_pipe:
        _watch_pipe()


def end_with_starter(starter: int) -> None:
    """End this helper process when the process that started it, whose id is `starter`, ends, or at once if it has."""
    _request_death_signal()
    if os.getppid() != starter:
        _kill_this_process()


def end_process(status: int) -> None:
    """End this process and its helper processes at once; other threads may be stuck in an operation."""
    for helper in multiprocessing.active_children():
        helper.kill()
    os._exit(status)


def tie_children() -> None:
    """Make `end_with_parent`, in processes that this one starts from now on, end them with this process.

    Their standard input is the pipe: a program that reads the terminal must not be started by a launcher.
    """
    reading, _ = os.pipe()  # nothing is ever written; only the end of this process closes the writing side
    os.dup2(reading, 0)
    os.close(reading)
    os.environ[PARENT] = str(os.getpid())
    os.environ[PARENT_PIPE] = "stdin"


def find_children(parent: int | None = None) -> list[int]:
    """Return the ids of the processes that `parent`, or this one, has started and that have not ended. Needs /proc."""
    of_process = os.getpid() if parent is None else parent
    pids = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, started_by = status.read_text().rpartition(")")[2].split()[:2]
            if int(started_by) == of_process and state != "Z":
                pids.append(int(status.parent.name))
    return pids


def find_ranks() -> list[int]:
    """Return the children of this process, a launcher, that are ranks: torchrun starts each in a new session."""
    return [pid for pid in find_children() if is_session_leader(pid)]


def is_session_leader(pid: int) -> bool:
    """Return whether a process is the leader of a session."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _request_death_signal() -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _watch_pipe() -> None:
    """Kill this process at the end of file of standard input, which is empty from now on."""
    pipe = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        _kill_this_process()

    threading.Thread(target=wait, name="end of the launcher", daemon=True).start()


def is_running(pid: int) -> bool:
    """Return whether a process exists, including a zombie child."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
