"""Profiles a step from time to time, on all ranks at once: shows where its time went and which rank is slow.

Between profiled steps only the host's clock is read. The time of a profiled step is broken down (`breakdown.py`), all
ranks' parts are gathered, and rank 0 logs their mean beside what the planner expected. This costs time: the profile has
to be read, and a profiled step is slower. Steps are profiled so rarely that it stays below `MAX_COST` of the run.

A rank is slow if it works, rather than waits for others, `SLOW` times as long as the median of the ranks that hold the
same pipeline stages, in `CONFIRMATIONS` profiled steps in a row: after the first, the very next steps are profiled.
"""

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from torchllm.metrics.breakdown import COMPUTING, breakdown
from torchllm.metrics.trace import TraceWriter
from torchllm.parallel.mesh import Mesh
from torchllm.runtime.phase import phase
from torchllm.runtime.torch_compat import flight_records, profiled_events

MAX_COST = 0.01
"""share of the run's time that profiling may take"""
SLOW = 1.25
"""a slow rank works this many times as long as its peers"""
CONFIRMATIONS = 4
"""profiled steps in a row in which a rank must be the slowest: one may be chance"""
NOTICEABLE = 0.05
"""delays below this share of a step are ignored"""

Parts = Mapping[str, float]
"""seconds by part of a step"""


class SlowRank(NamedTuple):
    """A rank that holds up others."""

    rank: int
    host: str
    part: str
    """the part of the step in which it loses most"""
    seconds: float
    """of that part"""
    peer_seconds: float
    """of that part, the median of its peers"""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) is slow: {self.part} takes {self.seconds:.3g} s, "
            f"{self.peer_seconds:.3g} s on its peers"
        )


class RankReport(NamedTuple):
    """What a rank sends to the others about its profiled step."""

    parts: Parts
    peer_group: int
    """ranks with the same number do the same work"""
    host: str
    cost: float = 0.0
    """seconds that the step took longer than an unprofiled one, reading the profile included"""
    usual: float = 0.0
    """seconds of an unprofiled step"""


class ProfiledStep(NamedTuple):
    """A profiled step; the same on all ranks."""

    step: int
    parts: dict[str, float]
    """seconds by part, the mean over ranks; they add up to the step"""
    slow: SlowRank | None
    """a rank that was slow in `CONFIRMATIONS` profiled steps in a row, of which this is the last"""

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return sum(self.parts.values())

    def describe(self, mfu: float | None, planned_mfu: float | None) -> str:
        """Return a line with the parts, largest first, and what the largest wait costs. mfu: of this step."""
        shares = sorted(((seconds / self.seconds, name) for name, seconds in self.parts.items()), reverse=True)
        parts = ", ".join(f"{name} {share:.1%}" for share, name in shares if share >= 0.001)
        line = f"step {self.step}, {self.seconds:.3g} s: {parts}"
        if mfu is None:
            return line
        line += f"; MFU {mfu:.1%} measured"
        if planned_mfu is not None:
            line += f", {planned_mfu:.1%} planned"
        waits = [(share, name) for share, name in shares if name not in COMPUTING and share < 1]
        if not waits:
            return line
        share, name = waits[0]
        points = 100 * (mfu / (1 - share) - mfu)
        return f"{line}; {name} costs {points:.1f} points"


