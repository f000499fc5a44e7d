"""Profiles a step from time to time, on all ranks at once: shows where its time went and which rank is slow.

Between profiled steps only the host's clock is read. The time of a profiled step is broken down (`breakdown.py`), the
ranks report their parts, and rank 0 concludes: the mean of each part, and the
next step to profile. This costs time: a profiled step is slower, the profile has to be read, and the reports
have to be exchanged. Steps are profiled so rarely that it stays below `MAX_COST` of the run.

A rank is called slow if `slow_rank.py` finds it in `CONFIRMATIONS` profiled steps in a row: after the first, the very
next steps are profiled.
"""

import logging
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from torchllm.parallel.mesh import Mesh
from torchllm.runtime.heartbeat import phase
from torchllm.tools.launch.records import gather_records
from torchllm.tools.launch.torch_records import flight_records
from torchllm.tools.mesh_axes import axis_of_group
from torchllm.tools.watch.breakdown import COMPUTING, breakdown
from torchllm.tools.watch.slow_rank import Reports, SlowRank, find_slow_rank, mean_parts, rank_report, ranks_with_parts
from torchllm.tools.watch.torch_profile import ProfiledEvent, break_profile_cycle, profiled_events

if TYPE_CHECKING:  # few runs write traces
    from torchllm.tools.watch.trace import TraceWriter

log = logging.getLogger(__name__)

MAX_COST = 0.01
"""share of the run's time that profiling may take"""
CONFIRMATIONS = 4
"""consecutive profiled steps where a rank must be the slowest: one may be chance"""


