"""Watchdog in each rank: end a job that hangs, and report the rank that others wait for, the operation, and its stack.

A thread on every rank looks once per second, for microseconds, whether an operation of this rank, or its main thread in
a wait for a message, has made no progress for too long: run.timeout in a step, run.start_timeout in the start-up,
run.save_timeout in a save (`heartbeat.Timeouts`). The first rank that finds one raises the alarm in the job's
store. Then every rank publishes its dump there (`hang_report.RankDump`) and writes it, in full, to
RUN/hang/TIME/rank_N.json. One rank, usually rank 0, draws the conclusion and logs it, once; then all ranks end their
process. A rank that cannot reach the store ends alone. The timeouts of the process groups are `GROUP_GRACE` seconds
longer than all timeouts: a fallback for a job where no such thread runs any more.

One store serves all ranks. Therefore a rank asks for an alarm less often in a larger job, and the size of its dump
grows with its groups, not with their ranks. One watch per node that asks for all ranks of the node would need
a channel to them, and would leave a whole node deaf when its own process is the one that is stopped.

Only rank 0's node must be alive for that. Where a rank is busy on its own (a slow disk) while others wait longer than
the timeout, they raise the alarm too, as a process group's timeout would: raise the setting that the report names.
"""

import hashlib
import hmac
import json
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