class StepProfiler:
    """Profiles some steps of this rank. Every rank has one, and profiles the same steps."""

    def __init__(
        self,
        interval: int,
        mesh: Mesh,
        host_group: dist.ProcessGroup,
        device: torch.device,
        traces: TraceWriter | None = None,
        start: int = 0,
    ) -> None:
        """Profile at most one step in `interval` (0: none) and those of `traces`, which are also written to files.

        start: steps that were done before. The first step after it is like no other and is not profiled.
        """
        self.interval = interval
        self.host_group = host_group
        self.traces = traces
        self.axis_of_group = {group: axis.name for group, axis in mesh.axis_of_group.items()}
        self.axis_of_group[host_group.group_name] = "host"
        self.pipeline_group = mesh.pp.get_group().group_name
        self.peer_group = mesh.world.get_local_rank(0)
        self.activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self.activities.append(ProfilerActivity.CUDA)
        self.next = self._next_allowed(start + 2)
        self.cost = 0.0
        """seconds since the last profiled step that confirmed nothing"""
        self.unprofiled_seconds: deque[float] = deque(maxlen=32)
        self.suspect: int | None = None
        """rank that was the slowest in the latest profiled steps"""
        self.suspicions = 0
        """in how many in a row"""
        self.latest: ProfiledStep | None = None
        if interval or (traces is not None and traces.steps):
            with profile(activities=self.activities):  # the first profile of a process takes a second to start
                pass

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """Return a context around all that the loop does in step `n`; afterwards `latest` is that step, if profiled."""
        self.latest = None
        if self._is_traced(n) or (self.interval and n >= self.next):
            with self._profile(n):
                yield
        else:
            started = time.perf_counter()
            yield
            self.unprofiled_seconds.append(time.perf_counter() - started)

    @contextmanager
    def _profile(self, n: int) -> Iterator[None]:
        called = time.perf_counter()
        profiler = profile(activities=self.activities)
        profiler.start()
        started, started_ns = time.perf_counter(), time.time_ns()
        try:
            with phase("step"):
                yield
                if ProfilerActivity.CUDA in self.activities:
                    torch.cuda.synchronize()
        finally:
            stopped = time.perf_counter()
            profiler.stop()
        records = flight_records(started_ns)
        parts = breakdown(profiled_events(profiler), records, self.axis_of_group, self.pipeline_group)
        aside = parts["evaluate"] + parts["checkpoint"]  # neither the step's own time nor the profile's fault
        usual = min(median(self.unprofiled_seconds or [math.inf]), stopped - started - aside)
        cost = time.perf_counter() - called - aside - usual
        reports = self._gather(RankReport(parts, self.peer_group, os.uname().nodename, cost, usual))
        slow = self._confirm(find_slow_rank(reports))
        self._schedule(n, reports)
        self.latest = ProfiledStep(n, mean_parts(reports), slow)
        if self.traces is not None and self._is_traced(n):
            self.traces.write(n, profiler, self.latest.parts)

    def _is_traced(self, n: int) -> bool:
        return self.traces is not None and n in self.traces.steps

    def _gather(self, report: RankReport) -> list[RankReport]:
        reports = [report] * dist.get_world_size(self.host_group)
        dist.all_gather_object(reports, report, group=self.host_group)
        return reports

    def _confirm(self, slow: SlowRank | None) -> SlowRank | None:
        """Return the slow rank of this step if the steps before had the same one, `CONFIRMATIONS` in all."""
        changed = self.suspect is not None and slow is not None and slow.rank != self.suspect
        if slow is None or changed:  # it was chance
            self.suspect, self.suspicions = None, 0
            return None
        self.suspect = slow.rank
        self.suspicions += 1
        return slow if self.suspicions == CONFIRMATIONS else None

    def _schedule(self, n: int, reports: Sequence[RankReport]) -> None:
        """Set the next step to profile: at once while a slow rank is not confirmed, else by what profiling costs."""
        self.cost += max(report.cost for report in reports)
        if 0 < self.suspicions < CONFIRMATIONS:
            self.next = n + 1
            return
        usual = min(report.usual for report in reports)
        steps = max(1, math.ceil(self.cost / MAX_COST / usual))
        self.next = self._next_allowed(n + steps)
        self.suspect, self.suspicions, self.cost = None, 0, 0.0

    def _next_allowed(self, n: int) -> int:
        """Return the first step from `n` on that is a multiple of the interval."""
        return math.ceil(n / self.interval) * self.interval if self.interval else 0


def mean_parts(reports: Sequence[RankReport]) -> dict[str, float]:
    """Return the mean over ranks of each part; a rank that lacks a part spent no time on it."""
    totals: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.parts.items():
            totals[name] = totals.get(name, 0.0) + seconds
    return {name: total / len(reports) for name, total in totals.items()}


def find_slow_rank(reports: Sequence[RankReport]) -> SlowRank | None:
    """Return the rank that works longest in comparison with its peers, if it is slow; reports: in order of ranks."""
    slowest, longest_delay = None, 0.0
    for rank, report in enumerate(reports):
        peers = peers_of(rank, reports)
        if not peers:
            continue
        work = sum(working_parts(report).values())
        usual = median(sum(working_parts(peer).values()) for peer in peers)
        delay = work - usual
        noticeable = delay > NOTICEABLE * sum(report.parts.values())
        if work > SLOW * usual and noticeable and delay > longest_delay:
            slowest, longest_delay = rank, delay
    return None if slowest is None else slow_rank(slowest, reports)


def slow_rank(rank: int, reports: Sequence[RankReport]) -> SlowRank:
    """Return which part makes a rank slower than its peers."""
    report = reports[rank]
    peers = peers_of(rank, reports)
    slow = None
    for name, seconds in working_parts(report).items():
        peer_seconds = median(peer.parts.get(name, 0.0) for peer in peers)
        if slow is None or seconds - peer_seconds > slow.seconds - slow.peer_seconds:
            slow = SlowRank(rank, report.host, name, seconds, peer_seconds)
    assert slow is not None, "every step has parts"
    return slow


def peers_of(rank: int, reports: Sequence[RankReport]) -> list[RankReport]:
    """Return the reports of the other ranks that do the same work."""
    group = reports[rank].peer_group
    return [report for index, report in enumerate(reports) if index != rank and report.peer_group == group]


def working_parts(report: RankReport) -> Parts:
    """Return the parts in which a rank works on the step, rather than waits for ranks, evaluates or saves."""
    return {name: seconds for name, seconds in report.parts.items() if is_work(name)}


def is_work(part: str) -> bool:
    """Whether a rank's own doing decides how long a part takes; its data loader is its own."""
    return not part.startswith(("exposed", "bubble")) and part not in ("evaluate", "checkpoint")
