"""Find the fastest layouts of a job without predicting them all. No torch.

It is a best-first search. One queue holds partly decided layouts, the least possible step time in front. The first is
decided one step further and its parts go back into the queue, until a whole layout comes out with its time predicted.
Groups whose lower bound of memory exceeds a GPU's are rejected at once.

    mesh, micro batch, sequence and context parallelism -> recomputation -> schedule -> sharding -> memory -> time
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torchllm.planner.predict import Prediction, memory_of, predict
from torchllm.planner.search.bounds import Bounds, at_least
from torchllm.planner.search.layouts import DegreeMesh, Job, Layout

Objective = Literal["tokens_per_second", "gpu_hours", "memory"]
"""memory: the least among layouts that take at most `SLOWER` times as long as the fastest"""
SLOWER = 1.05
CLOUD = 4000
"""number of layouts that are kept for a plot"""
MEMORY, SLOW = "more memory than a GPU has", "slower than those shown"


class Ranked(NamedTuple):
    """A layout and what it is predicted to cost."""

    layout: Layout
    prediction: Prediction


class Miss(NamedTuple):
    """A layout that would be faster than the best, but does not fit."""

    layout: Layout
    prediction: Prediction
    over: float
    """missing bytes"""


@dataclass
class Found:
    """The result of a search."""

    best: list[Ranked] = field(default_factory=list)
    """best first"""
    misses: list[Miss] = field(default_factory=list)
    """of the layouts that would be faster than the best but do not fit, those that miss by the fewest bytes"""
    least: Miss | None = None
    """the closest miss, if nothing fits"""
    layouts: int = 0
    """number of layouts that the config accepts"""
    rejected: Counter[str] = field(default_factory=Counter)
    """number of these that were rejected, by reason"""
    refused: Counter[str] = field(default_factory=Counter)
    """number of meshes (pp x data x cp x tp) without a valid layout, by reason"""
    cloud: list[tuple[float, float, bool]] = field(default_factory=list)
    """bytes, upper bound of MFU, whether it fits, of the layouts that were predicted one by one"""


class Open(NamedTuple):
    """Layouts that agree in what is decided so far; what is open in `layout` has the values that cost least time."""

    layout: Layout
    mesh: DegreeMesh
    decided: int
    """steps of `Search.run`"""
    tail: float = 0.0
    """bound of what its sharding costs at the end of a step"""
    prediction: Prediction | None = None


class Search:
    """One search for the best `count` layouts, and for all that take at most `slower` times the fastest's step."""

    def __init__(self, job: Job, count: int = 10, slower: float = 1.0) -> None:
        self.job, self.count, self.slower = job, count, slower
        self.bounds = Bounds(job)
        self.found = Found()
        self._missed: dict[tuple[object, ...], tuple[float, Layout]] = {}
        self._queue: list[tuple[float, int, Open]] = []
        self._pushed = 0

    def run(self) -> Found:
        """Return the best layouts, and what became of the others."""
        found, enough = self.found, 0.0
        steps = self.recomputations, self.schedules, self.shardings, self.gathers, self.bounded, self.predicted
        for mesh in self.job.meshes:
            if reason := self.job.refusal(mesh):
                found.refused[reason] += 1
                continue
            found.layouts += self.job.count(mesh)
            for layout in self.starts(mesh):
                self.push(self.bounds.work(layout, False), Open(layout, mesh, 0))
        while self._queue and not (len(found.best) >= self.count and self._queue[0][0] > enough):
            _, _, node = heapq.heappop(self._queue)
            if node.prediction is None:
                steps[node.decided](node)
                continue
            found.best.append(Ranked(node.layout, node.prediction))
            enough = self.slower * found.best[0].prediction.step
        if rest := found.layouts - found.rejected[MEMORY] - len(found.best):
            found.rejected[SLOW] = rest
        self.near_misses()
        return found

    def push(self, least: float, node: Open) -> None:
        """Add a node to the queue."""
        self._pushed += 1  # of equal bounds the first comes out first
        heapq.heappush(self._queue, (least, self._pushed, node))

    def starts(self, mesh: DegreeMesh) -> Iterator[Layout]:
        """Yield layouts in which everything undecided costs nothing: no sharding, no recomputation."""
        pp, data, cp, tp = mesh
        for size in self.job.pieces(mesh):
            for sp in self.job.sequence_parallel(mesh):
                for method in self.job.context_methods(mesh):
                    yield Layout(
                        pp, data, 1, cp, tp, micro_batch_size=size, zero_stage=0, sequence_parallel=sp, cp_method=method
                    )

    def recomputations(self, node: Open) -> None:
        """Decide what is recomputed."""
        layout, mesh, bounds = node.layout, node.mesh, self.bounds
        smallest, orders = bounds.smallest(layout, mesh), bounds.orders(layout, mesh)
        for mode in self.job.modes(mesh):
            part = layout._replace(recompute=mode)
            fitting, over = bounds.cheapest(part, mesh, smallest)
            if over <= 0:
                self.push(bounds.work(fitting, False), Open(part, mesh, 1))
            else:
                part = part._replace(schedule=smallest.schedule, virtual_stages=smallest.virtual_stages)
                self.reject(part, mesh, over, len(orders) * len(bounds.shardings(mesh)))

    def schedules(self, node: Open) -> None:
        """Decide the pipeline's schedule."""
        layout, mesh, bounds = node.layout, node.mesh, self.bounds
        for order in bounds.orders(layout, mesh):
            part = layout._replace(schedule=order.schedule, virtual_stages=order.virtual_stages)
            fitting, over = bounds.cheapest(part, mesh, order)
            if over <= 0:
                self.push(bounds.work(fitting), Open(part, mesh, 2))
            else:
                self.reject(part, mesh, over, len(bounds.shardings(mesh)))

    def shardings(self, node: Open) -> None:
        """Decide how weights, gradients and optimizer are sharded."""
        layout, mesh, bounds = node.layout, node.mesh, self.bounds
        work, beside = bounds.work(layout), bounds.memory(layout, mesh)
        shardings = bounds.shardings(mesh)
        for at, sharding in enumerate(shardings):
            part = layout._replace(**sharding.degrees._asdict())
            if (over := beside + sharding.standing - self.job.hardware.memory) > 0:
                self.reject(part, mesh, over, 1)
                self.found.rejected[MEMORY] += len(shardings) - at - 1  # the rest need more
                break
            self.push(work + sharding.tail, Open(part, mesh, 3, sharding.tail))

    def gathers(self, node: Open) -> None:
        """Add the time of gathering weights and gradients, which the bound lacked while the sharding was open."""
        self.push(self.bounds.work(node.layout) + node.tail, node._replace(decided=4))

    def bounded(self, node: Open) -> None:
        """Predict everything but the pipeline's simulation."""
        case, sizes = self.job.case(node.layout), self.bounds.stages(node.layout)
        held = max(memory_of(case, sizes, rank).total for rank in {0, node.layout.pp - 1})
        if held > self.job.hardware.memory:
            self.reject(node.layout, node.mesh, held - self.job.hardware.memory, 1)
            return
        prediction = predict(case, at_least)
        if len(self.found.cloud) < CLOUD:
            self.found.cloud.append((prediction.memory.total, prediction.mfu, prediction.fits))
        if prediction.fits:
            self.push(prediction.step, node._replace(decided=5))
        else:
            self.reject(node.layout, node.mesh, prediction.memory.total - self.job.hardware.memory, 1)

    def predicted(self, node: Open) -> None:
        """Predict the layout in full."""
        prediction = predict(self.job.case(node.layout))
        self.push(prediction.step, node._replace(decided=6, prediction=prediction))

    def reject(self, layout: Layout, mesh: DegreeMesh, over: float, count: int) -> None:
        """Count `count` layouts that do not fit, and remember the closest miss."""
        self.found.rejected[MEMORY] += count
        key = (layout.pp, layout.cp, layout.tp, layout.micro_batch_size, layout.recompute)
        if over < self._missed.get(key, (math.inf,))[0]:
            if count > 1:
                layout = layout._replace(dp_replicate=1, dp_shard=mesh.data, zero_stage=3)
            self._missed[key] = (over, layout)

    def near_misses(self) -> None:
        """Keep three different misses that would be faster than the best, the closest first."""
        best, seen = self.found.best, set[object]()
        for _, layout in sorted(self._missed.values())[:40]:
            prediction = predict(self.job.case(layout), at_least)
            miss = Miss(layout, prediction, prediction.memory.total - self.job.hardware.memory)
            if not best:
                self.found.least = min(self.found.least or miss, miss, key=lambda one: one.over)
                continue
            kind = (layout.tp, layout.recompute, layout.micro_batch_size)
            if prediction.step >= best[0].prediction.step or miss.over <= 0 or kind in seen or len(seen) == 3:
                continue
            if (exact := predict(self.job.case(layout))).step < best[0].prediction.step:
                seen.add(kind)
                self.found.misses.append(miss._replace(prediction=exact))


def search(job: Job, count: int = 10, objective: Objective = "tokens_per_second") -> Found:
    """Return the best `count` layouts. For one number of GPUs, most tokens per second means least GPU-hours too."""
    if objective != "memory":
        return Search(job, count).run()
    found = Search(job, count, slower=SLOWER).run()
    found.best = sorted(found.best, key=lambda one: (one.prediction.memory.total, one.prediction.step))[:count]
    return found
