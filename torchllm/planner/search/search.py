"""The fastest layouts of a job, found without predicting them all. No torch.

Best first: what is still open is in one queue, the least possible step time in front. What comes out of it is decided
a little further and its parts go back in, until a whole layout comes out with its time predicted: none that is left can
be faster. What needs too much memory at the least is left out, whole groups at once.

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
"""memory: the least among the layouts that are at most `SLOWER` slower than the fastest"""
SLOWER = 1.05
CLOUD = 4000
"""layouts that are remembered for a plot"""
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
    """bytes that are missing"""


@dataclass
class Found:
    """What a search comes to."""

    best: list[Ranked] = field(default_factory=list)
    """best first"""
    misses: list[Miss] = field(default_factory=list)
    """of the layouts that would be faster than the best but do not fit those that miss by least"""
    least: Miss | None = None
    """where nothing fits: what comes closest"""
    layouts: int = 0
    """that the config accepts"""
    rejected: Counter[str] = field(default_factory=Counter)
    """of these, by reason"""
    refused: Counter[str] = field(default_factory=Counter)
    """meshes (pp x data x cp x tp) of which the config accepts no layout, by reason"""
    cloud: list[tuple[float, float, bool]] = field(default_factory=list)
    """bytes, MFU at best, whether it fits, of the layouts that were looked at one by one"""


class Open(NamedTuple):
    """Layouts that agree in what is decided so far; the rest of `layout` is what costs least time."""

    layout: Layout
    mesh: DegreeMesh
    decided: int
    """steps of `Search.run`"""
    tail: float = 0.0
    """bound of what its sharding costs at a step's end"""
    prediction: Prediction | None = None


class Search:
    """One search. `count`: how many layouts are wanted; `slower`: and all of up to so many times the fastest's step."""

    def __init__(self, job: Job, count: int = 10, slower: float = 1.0) -> None:
        self.job, self.count, self.slower = job, count, slower
        self.bounds = Bounds(job)
        self.found = Found()
        self._missed: dict[tuple[object, ...], tuple[float, Layout]] = {}
        self._queue: list[tuple[float, int, Open]] = []
        self._pushed = 0

    def run(self) -> Found:
        """The best layouts, and what became of the others."""
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
        """Into the queue."""
        self._pushed += 1  # of equals the first
        heapq.heappush(self._queue, (least, self._pushed, node))

    def starts(self, mesh: DegreeMesh) -> Iterator[Layout]:
        """All that is not decided costs nothing: no sharding, no recomputation."""
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
        """Decide the order of the pipeline."""
        layout, mesh, bounds = node.layout, node.mesh, self.bounds
        for order in bounds.orders(layout, mesh):
            part = layout._replace(schedule=order.schedule, virtual_stages=order.virtual_stages)
            fitting, over = bounds.cheapest(part, mesh, order)
            if over <= 0:
                self.push(bounds.work(fitting), Open(part, mesh, 2))
            else:
                self.reject(part, mesh, over, len(bounds.shardings(mesh)))

    def shardings(self, node: Open) -> None:
        """Decide what is shared among how many."""
        layout, mesh, bounds = node.layout, node.mesh, self.bounds
        work, beside = bounds.work(layout), bounds.memory(layout, mesh)
        shardings = bounds.shardings(mesh)
        for at, sharding in enumerate(shardings):
            replicate, shard, zero = sharding.degrees
            part = layout._replace(dp_replicate=replicate, dp_shard=shard, zero_stage=zero)
            if (over := beside + sharding.standing - self.job.hardware.memory) > 0:
                self.reject(part, mesh, over, 1)
                self.found.rejected[MEMORY] += len(shardings) - at - 1  # that need more
                break
            self.push(work + sharding.tail, Open(part, mesh, 3, sharding.tail))

    def gathers(self, node: Open) -> None:
        """Nothing is left to decide: add what waits for weights and gradients."""
        self.push(self.bounds.work(node.layout) + node.tail, node._replace(decided=4))

    def bounded(self, node: Open) -> None:
        """Predict all but the order of the pipeline."""
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
        """Predict."""
        prediction = predict(self.job.case(node.layout))
        self.push(prediction.step, node._replace(decided=6, prediction=prediction))

    def reject(self, layout: Layout, mesh: DegreeMesh, over: float, count: int) -> None:
        """So many layouts do not fit: of those remember the smallest, for it may miss by little."""
        self.found.rejected[MEMORY] += count
        key = (layout.pp, layout.cp, layout.tp, layout.micro_batch_size, layout.recompute)
        if over < self._missed.get(key, (math.inf,))[0]:
            if count > 1:
                layout = layout._replace(dp_replicate=1, dp_shard=mesh.data, zero_stage=3)
            self._missed[key] = (over, layout)

    def near_misses(self) -> None:
        """Of what is remembered what would be faster than the best, closest first; three that differ."""
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
    """The best `count` layouts. With one number of GPUs most tokens a second and least GPU-hours are the same."""
    if objective != "memory":
        return Search(job, count).run()
    found = Search(job, count, slower=SLOWER).run()
    found.best = sorted(found.best, key=lambda one: (one.prediction.memory.total, one.prediction.step))[:count]
    return found
