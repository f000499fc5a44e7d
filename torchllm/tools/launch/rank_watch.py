"""Watchdog in the launcher: report a rank without heartbeats and stop this node's ranks.

`hang_watch.py` cannot see that all ranks are stuck in the same call, or the only rank of a job. The launcher can: once
per second it reads the last beat of each of its ranks (`heartbeat.py`) from memory. After a rank's timeout, and
`patience`, while ranks that have noticed the hang themselves report it better, it prints where the rank is, writes all
stacks to RUN/hang/TIME/HOST.txt and kills its ranks. A rank in an uninterruptible call of the kernel survives even
that, and the launcher does not wait for it.
"""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torchllm.config.environment import START_TIMEOUT
from torchllm.runtime.heartbeat import HEARTBEATS, RECORD, Timeout, stack_file
from torchllm.tools.launch.hang_report import (
    DESCRIBED,
    TIME_FORMAT,
    Standstill,
    format_ranks,
    innermost_place,
    look_every_second,
    write_in_thread,
)
from torchllm.tools.launch.on_event import call_on_event
from torchllm.tools.launch.process_identity import find_children, process_status
from torchllm.tools.launch.start_lines import say_line

log = logging.getLogger(__name__)

SECONDS_TO_WRITE = 3.0
"""that the report may take to be written into the run folder, which may be the cause of the hang"""
SECONDS_TO_DIE = 10.0
"""after SIGKILL, before a rank counts as stuck in the kernel"""
SHARED_MEMORY = Path("/dev/shm")
ROOM = 2**20
"""bytes that must be free there: the heartbeats of a node take some hundred per rank"""
_THREAD = re.compile(r"Thread 0x([0-9a-f]+)\b")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def patience(timeout: float) -> float:
    """Return how many seconds after a rank's timeout the launcher ends it."""
    return 3.0 + timeout / 10


def memory_folder() -> str | None:
    """Return a folder for temporary files that is in memory; None, which is tempfile's own, if none has room."""
    with suppress(OSError):
        system = os.statvfs(SHARED_MEMORY)  # the 64 MB of a container are soon full
        if os.access(SHARED_MEMORY, os.W_OK) and system.f_bavail * system.f_frsize >= ROOM:
            return str(SHARED_MEMORY)
    return None


class Beat(NamedTuple):
    """The last beat of a rank, as its launcher reads it."""

    number: int
    """number of the beat, from 1"""
    pid: int
    rank: int | None
    """None: unknown, because the process has not sent a heartbeat yet"""
    ranks_on_node: int
    thread: int
    """id of the main thread"""
    timeout: Timeout
    """infinite: the rank is not watched"""
    activity: str
    part: str
    """latest part of the activity; may be empty"""

    @property
    def name(self) -> str:
        """Return the name of the rank, or of the process, in messages."""
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"

    @property
    def doing(self) -> str:
        """Return the activity and its latest part."""
        return f"{self.activity}, last sign of life: {self.part}" if self.part else self.activity


