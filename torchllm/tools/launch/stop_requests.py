"""Requests to stop the run, by signals or the file `STOP`, during start-up and training.

run_train.sh turns its signals into the file `STOP` of the run folder: unlike a signal, the file still exists when
starting ranks are ready. A recipe that is started without run_train.sh handles the signals itself.

Before a run has taken a step there is nothing to save, and a request ends it immediately, even while it reads data or
compiles. In training the ranks vote at each step (`Runtime.should_stop`) and save first.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from torchllm.runtime.parent import end_process
from torchllm.runtime.stop import STOP, StopSource, write_marker

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""signals that ask the run to stop"""
IGNORE_REPEATED_SIGNALS_FOR = 5.0
"""seconds; a terminal signals every process, and torchrun forwards the same signal a second time"""
EVALUATION_MAY_TAKE = 5.0
"""seconds after a request; schedulers leave a job 30 s to save"""
LOOKS_PER_SECOND = 1_000
"""polls per second for the file `STOP` during start-up, by all ranks together"""
FILE_PATIENCE = 3.0
"""seconds for run_train.sh, which gets the same signal as this rank, to create the file"""


class StopRequests(StopSource):
    """Requests to stop this rank.

    During start-up, until the first vote of all ranks on stopping, a request ends the process. A rank that has voted
    then loses its peers, so an error before the end of that vote is only a consequence of the request.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        is_launched: bool = False,
        *,
        is_owned: bool = True,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """Make one for `rank`; `listen` starts it.

        folder: the run's. is_launched: run_train.sh, which handles the signals, has started this rank. is_owned: this
        job already owns the folder, and has removed requests to an earlier job; else an existing file `STOP` counts
        only from `folder_is_owned` on. leave: callback before a process that was asked to stop exits.
        """
        self._leave = leave
        self.folder = folder
        self._earlier = None if is_owned else self._file()
        """an existing file that may be a request to an earlier job"""
        self.rank = rank
        self.is_launched = is_launched
        self.look_interval = max(0.2, world_size / LOOKS_PER_SECOND)
        """seconds between two polls for the file during start-up"""
        self._requested_at: float | None = None
        """time.monotonic() of the first request"""
        self._interrupted_at: float | None = None
        """time.monotonic() of the first SIGINT"""
        self._has_voted = threading.Event()
        self._is_training = False
        """the first vote is complete: every rank has left the start-up"""
        self._leaving = threading.Lock()
        """held to end the start-up, by exit or by a vote: a rank that has voted does not exit"""

    def listen(self) -> None:
        """Handle signals from here on and, if run_train.sh has started this rank, poll for the file.

        A signal that is ignored when the process starts stays ignored, also in its children: run_train.sh handles
        SIGUSR1 and SIGUSR2, which would kill e.g. the processes of a compiler, and nohup ignores SIGHUP.
        """
        for number in STOP_SIGNALS:
            is_inherited = number not in (signal.SIGTERM, signal.SIGINT)
            if not (is_inherited and signal.getsignal(number) is signal.SIG_IGN):
                signal.signal(number, self._hear)
        if self.is_launched:
            threading.Thread(target=self._watch, name="stop in the start-up", daemon=True).start()
            self._hide_consequences()

    def folder_is_owned(self) -> None:
        """Treat the file `STOP` as a request to this job, whenever it was created."""
        self._earlier = None

    def _file(self) -> object:
        """Return the identity of the file `STOP`, which a later one does not share; None if there is none."""
        try:
            status = (self.folder / STOP).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def requested(self) -> bool:
        """See StopSource: by a signal, or on rank 0 by the file `STOP`."""
        if self._requested_at is None and self.rank == 0 and os.path.exists(self.folder / STOP):
            self._requested_at = time.monotonic()
            log.warning("%s: saving at the next step boundary", self.folder / STOP)
        return self._requested_at is not None

    def is_urgent(self) -> bool:
        return self.requested() and time.monotonic() - (self._requested_at or 0.0) > EVALUATION_MAY_TAKE

    def begin_votes(self) -> None:
        with self._leaving:
            self._has_voted.set()

    def begin_training(self) -> None:
        self._is_training = True

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. All of them ask for a stop, however often; only a second SIGINT ends the process at once."""
        heard_at = time.monotonic()
        if not self._has_voted.is_set() and not self.is_launched:
            log.warning("%s: ending in the start-up, with nothing to save", signal.Signals(number).name)
            self.before_early_end()
            end_process(128 + number)
        if number == signal.SIGINT:
            if self._interrupted_at is None:
                self._interrupted_at = heard_at
            elif heard_at - self._interrupted_at > IGNORE_REPEATED_SIGNALS_FOR:
                end_process(128 + number)
        if self._requested_at is None:
            self._requested_at = heard_at
            if self.rank == 0 and self._has_voted.is_set():
                log.warning("%s: saving at the next step boundary", signal.Signals(number).name)

    def _watch(self) -> None:
        """Poll for the file until this rank votes; the main thread may be in an operation for minutes."""
        while not self._has_voted.is_set():
            with self._leaving:
                if not self._has_voted.is_set():
                    self._end_if_asked()
            self._has_voted.wait(self.look_interval)

    def _end_if_asked(self) -> None:
        """End the process if the file `STOP` exists; rank 0 logs it, and writes the marker."""
        file = self._file()
        if file is None or file == self._earlier:
            return
        if self.rank == 0:
            log.warning("%s: ending in the start-up, with nothing to save", self.folder / STOP)
            write_marker(self.folder, None)
        self.before_early_end()
        self._leave()
        end_process(0)

    def _hide_consequences(self) -> None:
        """Suppress errors of a start-up that was asked to end: a peer or a helper process has exited first."""
        print_error = sys.excepthook

        def print_unless_asked(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not self._is_training:
                self._end_if_asked()
                if self._requested_at is not None:
                    time.sleep(FILE_PATIENCE)
                    self._end_if_asked()
            print_error(kind, error, trace)

        sys.excepthook = print_unless_asked
