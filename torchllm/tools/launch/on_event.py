"""Call the user's command when something happens to a run (`run.on_event`). No torch: run_train.sh's launcher does too.

    COMMAND EVENT RUN_FOLDER

EVENT is hang (ranks waited too long for another), restart (the job is started again after a failure), nan (a step was
not finite; once per start, not for each step), or end (of the job, however it ends).

The command neither stops the run nor delays it: its exit status is ignored, it runs in a new session,
and after `LIMIT` it is ended. Its output goes to `OUTPUT` in the run folder.
"""

import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from torchllm.runtime.tolerance import Tolerance

log = logging.getLogger("torchllm")

RunEvent = Literal["hang", "restart", "nan", "end"]
LIMIT = 60
"""seconds that the command may take"""
LAST_WAIT = 10.0
"""seconds that the end of a job waits for the command: Slurm and containers kill processes that outlive the job"""
OUTPUT = "on_event.log"
"""file in the run folder"""

_running: list["subprocess.Popen[bytes]"] = []
"""commands that may not have ended: each is waited for when the next one is called, so that none stays a zombie"""


def call_on_event(command: str, event: RunEvent, folder: Path) -> None:
    """Start the command, if there is one, and return at once. A command that cannot be started is logged."""
    if not command:
        return
    with Tolerance(f"run.on_event = {command!r}, called with {event}").attempt():
        words = [*shlex.split(command), event, str(folder)]
        if limit := shutil.which("timeout"):  # of coreutils; it also ends child processes of the command
            words = [limit, "--kill-after=5", str(LIMIT), *words]
        output = _open_output(folder)
        try:
            _running[:] = [earlier for earlier in _running if earlier.poll() is None]
            _running.append(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
            )
        finally:
            os.close(output)


def _open_output(folder: Path) -> int:
    """Open the file for the command's output, or /dev/null if it cannot be written."""
    try:
        return os.open(folder / OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def call_at_end(command: str, folder: Path) -> None:
    """Call the command with "end", and wait for it up to `LAST_WAIT`: a job's leftover processes may end with it."""
    call_on_event(command, "end", folder)
    deadline = time.monotonic() + LAST_WAIT
    for process in _running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


if __name__ == "__main__":  # run_train.sh, which sees the end of the job
    call_at_end(sys.argv[1], Path(sys.argv[2]))
