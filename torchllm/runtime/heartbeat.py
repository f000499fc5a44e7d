"""Heartbeats of a rank, with its current activity, read by its launcher (`rank_watch.py`). No torch.

Rank and launcher map the same few bytes of memory, on /dev/shm if it exists: a beat is a write to memory, without a
system call, so it cannot hang with the run folder. Library functions beat: each named part of a step (`phase`),
the vote on stopping that ends a step, each batch of an evaluation. The timeout depends on the activity: `Timeouts`.

A timer of Python's faulthandler, reset by beats, also writes the rank's stacks to an open file. That works while the
program is stuck outside Python, and in a process that does not react to signals. A rank without our launcher has no
file and no timer, only the timeouts, which `hang_watch.py` uses.
"""

import faulthandler
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from torchllm.config.environment import START_TIMEOUT

if TYPE_CHECKING:
    from torch.profiler import record_function

HEARTBEATS = "TORCHLLM_HEARTBEATS"
"""environment variable: folder of the heartbeats of this attempt's ranks on this node"""
REARM_INTERVAL = 1.0
"""least seconds between two resets of the timer: each starts a thread"""
LONGEST_TIMEOUT = 1e6
"""seconds; faulthandler takes no infinite timeout"""
REPORT_TIMEOUT = 60.0
"""seconds for the ranks to report a hang that they found themselves"""
PREFIX = "torchllm:"
"""prefix of the names of a step's parts in a profile, to tell them from annotations of torch"""
MESSAGES = "messages of "
"""after it, in names of parts that send messages, before torch's name of the process group"""

Activity = Literal["start-up", "load", "step", "evaluation", "save", "hang report", "end"]

RECORD = struct.Struct("=5qd96s")
"""layout of a beat: number, process id, rank, ranks of this node, id of the main thread, timeout, three texts"""


GROUP_GRACE = 10.0
"""seconds that the process groups' timeout is longer than all timeouts: a hang is found before torch ends the ranks"""


class Timeouts(NamedTuple):
    """Seconds without a beat after which a rank counts as stuck."""

    start: float = math.inf
    """run.start_timeout: during start-up, including the first steps and the first evaluation, which may compile; and
    while a checkpoint is loaded"""
    step: float = math.inf
    """run.timeout: in a step and between two batches of an evaluation"""
    save: float = math.inf
    """run.save_timeout: while a checkpoint is saved"""


class Timeout(NamedTuple):
    """The current timeout of a rank between beats."""

    seconds: float
    key: str
    """the setting that it comes from"""


