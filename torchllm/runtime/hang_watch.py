"""End a job that hangs, and say why: which rank the others wait for, in which operation, and where its program is.

A thread on every rank looks once per second, for microseconds, whether an operation of this rank, or its main thread in
a wait for a message, has made no progress for run.timeout. The first rank that finds one raises the alarm in the job's
store. Then every rank publishes there what it knows (`hang_report.RankDump`) and writes it, in full, to
RUN/hang/TIME/rank_N.json. The lowest rank that answers draws the conclusion and logs it, once; then all ranks end their
process. The process groups' own time-outs come `GRACE` seconds later, for a job whose store is gone.

Only rank 0's node must be alive for that. A rank that is busy on its own (a compilation, a slow disk) while others wait
longer than run.timeout raises the alarm too, as the process groups' time-out would: raise run.timeout.
"""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from traceback import StackSummary, walk_stack
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from torchllm.runtime.hang_report import RankDump, describe_hang, read_dump, unfinished_records
from torchllm.runtime.torch_compat import GroupProgress, flight_records, group_progress, limit_groups

log = logging.getLogger(__name__)

TICK = 1.0
"""seconds between two looks"""
PATIENCE = 3.0
"""seconds that the other ranks have to publish what they know"""
GRACE = 10.0
"""seconds by which the process groups' time-out is longer than run.timeout"""
POLLS_PER_SECOND = 20_000
"""requests per second that all ranks together send to the store; it answers 70,000 on two cores"""
PUBLISHED_RECORDS = 20_000
"""records per process group that all ranks together publish; the files hold all records"""
WAITING_CODE = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/pipelining/", "/torchllm/parallel/")
"""files that wait for other ranks: a main thread that stays for minutes on one line of theirs is waiting"""

ALARM = "alarm"
"""key of the store: name of the folder of dumps, set by the first rank that finds a hang"""
PUBLISHED = "published"
"""key of the store: number of ranks that have published their dump"""
SPEAKERS = "speakers"
"""key of the store: number of ranks that were about to report; only the first does"""
REPORTED = "reported"
"""key of the store: set when the report is logged"""


class RankProcess(NamedTuple):
    """The process of a rank."""

    host: str
    parent: int
    """process id of the torchrun that started it"""
    pid: int

    def text(self) -> str:
        """Return the process as one line; `parse` is the inverse."""
        return f"{self.host} {self.parent} {self.pid}"

    @classmethod
    def parse(cls, text: str) -> "RankProcess":
        """Read a line that `text` wrote."""
        host, parent, pid = text.split()
        return cls(host, int(parent), int(pid))


