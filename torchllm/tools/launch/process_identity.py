"""Processes as /proc knows them; tell one from any other, of this machine or another, now or later. No torch."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Process:
    """A process, so that it can be told from a later one with its id, on this machine or another."""

    host: str
    boot: str
    """id of the boot of its machine; "" where the system has none"""
    namespace: str
    """of its process id: containers on one machine have their own"""
    pid: int
    started: int
    """when it started, in clock ticks after the boot"""


def is_gone(process: Process) -> bool:
    """Return whether a process has ended, if it was one of this boot of this machine; False if that is unknown."""
    reader = this_process()
    is_here = process.boot == reader.boot and process.namespace == reader.namespace
    if not is_here or not reader.boot or not reader.namespace:
        return False
    if not is_running(process.pid):
        return True
    status = process_status(process.pid)
    if status is None:  # /proc may hide the processes of other users
        return False
    return status.state in "ZX" or status.started != process.started


def this_process() -> Process:
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    status = process_status(os.getpid())
    return Process(os.uname().nodename, boot, namespace, os.getpid(), 0 if status is None else status.started)


def is_running(pid: int) -> bool:
    """Return whether a process exists, including a zombie child."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


class ProcessStatus(NamedTuple):
    """What /proc says about a process."""

    state: str
    """the kernel's letter: R, S, D, T; Z: ended, but its parent does not know yet"""
    parent: int
    ticks: int
    """of CPU time, that in the kernel included"""
    started: int
    """in clock ticks after the boot"""


def process_status(pid: int) -> ProcessStatus | None:
    """Return the status of a process; None if it cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the second field is the name in parentheses, which may contain any
    ticks = int(fields[11]) + int(fields[12])
    return ProcessStatus(state=fields[0], parent=int(fields[1]), ticks=ticks, started=int(fields[19]))


def find_children(parent: int | None = None) -> list[int]:
    """Return the ids of the processes that `parent`, or this one, has started and that have not ended. Needs /proc."""
    of_process = os.getpid() if parent is None else parent
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        status = process_status(int(folder.name))
        if status is not None and status.parent == of_process and status.state != "Z":
            pids.append(int(folder.name))
    return pids