class Heartbeat:
    """Sends heartbeats of this process; `open` connects it to the launcher."""

    def __init__(self) -> None:
        self.timeouts = Timeouts()
        self.activities: list[Activity] = ["start-up"]
        """current activities of this rank, innermost last"""
        self.step = 0
        """number of the last step that this rank has begun"""
        self.has_evaluated = False
        """whether an evaluation has run, so that the next one does not compile"""
        self.count = 0
        self.record: bytearray | mmap.mmap = bytearray(RECORD.size)
        self.process = [os.getpid(), 0, 1, threading.main_thread().ident or 0]
        """process id, rank, ranks of this node, and id of the main thread"""
        self.stack_file: int | None = None
        """descriptor of the file for the stacks of all threads, written by the timer; None: there is no timer"""
        self.armed_at = -math.inf
        """time.monotonic() of the last reset of the timer"""
        self.armed_timeout = math.nan
        self._texts: dict[tuple[Timeout, Activity, str], bytes] = {}

    def open(self) -> None:
        """Connect to the launcher that has started this process, if there is one; later calls do nothing."""
        folder = os.environ.pop(HEARTBEATS, None)
        if folder is None:
            return
        self.process[1:3] = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.timeouts = Timeouts(start=float(os.environ.get(START_TIMEOUT, "inf")))
        file = Path(folder, f"rank-{os.environ.get('LOCAL_RANK', 0)}")
        unfinished = file.with_suffix(".new")
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(descriptor, bytes(RECORD.size))  # a full /dev/shm is an error here, SIGBUS later
        self.record = mmap.mmap(descriptor, RECORD.size)
        os.close(descriptor)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.stack_file = os.open(stack_file(file), flags, 0o600)
        self.beat()
        unfinished.rename(file)  # the launcher sees a whole record

    def timeout(self) -> Timeout:
        """Return the current timeout, between beats or for waiting on other ranks."""
        activity = self.activities[-1]
        if activity == "save":
            return Timeout(self.timeouts.save, "run.save_timeout")
        if activity == "hang report":
            return Timeout(REPORT_TIMEOUT, "")
        if activity == "end":
            return Timeout(math.inf, "")
        is_first = activity == "evaluation" and not self.has_evaluated
        if activity in ("start-up", "load") or self.activities[0] == "start-up" or is_first:
            return Timeout(self.timeouts.start, "run.start_timeout")
        return Timeout(self.timeouts.step, "run.timeout")

    def beat(self, part: str = "") -> None:
        """Send a heartbeat with the current part of the activity. Takes microseconds."""
        self.count += 1
        timeout = self.timeout()
        RECORD.pack_into(self.record, 0, self.count, *self.process, timeout.seconds, self._text(timeout, part))
        if self.stack_file is not None:
            self._set_timer(self.stack_file, timeout.seconds)

    def begin(self, activity: Activity) -> None:
        """Replace all current activities by one."""
        self.activities[:] = [activity]
        self.has_evaluated = self.has_evaluated and activity != "start-up"
        self.beat()

    def begin_steps(self) -> None:
        """End the start-up: every rank has taken its first step."""
        if self.activities[0] == "start-up":
            self.activities[0] = "step"
            self.beat()

    def close(self) -> None:
        """End the watch of this rank: it has no timeout from here on."""
        self.begin("end")
        if self.stack_file is not None:
            faulthandler.cancel_dump_traceback_later()
            os.close(self.stack_file)
            self.stack_file = None

    def _text(self, timeout: Timeout, part: str) -> bytes:
        """Return the encoded texts of a beat."""
        key = timeout, self.activities[-1], part
        if key not in self._texts:
            self._texts[key] = "\t".join((timeout.key, self.activities[-1], part)).encode()
        return self._texts[key]

    def _set_timer(self, stack_file: int, seconds: float) -> None:
        """Reset the timer, which writes the stacks when the timeout of the launcher has passed, not earlier.

        The timer runs from its last reset, up to REARM_INTERVAL before the last beat. It walks the frames of other
        threads, which is safe only if they are stuck.
        """
        moment = time.monotonic()
        if seconds == self.armed_timeout and moment - self.armed_at < REARM_INTERVAL:
            return
        self.armed_at, self.armed_timeout = moment, seconds
        os.ftruncate(stack_file, 0)  # earlier content is from a time when the rank was only slow
        faulthandler.dump_traceback_later(min(seconds, LONGEST_TIMEOUT) + REARM_INTERVAL, file=stack_file)


class _Process:
    """The heartbeat of this process."""

    heartbeat = Heartbeat()


def heartbeat() -> Heartbeat:
    """Return the heartbeat of this process."""
    return _Process.heartbeat


def _begin_as_child() -> None:
    """Reset after a fork: a data worker must not send heartbeats for its rank."""
    _Process.heartbeat = Heartbeat()


os.register_at_fork(after_in_child=_begin_as_child)


def beat(part: str = "") -> None:
    """Send a heartbeat with the current part of the activity."""
    _Process.heartbeat.beat(part)


def phase(name: str) -> "record_function":
    """Return a context that names a part of a step, also for `tools/watch/breakdown.py` and trace viewers.

    It costs a few microseconds without a profiler.
    """
    from torch.profiler import record_function  # a launcher has no torch

    beat(name)
    return record_function(PREFIX + name)


@contextmanager
def during(activity: Activity) -> Iterator[None]:
    """Return a context for an activity with a separate timeout; only in the main thread."""
    heart = _Process.heartbeat
    heart.activities.append(activity)
    heart.beat()
    try:
        yield
    finally:
        heart.has_evaluated = heart.has_evaluated or activity == "evaluation"
        if heart.activities[-1] == activity:
            heart.activities.pop()
        heart.beat()


def stack_file(file: Path) -> Path:
    """Return the file with the stacks of the rank whose heartbeat is `file`."""
    return file.with_suffix(".stack")