def read_beat(file: Path) -> Beat | None:
    """Return the last beat of a rank of this node; None if there is none yet.

    A read may see a partly written beat; the beat of a rank that is stuck is complete.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    number, pid, rank, ranks_on_node, thread, seconds, texts = RECORD.unpack(content)
    key, _, doing = texts.rstrip(b"\0").decode(errors="replace").partition("\t")
    activity, _, part = doing.partition("\t")
    return Beat(number, pid, rank, ranks_on_node, thread, Timeout(seconds, key), activity, part)


class StalledRank(NamedTuple):
    """A rank that has gone without a beat for too long."""

    beat: Beat
    """the last one"""
    idle: float
    """seconds since then"""
    stacks: str
    """of all its threads, by faulthandler; empty if it has none"""


class RankWatch:
    """Watches the ranks of this launcher in a thread, one attempt after the other."""

    def __init__(
        self,
        start_timeout: float | None = None,
        run_folder: Path | None = None,
        on_event: str = "",
        end: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        """Make one that `start` starts.

        start_timeout: `run.start_timeout`, for ranks before their first heartbeat; None: they may send none, and are
        not watched. run_folder: None: stacks are printed. on_event: `run.on_event`. end: ends this process at once.
        """
        self.start_timeout = start_timeout
        self.run_folder = run_folder
        self.on_event = on_event
        self.end = end
        self.folder: Path | None = None
        """of this attempt's heartbeats; None between two attempts"""
        self.watched: dict[Path, Standstill[Beat]] = {}
        self.unbegun: Standstill[tuple[list[int], int]] = Standstill()
        """processes that have no heartbeat yet, and the ticks of the processor that they have taken so far"""
        self.found: StalledRank | None = None
        """the stalled rank of this attempt, whose ranks were killed"""
        self._lock = threading.Lock()
        if start_timeout is not None:
            os.environ[START_TIMEOUT] = str(start_timeout)

    def start(self) -> None:
        """Watch until this process ends."""
        never = threading.Event()
        threading.Thread(target=look_every_second, args=(self._watch, never), name="rank watch", daemon=True).start()

    @contextmanager
    def attempt(self, folder: Path) -> Iterator[None]:
        """Return a context that watches the ranks of an attempt. folder: for their heartbeats, to be made."""
        folder.mkdir()
        os.environ[HEARTBEATS] = str(folder)
        with self._lock:
            self.folder = folder
            self.watched = {}
            self.unbegun = Standstill()
            self.found = None
        try:
            yield
        finally:
            with self._lock:  # a report is complete
                self.folder = None

    def _watch(self, seconds: float) -> None:
        """End the ranks of this node if one is stalled. seconds: since the last look."""
        with self._lock:
            stalled = self.look(seconds)
            if stalled and self.found is None:
                self.found = stalled[0]
                self._end_ranks(stalled)

    def look(self, seconds: float) -> list[StalledRank]:
        """Return the ranks that are stalled, the longest first. seconds: since the last look."""
        if self.folder is None:
            return []
        beats = []
        stalled = []
        are_reporting = False
        try:
            files = list(self.folder.iterdir())
        except FileNotFoundError:
            gone = f"{self.folder} is gone, with the heartbeats of the ranks: hangs are no longer found here"
            say_line(f"{gone}. The end of a login session may clear /dev/shm (systemd's RemoveIPC)")
            self.folder = None
            return []
        for file in files:
            beat = read_beat(file) if "." not in file.name else None
            if beat is None:
                continue
            beats.append(beat)
            idle = self.watched.setdefault(file, Standstill()).look(beat, seconds)
            if idle <= beat.timeout.seconds + patience(beat.timeout.seconds):
                are_reporting = are_reporting or beat.activity == "hang report"
            elif _lives(beat.pid):
                stalled.append(StalledRank(beat, idle, _read(stack_file(file))))
        if are_reporting:
            return []  # they know more of the hang
        stalled.sort(key=lambda rank: -rank.idle)
        return stalled + self._find_unbegun(beats, seconds)

    def _find_unbegun(self, beats: Sequence[Beat], seconds: float) -> list[StalledRank]:
        """Return the processes that should have begun to beat: they hang while Python, torch or the config loads.

        Ranks that compute do not hang: a recipe that never calls `start_runtime` sends no heartbeats.
        """
        timeout = self.start_timeout
        if timeout is None or len(beats) >= max((beat.ranks_on_node for beat in beats), default=1):
            return []
        begun = {_session(beat.pid) for beat in beats}
        unbegun = [pid for pid in find_ranks() if pid not in begun]
        if not unbegun:  # the launcher waits for other nodes
            return []
        idle = self.unbegun.look((unbegun, sum(map(processor_ticks, unbegun))), seconds)
        if idle <= timeout + patience(timeout):
            return []
        doing = "start-up, before the config is read"
        limit = Timeout(timeout, "run.start_timeout")
        return [StalledRank(Beat(0, pid, None, 1, 0, limit, doing, ""), idle, "") for pid in unbegun]

    def _end_ranks(self, stalled: Sequence[StalledRank]) -> None:
        """Kill all ranks of this node, report the stalled ones, and end this process if SIGKILL does not end them."""
        ranks = find_ranks()
        ranks += [rank.beat.pid for rank in stalled if rank.beat.pid not in ranks]  # behind a wrapper
        try:
            lines, details = list(describe_stalled(stalled)), "\n".join(describe_details(stalled))
        finally:
            for pid in ranks:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        self._report(lines, details)
        deadline = time.monotonic() + SECONDS_TO_DIE
        while survivors := [pid for pid in ranks if _lives(pid)]:
            if time.monotonic() > deadline:
                for pid in survivors:
                    log.error("error: process %d cannot be killed: %s; its node needs a look", pid, describe_state(pid))
                self.end()
                return
            time.sleep(0.05)

    def _report(self, lines: Sequence[str], details: str) -> None:
        """Print lines, write the details to the run folder, and call the user's command."""
        if self.run_folder is None:
            log.error("%s", "\n  ".join([*lines, details]))
            return
        run_folder = self.run_folder
        file = run_folder / "hang" / time.strftime(TIME_FORMAT) / f"{os.uname().nodename}.txt"
        log.error("%s", "\n  ".join([*lines, f"all stacks: {file}"]))
        call = partial(call_on_event, self.on_event, "hang", run_folder)
        write_in_thread(file, details + "\n", call).join(SECONDS_TO_WRITE)


