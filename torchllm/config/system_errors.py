"""Describe errors of the system on one line, with a cure: no traceback helps against a full disk."""

import errno
import traceback
from pathlib import Path

_CURES = {
    errno.ENOSPC: "make room there",
    errno.ESTALE: "its file system has gone away: mount it again",
    errno.EMFILE: "raise the limit of open files, ulimit -n",
    errno.ENOMEM: "end other programs, or raise the limit of memory, ulimit -v",
}
_LIBRARY_CURES = {  # of a RuntimeError, which Python and torch raise
    "can't start new thread": "end other programs, or raise the limit of processes or memory, ulimit -u, ulimit -v",
    "Unable to find address for: lo": "start the loopback interface, ip link set lo up",
}


def describe_system_error(error: BaseException) -> str:
    """Return an error of the system and its cure; "" for an error of another kind."""
    what, cure = "", ""
    if isinstance(error, MemoryError):
        what, cure = "no memory is left", _CURES[errno.ENOMEM]
    elif isinstance(error, OSError):
        what = str(error).strip().rpartition("\n")[2] or type(error).__name__  # torch: a worker's whole traceback
        cure = _CURES.get(error.errno or 0, "")
        if any("/multiprocessing/synch" in at.f_code.co_filename for at, _ in traceback.walk_tb(error.__traceback__)):
            cure = "make room in /dev/shm, or set data.workers = 0 (in recipes/prepare.py, prepare.processes = 1)"
    elif isinstance(error, RuntimeError):
        what = next((part for part in _LIBRARY_CURES if part in str(error)), "")
        cure = _LIBRARY_CURES.get(what, "")
    return f"{what}; {cure}" if cure else what


def describe_place(error: BaseException) -> str:
    """Return the innermost line of torchllm, or of a recipe, that an error has come through; "" if there is none."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("torchllm", "__main__"):
            place = f" (in {frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{line})"
    return place
