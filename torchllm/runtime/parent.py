"""End a process together with its parent, so that a killed launcher leaves no processes behind. No torch.

    run_train.sh -> launcher -> rank -> workers of its data loader

Each of them asks the kernel for SIGKILL at the death of its parent, which works even if the process hangs. The kernel
tracks the thread that started the process: start processes from the main thread. `tools/launch/process_tree.py` ties
ranks to their launcher.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>"""


def end_with_starter(starter: int) -> None:
    """End this helper process when the process that started it, whose id is `starter`, ends, or at once if it has."""
    request_death_signal()
    if os.getppid() != starter:
        kill_this_process()


def end_process(status: int) -> None:
    """End this process and its helper processes at once; other threads may be stuck in an operation."""
    for helper in multiprocessing.active_children():
        helper.kill()
    os._exit(status)


def request_death_signal() -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def kill_this_process() -> None:
    """End this process, even if it is stuck."""
    os.kill(os.getpid(), signal.SIGKILL)
