"""Watches where the time goes: profiles a step now and then, on all ranks at once; names who is slow and what waits.

Between profiled steps only the host's clock is read. A profiled one is split by `breakdown`, every rank's parts are
gathered, and rank 0 logs their mean, beside what the planner expected. Cost: reading the profile, and a slower step;
steps are profiled so seldom that it stays under `COST` of the run.

A rank is slow if it works, rather than waits for others, `SLOW` times as long as the median of the ranks that hold the
same pipeline stages, in `CONFIRMED` profiled steps in a row: after a first one the very next steps are profiled.
"""

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import mean, median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from torchllm.metrics.breakdown import ASIDE, COMPUTING, split
from torchllm.metrics.trace import Traces
from torchllm.parallel.mesh import Mesh
from torchllm.runtime.phase import phase
from torchllm.runtime.torch_compat import flight_records, profiled_events

COST = 0.01
"""share of the run's time that profiling may take"""
SLOW = 1.25
"""times the median of a rank's peers"""
CONFIRMED = 4
"""profiled steps in a row in which a rank must be the slowest: once is chance"""
NOTICEABLE = 0.05
"""share of a step under which a delay is nobody's"""

Parts = Mapping[str, float]


class Slow(NamedTuple):
    """A rank that holds up others."""

    rank: int
    host: str
    part: str
    """what it spends more time on than its peers"""
    seconds: float
    peers: float
    """seconds of that part, the median of its peers"""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) is slow: {self.part} {self.seconds:.3g} s, its peers' {self.peers:.3g} s"
        )


class Told(NamedTuple):
    """What a rank tells the others of its profiled step."""

    parts: Parts
    cost: float
    """seconds that this step took longer than one that is not profiled, all included"""
    usual: float
    """seconds of such a one"""
    peers: int
    """ranks with the same number do the same work"""
    host: str


class Profiled(NamedTuple):
    """A profiled step, the same on all ranks."""

    step: int
    parts: dict[str, float]
    """seconds, the mean over ranks; they add up to the step"""
    slow: Slow | None
    """found in `CONFIRMED` profiled steps in a row, this the last"""

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.parts.values())

    def text(self, mfu: float | None, planned: float | None) -> str:
        """In a line: the parts, largest first, and what the largest wait costs. mfu: of this step."""
        shares = sorted(((part / self.seconds, name) for name, part in self.parts.items()), reverse=True)
        line = f"step {self.step}, {self.seconds:.3g} s: " + ", ".join(f"{n} {s:.1%}" for s, n in shares if s >= 0.001)
        if mfu is None:
            return line
        line += f"; MFU {mfu:.1%} measured"
        if planned is not None:
            line += f", {planned:.1%} planned"
        lost = [(mfu / (1 - s) - mfu, name) for s, name in shares if name not in COMPUTING and s < 1]
        points, name = max(lost)
        return f"{line}; {100 * points:.1f} points are {name}"