def describe_stalled(stalled: Sequence[StalledRank]) -> Iterator[str]:
    """Yield the lines of the report: who is stalled on this host, in what, since when, and where its program is."""
    host = os.uname().nodename
    timeout = stalled[0].beat.timeout
    yield f"hang: no progress for over {timeout.seconds:g} s ({timeout.key}); ending the ranks of {host}"
    for beat, idle, stacks in stalled[:DESCRIBED]:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - idle))
        yield f"{beat.name} ({host}) has made no progress since {since}, for {idle:.0f} s: {beat.doing}"
        if position := innermost_place(frames_of(beat.thread, stacks)):
            yield f"{beat.name}'s main thread is at {position}"
        for pid in [beat.pid, *find_children(beat.pid)]:
            if process_state(pid) in ("D", "T", "t"):
                whose = beat.name if pid == beat.pid else f"process {pid}, started by {beat.name},"
                yield f"{whose} {describe_state(pid)}"
    if len(stalled) > DESCRIBED:
        kind = stalled[-1].beat.name.split()[0]
        numbers = [int(rank.beat.name.split()[1]) for rank in stalled[DESCRIBED:]]
        yield f"the same is true of {kind}s {format_ranks(numbers)}"


def describe_details(stalled: Sequence[StalledRank]) -> Iterator[str]:
    """Yield all that is known of each stalled rank."""
    for beat, idle, stacks in stalled:
        yield f"{beat.name}: process {beat.pid}, {beat.doing}, {idle:.0f} s without progress"
        for pid in [beat.pid, *find_children(beat.pid)]:
            yield f"process {pid} {describe_state(pid)}"
            yield _read(Path(f"/proc/{pid}/stack"))  # usually only root's
        yield stacks


def frames_of(thread: int, stacks: str) -> list[str]:
    """Return the stack of a thread in faulthandler's text: "file:line in function", innermost first."""
    frames: list[str] = []
    is_in_thread = False
    for line in stacks.splitlines():
        if begin := _THREAD.search(line):
            is_in_thread = int(begin[1], 16) == thread
        elif is_in_thread and (frame := _FRAME.match(line)):
            frames.append(f"{frame[1]}:{frame[2]} in {frame[3]}")
    return frames


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" if there is no such process."""
    status = process_status(pid)
    return "" if status is None else status.state


def processor_ticks(pid: int) -> int:
    """Return the CPU time of a process; 0 if there is no such process."""
    status = process_status(pid)
    return 0 if status is None else status.ticks


def _lives(pid: int) -> bool:
    return process_state(pid) not in ("", "Z")


def _session(pid: int) -> int | None:
    """Return the session of a process, which is the id of the child of the launcher that it descends from."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def find_ranks() -> list[int]:
    """Return the children of this process, a launcher, that are ranks: torchrun starts each in a new session."""
    return [pid for pid in find_children() if _session(pid) == pid]


def describe_state(pid: int) -> str:
    """Return the kernel's state of a process, as the end of a sentence."""
    state = process_state(pid)
    if state in ("T", "t"):
        return "is stopped (SIGSTOP, or a debugger)"
    channel = _read(Path(f"/proc/{pid}/wchan")).strip("\0\n0 ") or "an unknown function"
    if state == "D":
        return f"is in an uninterruptible call of the kernel, {channel}, which no signal ends: storage or a device"
    return f"is in state {state or 'ended'}, in {channel} of the kernel"


def _read(file: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