class ProfiledStep(NamedTuple):
    """A profiled step; the same on all ranks."""

    step: int
    parts: dict[str, float]
    """seconds by part, the mean over ranks; they add up to the step"""
    slow: SlowRank | None
    """a rank that was slow in `CONFIRMATIONS` consecutive profiled steps, this one the last"""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def describe(self, mfu: float | None) -> str:
        """Return a line with the parts, largest first, and the cost of the largest wait. mfu: of this step."""
        shares = sorted(((seconds / self.seconds, name) for name, seconds in self.parts.items()), reverse=True)
        parts = ", ".join(f"{name} {share:.1%}" for share, name in shares if share >= 0.001)
        line = f"step {self.step}, {self.seconds:.3g} s: {parts}"
        if mfu is None:
            return line
        line += f"; MFU {mfu:.1%} measured"
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
        traces: "TraceWriter | None" = None,
        start: int = 0,
    ) -> None:
        """Profile at most one step in `interval` (0: none), and the steps of `traces`, which are also written to files.

        start: steps that were done before. The first step after it is unlike the others and is not profiled.
        """
        self.interval = interval
        self.host_group = host_group
        self.traces = traces
        self.axis_of_group = {group: axis.name for group, axis in axis_of_group(mesh).items()}
        self.axis_of_group[host_group.group_name] = "host"
        self.pipeline_group = mesh.pp.get_group().group_name
        self.peer_group = mesh.world.get_local_rank(0)
        self.activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self.activities.append(ProfilerActivity.CUDA)
        self.next = self._next_allowed(start + 2)
        self.exchange_seconds = 0.0
        """of the last profiled step: from this rank's report until it knew the conclusion"""
        self.cost = 0.0
        """on rank 0: seconds since the last profiled step that confirmed nothing"""
        self.unprofiled_seconds: deque[float] = deque(maxlen=32)
        self.suspect: int | None = None
        """on rank 0: the rank that was the slowest in the latest profiled steps"""
        self.suspicions = 0
        """in how many in a row"""
        self.latest: ProfiledStep | None = None
        """the step that has just ended, if it was profiled and its parts are known"""
        self.has_told_of_missing_events = False
        if interval or traces is not None:
            with warnings.catch_warnings():
                # torch 2.11 warns once per process, whatever the profile
                warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
                with profile(activities=self.activities) as first:  # a process's first profile takes a second to start
                    pass
            break_profile_cycle(first)

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
            break_profile_cycle(profiler)  # else its events stay until the next garbage collection
        parts = self._parts(profiled_events(profiler), started_ns)
        # neither the step's own time nor the profile's fault
        aside = parts.get("evaluate", 0.0) + parts.get("checkpoint", 0.0)
        usual = min(median(self.unprofiled_seconds or [math.inf]), stopped - started - aside)
        cost = time.perf_counter() - called - aside - usual
        host = os.uname().nodename
        self._exchange(n, rank_report(parts, self.peer_group, host, cost, usual, self.exchange_seconds))
        if self.traces is not None and self._is_traced(n):
            with self.traces.tolerance.attempt():
                self.traces.write(n, profiler, {} if self.latest is None else self.latest.parts)

    def _parts(self, events: Sequence[ProfiledEvent], started_ns: int) -> dict[str, float]:
        """Return the breakdown of a profiled step; nothing if it cannot be known.

        The host's events tell nothing about a GPU, which works later. The GPU's are missing if CUPTI, torch's source of
        them, is in use by another profiler (nsys) or is forbidden, as in some virtual machines.
        """
        if ProfilerActivity.CUDA in self.activities and not any(event.kernel for event in events):
            if not self.has_told_of_missing_events:
                log.warning(
                    "the profile of a step has no events of the GPU: there is no breakdown. Another profiler may be "
                    "active, or the machine forbid it; metrics.breakdown_interval = 0 turns profiling off"
                )
            self.has_told_of_missing_events = True
            return {}
        return breakdown(events, flight_records(started_ns), self.axis_of_group, self.pipeline_group)

    def _is_traced(self, n: int) -> bool:
        return self.traces is not None and n in self.traces.steps

    def _exchange(self, n: int, report: Reports) -> None:
        """Report to rank 0 about step `n`, and set `latest` and `next` to its conclusion."""
        began = time.perf_counter()
        reports = gather_records(report, self.host_group)
        conclusion: list[Any] = [None, 0]
        if dist.get_rank(self.host_group) == 0:
            conclusion = [self._conclude(n, reports[:, 0]), self._schedule(n, reports[:, 0])]
        # FOOTGUN: the ranks do not conclude each for itself. Different processors may round differently, and ranks that
        # disagreed on the next step to profile would wait for each other without end.
        dist.broadcast_object_list(conclusion, group=self.host_group, group_src=0)
        self.latest, self.next = conclusion
        self.exchange_seconds = time.perf_counter() - began

    def _conclude(self, n: int, reports: Reports) -> ProfiledStep | None:
        """Return the conclusion from the reports of all ranks on step `n`; None if no rank knows its parts."""
        are_known = ranks_with_parts(reports)
        slow = self._confirm(find_slow_rank(reports) if are_known.all() else None)
        parts = mean_parts(reports[are_known])
        return ProfiledStep(n, parts, slow) if parts else None

    def _confirm(self, slow: SlowRank | None) -> SlowRank | None:
        """Return the slow rank of this step if the steps before had the same one, `CONFIRMATIONS` in all."""
        changed = self.suspect is not None and slow is not None and slow.rank != self.suspect
        if slow is None or changed:  # it was chance
            self.suspect, self.suspicions = None, 0
            return None
        self.suspect = slow.rank
        self.suspicions += 1
        return slow if self.suspicions == CONFIRMATIONS else None

    def _schedule(self, n: int, reports: Reports) -> int:
        """Return the step to profile after `n`: the next while a suspect is unconfirmed, else by profiling's cost."""
        # The rank that reported last waited for no other: its time is the time of the exchange.
        self.cost += reports["cost"].max() + reports["exchange"].min()
        if 0 < self.suspicions < CONFIRMATIONS:
            return n + 1
        steps = max(1, math.ceil(self.cost / MAX_COST / reports["usual"].min()))
        self.suspect, self.suspicions, self.cost = None, 0, 0.0
        return self._next_allowed(n + steps)

    def _next_allowed(self, n: int) -> int:
        """Return the first step from `n` on that is a multiple of the interval."""
        return math.ceil(n / self.interval) * self.interval if self.interval else 0