from torchllm.checkpoint.background import SAVES_IN_BACKGROUND
from torchllm.runtime.heartbeat import GROUP_GRACE, Timeout, heartbeat
from torchllm.tools.launch.hang_report import (
    TICK,
    TIME_FORMAT,
    RankDump,
    Standstill,
    describe_hang,
    look_every_second,
    read_dump,
    unfinished_records,
    write_in_thread,
    write_slices,
)
from torchllm.tools.launch.on_event import call_on_event
from torchllm.tools.launch.process_identity import find_children
from torchllm.tools.launch.store import PrefixStore, join_store
from torchllm.tools.launch.torch_records import (
    FlightRecord,
    GroupProgress,
    LimitedGroup,
    flight_records,
    group_progress,
    limit_groups,
)

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""seconds that the other ranks have to publish their dumps"""
POLLS_PER_SECOND = 20_000
"""requests per second that all ranks together send to the store after an alarm; it answers 70,000 on two cores"""
CHECKS_PER_SECOND = 4_000
"""requests per second that all ranks together send to the store to ask for an alarm"""
PUBLISHED_RECORDS = 20_000
"""records per process group that all ranks together publish; the files hold all records"""
WAITING_CODE = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/pipelining/", "/torchllm/parallel/")
"""files that wait for other ranks: a main thread that stays for minutes on one line of theirs is waiting"""

STORE_TIMEOUT = timedelta(seconds=300)
"""of a request to the store"""
ALARM = "alarm"
"""key of the store: name of the folder of dumps, set by the first rank that finds a hang"""
PUBLISHED = "published"
"""key of the store: number of ranks that have published their dump"""
ANSWERING = "answering"
"""key of the store: the ranks that have published their dump, with a space after each"""
SPEAKERS = "speakers"
"""key of the store: number of ranks that were about to report; only the first does"""
CANDIDATES = 8
"""the first of this many lowest ranks that has published reports; if none has, the first rank that has"""
DUMPS_PER_REQUEST = 1024
"""dumps that the reporting rank reads from the store at once"""
REPORTED = "reported"
"""key of the store: set when the report is logged"""


class RankProcess(NamedTuple):
    host: str
    parent: int
    """process id of the launcher that started it"""
    pid: int


def sign(secret: bytes, text: str) -> str:
    """Return a text with its signature (HMAC, RFC 2104): only the ranks of this start of the job have the secret."""
    return f"{hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()} {text}"


def verify(secret: bytes, signed: bytes) -> str | None:
    """Return the text of a value that `sign` returned for the same secret; None of any other value."""
    text = bytes(signed).decode(errors="replace").partition(" ")[2]
    return text if hmac.compare_digest(bytes(signed), sign(secret, text).encode()) else None


def seconds_between_checks(world_size: int) -> float:
    """Return how often a rank asks the store for an alarm, so that all together do so `CHECKS_PER_SECOND` times."""
    return max(TICK, world_size / CHECKS_PER_SECOND)


class HangWatch:
    """The thread that watches this rank. It starts at once and ends the process if the job hangs."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        ranks_of_node: range,
        folder: Path,
        secret: bytes,
        on_event: str = "",
    ) -> None:
        """Watch `rank`.

        ranks_of_node: ranks on this rank's node. folder: the run's; dumps go to its folder "hang". secret: the same
        on all ranks. on_event: command that the reporting rank calls (`run.on_event`).
        """
        self.rank = rank
        self.world_size = world_size
        self.folder = folder
        self.on_event = on_event
        self.check_interval = seconds_between_checks(world_size)
        self.process = RankProcess(os.uname().nodename, os.getppid(), os.getpid())
        # A separate client: the client of the process groups is blocked while a rank waits in it.
        self.store = PrefixStore("hang_watch", join_store(STORE_TIMEOUT))
        self.secret = secret
        self.ranks_of_node = ranks_of_node
        self.store.set(f"process_{rank}", sign(self.secret, json.dumps(self.process)))
        self.has_store = True
        """it answers"""
        self.exceeded: Timeout | None = None
        """that this rank has found exceeded"""
        self.groups: dict[str, LimitedGroup] = {}
        """by torch's name of the group"""
        self.unfinished: dict[str, Standstill[GroupProgress]] = {}
        """of the groups that were not idle at the last look"""
        self.main_thread: Standstill[object] = Standstill()
        """instruction that it executes, and the progress of all groups"""
        self.until_check = 0.0
        """seconds until this rank asks the store for an alarm again"""
        self.closed = threading.Event()
        self.thread = threading.Thread(
            target=look_every_second, args=(self._look, self.closed), name="hang watch", daemon=True
        )
        self.thread.start()

    def close(self) -> None:
        self.closed.set()
        self.thread.join()

    def _look(self, seconds: float) -> None:
        """End the process if this or another rank has found a hang. seconds: since the last look."""
        self.groups |= limit_groups(max(heartbeat().timeouts) + GROUP_GRACE, self.groups)
        alarm = self.hangs(seconds)
        self.until_check -= seconds
        if not alarm and self.has_store and self.until_check <= 0:
            self.until_check += self.check_interval
            try:
                alarm = self.store.check([ALARM]) and verify(self.secret, self.store.get(ALARM)) is not None
            except RuntimeError:
                self.has_store = False  # it ends with the job; this rank may be stuck in an operation for ever
        if alarm:
            self._end_job()

    def hangs(self, seconds: float) -> bool:
        """Return whether this rank has waited for other ranks longer than its timeout. seconds: since the last look."""
        progress = group_progress()
        return self._main_thread_hangs(progress, seconds) or self._group_hangs(progress, seconds)

    def _main_thread_hangs(self, progress: dict[str, GroupProgress], seconds: float) -> bool:
        """Return whether the main thread has waited on one instruction for too long: perhaps for a message."""
        frame = _main_frame()
        timeout = heartbeat().timeout()
        idle = self.main_thread.look((id(frame), frame.f_lasti, progress), seconds)
        if idle <= timeout.seconds or not _in_waiting_code(frame):
            return False
        self.exceeded = timeout
        return True

    def _group_hangs(self, progress: dict[str, GroupProgress], seconds: float) -> bool:
        """Return whether a collective has been unfinished for too long."""
        limit = heartbeat().timeout().seconds
        unfinished = {}
        is_stuck = False
        for group, state in progress.items():
            if state.enqueued != state.completed:
                unfinished[group] = self.unfinished.get(group, Standstill())
                if unfinished[group].look(state, seconds) > limit:
                    unfinished[group].seconds = 0.0  # the next look into the records is as much later
                    is_stuck = True
        self.unfinished = unfinished
        # The counts of a group can be off by one (see `group_progress`), the flight recorder's records cannot.
        for record in unfinished_records(flight_records()) if is_stuck else ():
            timeout = self._timeout_of(record)
            if time.time_ns() - record.created > timeout.seconds * 1e9:
                self.exceeded = timeout
                return True
        return False

    def _timeout_of(self, record: FlightRecord) -> Timeout:
        """Return how long an operation may take."""
        group = self.groups.get(record.group)
        if group is not None and group.description == SAVES_IN_BACKGROUND:
            return Timeout(heartbeat().timeouts.save, "run.save_timeout")
        return heartbeat().timeout()

    def _end_job(self) -> None:
        """Report the hang together with the other ranks and end this process."""
        heartbeat().begin("hang report")  # the launcher waits for it
        # The main thread may fail now because other ranks end: it has nothing to add to the report.
        sys.excepthook = lambda *error: time.sleep(10 * PATIENCE)
        try:
            self._report()
        except (RuntimeError, OSError) as error:
            log.error("hang: rank %d, perhaps others, and the ranks cannot reach each other: %s", self.rank, error)
        finally:
            os._exit(1)

    def _report(self) -> None:
        """Publish this rank's dump and write it to its file; one rank logs the report of all."""
        folder = self.folder / "hang" / self._raise_alarm()
        dump = self._dump()
        position = self._publish(dump.recent(max(4, PUBLISHED_RECORDS // self.world_size)))
        writer = write_in_thread(folder / f"rank_{self.rank}.json", dump.json())
        patience = PATIENCE + self.check_interval - TICK  # other ranks may hear of the alarm only then
        deadline = time.monotonic() + patience
        while self.store.add(PUBLISHED, 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(max(0.05, self.world_size / POLLS_PER_SECOND))
        writer.join(max(0.5, deadline - time.monotonic()))
        if self._speaks_for_all(position):
            event = threading.Thread(target=call_on_event, args=(self.on_event, "hang", self.folder), daemon=True)
            event.start()  # before the log, which may block
            dumps = self._published_dumps()
            timeout = next((dump.exceeded for dump in dumps if dump.exceeded is not None), heartbeat().timeout())
            log.error("%s", describe_hang(dumps, self.world_size, self._host_of, timeout, folder))
            event.join(PATIENCE)
            self.store.set(REPORTED, "")
        else:
            self.store.wait([REPORTED], timedelta(seconds=3 * patience))
        self._kill_silent_siblings()

    def _raise_alarm(self) -> str:
        """Tell all ranks to report; return the name of the folder of dumps, chosen by the first rank to do so."""
        name = time.strftime(TIME_FORMAT)
        alarm = sign(self.secret, name)
        raised = verify(self.secret, self.store.compare_set(ALARM, "", alarm))
        if raised is None:  # not from a rank
            self.store.set(ALARM, alarm)
            return name
        return raised

    def _dump(self) -> RankDump:
        """Collect the dump of this rank, now."""
        frame = _main_frame()
        lines = StackSummary.extract(walk_stack(frame), lookup_lines=False)
        return RankDump(
            self.rank,
            self.process.host,
            time.time_ns(),
            [f"{line.filename}:{line.lineno} in {line.name}" for line in reversed(lines)],
            _in_waiting_code(frame),
            {name: write_slices(group.ranks) for name, group in self.groups.items()},
            flight_records(places=True),
            heartbeat().step,
            self.exceeded,
        )

    def _publish(self, dump: RankDump) -> int:
        """Put a dump into the store; return how many ranks have done so by then."""
        self.store.set(f"rank_{self.rank}", dump.json())
        self.store.append(ANSWERING, f"{self.rank} ")  # type: ignore[attr-defined]  # missing in torch's stubs
        return int(self.store.add(PUBLISHED, 1))

    def _published_dumps(self) -> list[RankDump]:
        """Return the dumps in the store, by rank."""
        answering = sorted(int(rank) for rank in bytes(self.store.get(ANSWERING)).split())
        dumps = []
        for start in range(0, len(answering), DUMPS_PER_REQUEST):
            keys = [f"rank_{rank}" for rank in answering[start : start + DUMPS_PER_REQUEST]]
            dumps += [read_dump(bytes(text).decode()) for text in self.store.multi_get(keys)]
        return dumps

    def _speaks_for_all(self, position: int) -> bool:
        """Return whether this rank reports, and no other rank thought so earlier.

        position: how many ranks had published when this one had.
        """
        candidates = range(min(CANDIDATES, self.world_size))
        speaker = next((rank for rank in candidates if self._has_published(rank)), None)
        is_speaker = position == 1 if speaker is None else speaker == self.rank
        return is_speaker and self.store.add(SPEAKERS, 1) == 1

    def _host_of(self, rank: int) -> str:
        """Return the host of a rank, which need not answer any more."""
        process = self._process_of(rank)
        return "unknown host" if process is None else process.host

    def _process_of(self, rank: int) -> RankProcess | None:
        """Return the process of a rank; None if it is unknown, or no rank has written it."""
        key = f"process_{rank}"
        text = verify(self.secret, self.store.get(key)) if self.store.check([key]) else None
        return None if text is None else RankProcess(*json.loads(text))

    def _has_published(self, rank: int) -> bool:
        return bool(self.store.check([f"rank_{rank}"]))

    def _kill_silent_siblings(self) -> None:
        """Kill the ranks of this node that published nothing; the lowest rank of the node that did publish does it.

        A stopped process, or one stuck outside Python, does not react to SIGTERM: the launcher would wait 10 s for it.
        A process id may be given to another process when its owner ends, but not to a child of the same launcher.
        """
        silent = []
        for rank in self.ranks_of_node:
            if not self._has_published(rank):
                silent.append(self._process_of(rank))
            elif rank < self.rank:
                return  # that one does it
        if not silent or self.process.parent <= 1:  # ranks of other jobs have that parent, too
            return
        time.sleep(0.5)  # let the other ranks of this node end first: the launcher reports the first that ended
        siblings = find_children(self.process.parent)
        for process in silent:
            if process is not None and process[:2] == self.process[:2] and process.pid in siblings:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def _main_frame() -> FrameType:
    return sys._current_frames()[threading.main_thread().ident or 0]


def _in_waiting_code(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in WAITING_CODE)
