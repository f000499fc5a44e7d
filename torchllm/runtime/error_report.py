"""Report an uncaught error: which rank prints it, how, and the exit status.

One rank's error breaks the connections of all others, which then fail too. The cause should be the last output: a rank
that has lost a peer waits for the launcher to end it, and prints one line only if that does not happen.
"""

import atexit
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torchllm.config.environment import LOST_PEER_NOTE, RANK_NOTES
from torchllm.config.errors import RefusedStart, UserError
from torchllm.config.system_errors import describe_place, describe_system_error
from torchllm.runtime.parent import end_process
from torchllm.runtime.terminal import LogHandler, RankFormatter

log = logging.getLogger(__name__)

FIRST_ON_NODE_WAITS = 3.0
"""seconds that the first rank of a node gives rank 0 to print an error that all ranks have"""
OTHERS_WAIT = 6.0
"""seconds that a rank waits for the launcher to end it before it prints an error that another rank may have printed"""
LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket closed|closed by (remote )?peer"
    r"|remote process exited|failed to recv",
    re.IGNORECASE,
)
"""matches the errors of gloo, NCCL and the store on a rank whose peer has ended"""

LOST_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by|exited unexpectedly)[^.]*")
"""matches torch's error, raised anywhere in the main thread, when a data worker has ended"""


class _Ending:
    """How this process ends after an error."""

    status: int | None = None
    """exit status; None: no error"""


_ending = _Ending()


def report_errors(rank: int = 0, local_rank: int = 0) -> None:
    """Set up logging and the report of uncaught errors.

    Rank 0 logs everything, other ranks only errors, with a rank prefix. A UserError is printed as one plain line, once
    per job; a lost connection to another rank as one line, later than that rank's error; a killed data worker, or an
    error of the system, as one line; other errors are bugs and keep their traceback. The exit status is 2 or 1.
    """
    main = rank == 0
    handler = LogHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s") if main else RankFormatter(rank, sys.stderr))
    logging.basicConfig(level=logging.INFO if main else logging.ERROR, handlers=[handler], force=True)
    logging.captureWarnings(True)  # Python's warnings go to the log too, only on rank 0

    def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            _ending.status = 1
        if isinstance(error, RefusedStart):
            _ending.status = 2
            _tell_launcher("refused")
        if lost := lost_connection(error):
            _tell_launcher(f"{LOST_PEER_NOTE}{rank}")
        if isinstance(error, UserError):
            if not lost:  # otherwise the death of that rank is the cause, and a restart may succeed
                _tell_launcher("user_error")
            if not main:
                # Usually all ranks have this error: rank 0 prints it, exits, and torchrun ends the others, which
                # sleep here. If only this node has it, its first rank prints it. Why a job was refused is printed on
                # each node: whoever has started one differently looks at its output.
                is_first = local_rank == 0
                if not (is_first and isinstance(error, RefusedStart)):
                    _let_launcher_end_this(FIRST_ON_NODE_WAITS if is_first else OTHERS_WAIT)
            log.error("error: %s", error)
        elif worker := lost_worker(error):
            log.error(
                "error: %s: most likely the machine has run out of memory: lower data.workers, or start fewer other "
                "programs",
                worker,
            )
        elif lost:
            _let_launcher_end_this(OTHERS_WAIT)
            log.error("lost the connection to another rank, which had an error, or ended early without one: %s", lost)
        elif text := describe_system_error(error):
            if not main:  # all ranks may have it
                _let_launcher_end_this(FIRST_ON_NODE_WAITS if local_rank == 0 else OTHERS_WAIT)
            log.error("error: %s%s", text, describe_place(error))
        else:
            subject = "rank 0 failed" if main else "failed"  # the lines of other ranks begin with their rank
            log.error("%s:\n%s", subject, "".join(traceback.format_exception(kind, error, trace)).rstrip())

    sys.excepthook = print_error
    atexit.unregister(_end_after_error)
    atexit.register(_end_after_error)


def lost_connection(error: BaseException) -> str:
    """Return the first line of the error of a broken connection to another rank; "" if `error` has another cause.

    `error` may have been raised while another error was handled.
    """
    for cause in _with_causes(error):
        if isinstance(cause, RuntimeError) and LOST_PEER.search(str(cause)):
            return str(cause).partition("\n")[0]
    return ""


def lost_worker(error: BaseException) -> str:
    """Return which data worker has ended, and how; "" if `error` has another cause."""
    for cause in _with_causes(error):
        if isinstance(cause, RuntimeError) and (match := LOST_WORKER.search(str(cause))):
            return match[0]
    return ""


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _tell_launcher(name: str) -> None:
    """Leave a note for the launcher, if there is one; it may end this process before it ends itself."""
    if folder := os.environ.get(RANK_NOTES):
        with suppress(OSError):  # the launcher will know less
            Path(folder, name).touch()


def _let_launcher_end_this(seconds: float) -> None:
    """Sleep; a SIGTERM of the launcher ends the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(seconds)


def _end_after_error() -> None:
    """End a process after an error, when its threads have ended, without C++ destructors.

    Destructors would abort in the threads of a connected process group: "terminate called without an active exception",
    and SIGABRT instead of the exit status.
    """
    if _ending.status is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    end_process(_ending.status)