class HangWatch:
    """The thread that watches this rank. It starts at once and ends the process if the job hangs."""

    def __init__(self, rank: int, folder: Path, timeout: float, processes: list[RankProcess]) -> None:
        """Watch `rank` of the job whose ranks are `processes`; dumps go to `folder`/hang; `timeout` is in seconds."""
        self.rank = rank
        self.folder = folder
        self.timeout = timeout
        self.hosts = [process.host for process in processes]
        self.siblings = _open_siblings(rank, processes)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A client of its own: that of the process groups is blocked for as long as a rank waits in it.
        client = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]  # not re-exported there
        self.store = dist.PrefixStore("hang_watch", client)  # type: ignore[attr-defined]  # not re-exported there
        self.group_ranks: dict[str, list[int]] = {}
        """ranks of each process group, by torch's name of the group"""
        self.progress: dict[str, GroupProgress] = {}
        """at the last look"""
        self.last_moved: dict[str, float] = {}
        """time.monotonic() when each group was last seen idle or making progress"""
        self.position: object = None
        """of the main thread at the last look, with the groups' progress"""
        self.position_since = time.monotonic()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop watching."""
        self.closed.set()
        self.thread.join()

    def _watch(self) -> None:
        """Look once per `TICK` until `close` is called; end the process if this or another rank finds a hang."""
        while not self.closed.wait(TICK):
            limit_groups(self.timeout + GRACE, self.group_ranks)
            try:
                alarm = self.hangs() or self.store.check([ALARM])
            except dist.DistError:
                return  # the store ends with the job; the process groups have their own time-out
            if alarm:
                self._end_job()

    def hangs(self) -> bool:
        """Return whether this rank has waited for other ranks longer than the time-out. Call it once per `TICK`."""
        moment = time.monotonic()
        progress = group_progress()
        for group, state in progress.items():
            if state.enqueued == state.completed or self.progress.get(group) != state:
                self.last_moved[group] = moment
        self.progress = progress
        return self._main_thread_hangs(moment) or self._group_hangs(moment)

    def _main_thread_hangs(self, moment: float) -> bool:
        """Return whether the main thread has waited on one instruction for too long: perhaps for a message."""
        frame = _main_frame()
        position = id(frame), frame.f_lasti, self.progress
        if position != self.position:
            self.position, self.position_since = position, moment
        return moment - self.position_since > self.timeout and _in_waiting_code(frame)

    def _group_hangs(self, moment: float) -> bool:
        """Return whether a collective has been unfinished for too long."""
        stuck = [group for group, moved in self.last_moved.items() if moment - moved > self.timeout]
        if not stuck:
            return False
        # The counts of a group can be off by one (see `group_progress`), the flight recorder's records cannot.
        oldest = min((record.created for record in unfinished_records(flight_records())), default=time.time_ns())
        self.last_moved.update(dict.fromkeys(stuck, moment))
        return time.time_ns() - oldest > self.timeout * 1e9

    def _end_job(self) -> None:
        """Report the hang together with the other ranks and end this process."""
        # The main thread may fail now because other ranks end: it has nothing to add to the report.
        sys.excepthook = lambda *error: time.sleep(10 * PATIENCE)
        try:
            self._report()
        except (dist.DistError, OSError) as error:
            log.error("hang: rank %d, perhaps others, and the ranks cannot reach each other: %s", self.rank, error)
        finally:
            os._exit(1)

    def _report(self) -> None:
        """Publish this rank's dump and write it to its file; the first rank to answer logs the report of all."""
        name = time.strftime("%Y%m%d-%H%M%S")
        folder = self.folder / "hang" / bytes(self.store.compare_set(ALARM, "", name)).decode()
        dump = _dump(self.rank, self.hosts[self.rank], self.group_ranks)
        world_size = len(self.hosts)
        self.store.set(f"rank_{self.rank}", dump.recent(max(4, PUBLISHED_RECORDS // world_size)).json())
        self.store.add(PUBLISHED, 1)
        # In a thread: a file system that does not answer may be the reason of the hang.
        writer = threading.Thread(target=_write, args=(folder, dump), daemon=True)
        writer.start()
        deadline = time.monotonic() + PATIENCE
        while self.store.add(PUBLISHED, 0) < world_size and time.monotonic() < deadline:
            time.sleep(max(0.05, world_size / POLLS_PER_SECOND))
        writer.join(max(0.5, deadline - time.monotonic()))
        if self._speaks_for_all():
            answering = [rank for rank in range(world_size) if self._has_published(rank)]
            texts = self.store.multi_get([f"rank_{rank}" for rank in answering])
            dumps = [read_dump(bytes(text).decode()) for text in texts]
            log.error("%s", describe_hang(dumps, self.hosts, self.timeout, folder))
            self.store.set(REPORTED, "")
        else:
            self.store.wait([REPORTED], timedelta(seconds=3 * PATIENCE))
        self._kill_silent_siblings()

    def _speaks_for_all(self) -> bool:
        """Return whether this is the lowest rank that has published its dump, and no other rank thought so earlier."""
        lowest = next(rank for rank in range(len(self.hosts)) if self._has_published(rank))
        return lowest == self.rank and self.store.add(SPEAKERS, 1) == 1

    def _has_published(self, rank: int) -> bool:
        return bool(self.store.check([f"rank_{rank}"]))

    def _kill_silent_siblings(self) -> None:
        """Kill the ranks of this node that published nothing; the lowest rank of the node that did publish does it.

        A stopped process, or one stuck outside Python, does not react to SIGTERM: torchrun would wait 30 s for it.
        """
        silent = []
        for rank in self.siblings:
            if not self._has_published(rank):
                silent.append(rank)
            elif rank < self.rank:
                return  # that one does it
        if silent:
            time.sleep(0.5)  # let the other ranks of this node end first: torchrun reports the first that ended
        for rank in silent:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.siblings[rank], signal.SIGKILL)


def _open_siblings(rank: int, processes: list[RankProcess]) -> dict[int, int]:
    """Return a handle (pidfd) on each other rank that the same torchrun started, by rank.

    A process id may be given to another process when its owner ends; a handle cannot.
    """
    own_process = processes[rank]
    handles: dict[int, int] = {}
    if own_process.parent <= 1:  # its torchrun has ended: ranks of other jobs have the same parent
        return handles
    for number, process in enumerate(processes):
        if number != rank and process.host == own_process.host and process.parent == own_process.parent:
            with suppress(OSError, AttributeError):  # no pidfd on this system: torchrun kills them after its 30 s
                handles[number] = os.pidfd_open(process.pid)
    return handles


def _main_frame() -> FrameType:
    """Return the frame that the main thread executes."""
    return sys._current_frames()[threading.main_thread().ident or 0]


def _in_waiting_code(frame: FrameType) -> bool:
    """Return whether a frame is in code that waits for other ranks."""
    return any(part in frame.f_code.co_filename for part in WAITING_CODE)


def _dump(rank: int, host: str, group_ranks: dict[str, list[int]]) -> RankDump:
    """Collect what this rank knows, now."""
    frame = _main_frame()
    lines = StackSummary.extract(walk_stack(frame), lookup_lines=False)
    stack = [f"{line.filename}:{line.lineno} in {line.name}" for line in reversed(lines)]
    return RankDump(
        rank, host, time.time_ns(), stack, _in_waiting_code(frame), group_ranks, flight_records(places=True)
    )


def _write(folder: Path, dump: RankDump) -> None:
    """Write a dump to its file, which appears whole; log what goes wrong."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".rank_{dump.rank}"
        temporary.write_text(dump.json())
        temporary.rename(folder / f"rank_{dump.rank}.json")
    except OSError as error:
        log.error("rank %d: %s", dump.rank, error)
