"""Ends a job that hangs, and says why: which rank the others wait for, in what operation, where its program is.

A thread on every rank looks once a second, for microseconds, whether an operation of this rank's, or its main thread in
a wait for a message, has stood still for run.timeout. The first rank that finds one raises the alarm in the job's
store. Then every rank tells there what it knows (`hang_report.Dump`) and writes it down, in full, in
RUN/hang/TIME/rank_N.json; the lowest one that answers concludes from all of it and says so, once; and all end
their process. The process groups' own time-outs come `GRACE` later: for a job whose store has gone.

Only rank 0's node need be alive for that. A rank busy on its own (a compilation, a slow disk) while others wait for
longer than run.timeout is an alarm too, as it would be for the process groups: raise run.timeout.
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

import torch.distributed as dist

from torchllm.runtime.hang_report import Dump, read_dump, report, unfinished
from torchllm.runtime.torch_compat import flight_records, group_progress, limit_groups

log = logging.getLogger(__name__)

TICK = 1.0
"""seconds between looks"""
PATIENCE = 3.0
"""seconds in which the others should have told what they know"""
GRACE = 10.0
"""seconds by which the process groups' time-out is longer"""
ASKED = 20_000
"""questions a second that all ranks together ask the store; it answers 70,000 on two cores"""
TOLD = 20_000
"""records of a group that all ranks together tell; their files have all"""
WAITS = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/pipelining/", "/torchllm/parallel/")
"""code whose innermost line waits for other ranks, when it is the same for minutes"""


class HangWatch:
    """This rank's. `peers`: "host parent-pid pid" of every rank, by number."""

    def __init__(self, rank: int, folder: Path, timeout: float, peers: list[str]) -> None:
        self.rank, self.folder, self.timeout = rank, folder, timeout
        self.hosts = [peer.split()[0] for peer in peers]
        self.siblings = _siblings(rank, peers)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A client of its own: the process groups' may be busy, for as long as a rank waits there.
        client = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]  # not re-exported there
        self.store = dist.PrefixStore("hang_watch", client)  # type: ignore[attr-defined]  # not re-exported there
        self.groups: dict[str, list[int]] = {}
        self.progress: dict[str, tuple[int, int]] = {}
        self.moved: dict[str, float] = {}
        self.place: object = None
        self.still_since = time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop watching."""
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(TICK):
            limit_groups(self.timeout + GRACE, self.groups)
            try:
                if not (self.hangs() or self.store.check(["alarm"])):
                    continue
            except dist.DistError:
                return  # the store ends with the job; the process groups have their own time-out
            self._end()

    def hangs(self) -> bool:
        """Whether this rank has waited for others for too long. Call it once a `TICK`."""
        moment, progress = time.monotonic(), group_progress()
        for group, (asked, done) in progress.items():
            if asked == done or self.progress.get(group) != (asked, done):
                self.moved[group] = moment
        frame = _main_frame()
        place = id(frame), frame.f_lasti, progress
        if place != self.place:
            self.place, self.still_since = place, moment
        self.progress = progress
        if moment - self.still_since > self.timeout and _in_wait(frame):
            return True
        late = [group for group, since in self.moved.items() if moment - since > self.timeout]
        if not late:
            return False
        oldest = min((record.created for record in unfinished(flight_records())), default=time.time_ns())
        self.moved.update(dict.fromkeys(late, moment))
        return time.time_ns() - oldest > self.timeout * 1e9

    def _end(self) -> None:
        # A main thread that fails now, for its peers go, has nothing to add.
        sys.excepthook = lambda *error: time.sleep(10 * PATIENCE)
        try:
            self._tell()
        except (dist.DistError, OSError) as problem:
            log.error(
                "the job hangs, rank %d at least, and its ranks cannot speak to each other: %s", self.rank, problem
            )
        finally:
            os._exit(1)

    def _tell(self) -> None:
        name = time.strftime("%Y%m%d-%H%M%S")
        folder = self.folder / "hang" / bytes(self.store.compare_set("alarm", "", name)).decode()
        dump = _dump(self.rank, self.hosts[self.rank], self.groups)
        world = len(self.hosts)
        self.store.set(f"rank_{self.rank}", dump.recent(max(4, TOLD // world)).json())
        self.store.add("told", 1)
        # Beside all else: a file system that does not answer may be why the job hangs.
        writer = threading.Thread(target=_write, args=(folder, dump), daemon=True)
        writer.start()
        deadline = time.monotonic() + PATIENCE
        while self.store.add("told", 0) < world and time.monotonic() < deadline:
            time.sleep(max(0.05, world / ASKED))
        writer.join(max(0.5, deadline - time.monotonic()))
        if next(filter(self._has_told, range(world))) == self.rank and self.store.add("speakers", 1) == 1:
            told = self.store.multi_get([f"rank_{r}" for r in range(world) if self._has_told(r)])
            dumps = [read_dump(bytes(dump).decode()) for dump in told]
            log.error("%s", report(dumps, self.hosts, self.timeout, folder))
            self.store.set("said", "")
        else:
            self.store.wait(["said"], timedelta(seconds=3 * PATIENCE))
        self._kill_the_silent()

    def _has_told(self, rank: int) -> bool:
        return bool(self.store.check([f"rank_{rank}"]))

    def _kill_the_silent(self) -> None:
        """A stopped process, or one stuck outside Python, heeds no SIGTERM: torchrun would wait 30 s for it."""
        silent = [rank for rank in self.siblings if not self._has_told(rank)]
        if silent and all(rank in silent for rank in self.siblings if rank < self.rank):
            time.sleep(0.5)  # the others of this node end first: torchrun tells of the first one
            for rank in silent:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.siblings[rank], signal.SIGKILL)


def _siblings(rank: int, peers: list[str]) -> dict[int, int]:
    """Ranks that the same torchrun has started -> a handle on their process, which no other process inherits."""
    found = {}
    host, parent, _ = peers[rank].split()
    for other, peer in enumerate(peers):
        if other != rank and peer.split()[:2] == [host, parent] and int(parent) > 1:
            with suppress(OSError, AttributeError):  # no such thing there: torchrun's 30 s, then
                found[other] = os.pidfd_open(int(peer.split()[2]))
    return found


def _main_frame() -> FrameType:
    return sys._current_frames()[threading.main_thread().ident or 0]


def _in_wait(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in WAITS)


def _dump(rank: int, host: str, groups: dict[str, list[int]]) -> Dump:
    frame = _main_frame()
    lines = StackSummary.extract(walk_stack(frame), lookup_lines=False)
    stack = [f"{line.filename}:{line.lineno} in {line.name}" for line in reversed(lines)]
    return Dump(rank, host, time.time_ns(), stack, _in_wait(frame), groups, flight_records(places=True))


def _write(folder: Path, dump: Dump) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".rank_{dump.rank}"
        part.write_text(dump.json())
        part.rename(folder / f"rank_{dump.rank}.json")
    except OSError as problem:
        log.error("rank %d: %s", dump.rank, problem)