class Watch:
    """Every rank has one. `interval`: steps between profiled ones at the least; 0: none but those of `traces`.

    `start`: steps that were done before; the first after it is like no other, and is not profiled.
    """

    def __init__(
        self,
        interval: int,
        mesh: Mesh,
        host_group: dist.ProcessGroup,
        device: torch.device,
        traces: Traces | None = None,
        start: int = 0,
    ) -> None:
        self.interval, self.host_group, self.traces = interval, host_group, traces
        self.axes = {group: axis.name for group, axis in mesh.axis_of_group.items()} | {host_group.group_name: "host"}
        self.pipeline = mesh.pp.get_group().group_name
        self.peers = mesh.world.get_local_rank(0)
        self.activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self.next, self.cost = self._due(start + 2), 0.0
        self.others: deque[float] = deque(maxlen=32)
        """seconds of the steps that were not profiled"""
        self.suspects: list[int] = []
        self.latest: Profiled | None = None
        if interval or (traces is not None and traces.steps):
            with profile(activities=self.activities):  # the first one takes a second to start
                pass

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """Around all that the loop does in step `n`; `latest` is that step afterwards, if it was profiled."""
        self.latest = None
        traced = self.traces is not None and n in self.traces.steps
        if not traced and (not self.interval or n < self.next):
            begun = time.perf_counter()
            yield
            self.others.append(time.perf_counter() - begun)
            return
        before = time.perf_counter()
        profiler = profile(activities=self.activities)
        profiler.start()
        begun, since = time.perf_counter(), time.time_ns()
        try:
            with phase("step"):
                yield
                if ProfilerActivity.CUDA in self.activities:
                    torch.cuda.synchronize()
        finally:
            ended = time.perf_counter()
            profiler.stop()
        parts = split(profiled_events(profiler), flight_records(since), self.axes, self.pipeline)
        aside = parts["evaluate"] + parts["checkpoint"]  # no step's own, and not the profile's fault
        usual = min(median(self.others or [math.inf]), ended - begun - aside)
        cost = time.perf_counter() - before - aside - usual
        mine = Told(parts, cost, usual, self.peers, os.uname().nodename)
        theirs = [mine] * dist.get_world_size(self.host_group)
        dist.all_gather_object(theirs, mine, group=self.host_group)
        self.latest = self._concluded(n, theirs)
        if self.traces is not None and traced:
            self.traces.keep(n, profiler, self.latest.parts)

    def _due(self, n: int) -> int:
        """The first step from `n` on that the interval allows."""
        return math.ceil(n / self.interval) * self.interval if self.interval else 0

    def _concluded(self, n: int, ranks: Sequence[Told]) -> Profiled:
        names = {name: None for of in ranks for name in of.parts}
        means = {name: mean(of.parts.get(name, 0.0) for of in ranks) for name in names}
        worst = slowest([of.parts for of in ranks], [of.peers for of in ranks])
        slow = None
        if worst is None or (self.suspects and worst[0] != self.suspects[0]):
            self.suspects = []  # now another: it was chance
        else:
            rank, part, seconds, others = worst
            self.suspects.append(rank)
            if len(self.suspects) == CONFIRMED:
                slow = Slow(rank, ranks[rank].host, part, seconds, others)
        profiled = Profiled(n, means, slow)
        self.cost += max(of.cost for of in ranks)
        if 0 < len(self.suspects) < CONFIRMED:
            self.next = n + 1
        else:
            steps = max(1, math.ceil(self.cost / COST / min(of.usual for of in ranks)))
            self.next = self._due(n + steps)
            self.suspects, self.cost = [], 0.0
        return profiled


def slowest(ranks: Sequence[Parts], peers: Sequence[int]) -> tuple[int, str, float, float] | None:
    """The rank that is slow, the part in which, and the seconds of it there and on its peers; None: none is.

    ranks: parts of each; peers: ranks with the same number do the same work.
    """
    found = []
    for rank, parts in enumerate(ranks):
        same = [ranks[other] for other, number in enumerate(peers) if number == peers[rank] and other != rank]
        usual = median([_work(other) for other in same]) if same else math.inf
        late = _work(parts) - usual
        if _work(parts) > SLOW * usual and late > NOTICEABLE * sum(parts.values()):
            found.append((late, rank, same))
    if not found:
        return None
    _, rank, same = max(found)
    excess = {name: seconds - median(other.get(name, 0.0) for other in same) for name, seconds in _own(ranks[rank])}
    part = max(excess, key=lambda name: excess[name])
    return rank, part, ranks[rank][part], ranks[rank][part] - excess[part]


def _own(parts: Parts) -> list[tuple[str, float]]:
    aside = [name for name in ASIDE if name != "data"]
    return [(name, s) for name, s in parts.items() if not name.startswith(("exposed", "bubble")) and name not in aside]


def _work(parts: Parts) -> float:
    return sum(seconds for _, seconds in _own(parts))
