"""Tell a process from any other one, of this machine or another, now or later. No torch."""

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
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process: it exists
        pass
    status = process_status(process.pid)
    if status is None:  # /proc may hide the processes of other users
        return False
    return status.state in "ZX" or status.started != process.started


def this_process() -> Process:
    """Return this process."""
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    status = process_status(os.getpid())
    return Process(os.uname().nodename, boot, namespace, os.getpid(), 0 if status is None else status.started)


class ProcessStatus(NamedTuple):
    """What /proc says about a process."""

    state: str
    """Z: ended, but its parent does not know yet"""
    started: int
    """in clock ticks after the boot"""


def process_status(pid: int) -> ProcessStatus | None:
    """Return the status of a process; None if it cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the second field is the name in parentheses, which may contain any
    return ProcessStatus(state=fields[0], started=int(fields[19]))
