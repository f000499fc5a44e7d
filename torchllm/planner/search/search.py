"""Find the fastest layouts of a job without predicting them all. No torch.

It is a best-first search. One queue holds partly decided layouts, the least possible step time in front. The first is
decided one step further and its parts go back into the queue, until a whole layout comes out with its time predicted.
What needs more memory than a GPU has is rejected on the way.

    mesh, micro batch, recomputation, sequence and context parallelism -> schedule -> sharding -> memory -> time
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torchllm.planner.predict import Prediction, memory_of, predict
from torchllm.planner.search.bounds import Bounds, at_least
from torchllm.planner.search.layouts import DegreeMesh, Job, Layout, ShardingDegrees

Objective = Literal["tokens_per_second", "gpu_hours", "memory"]
"""memory: the least among layouts that take at most `SLOWER` times as long as the fastest"""
SLOWER = 1.05
CLOUD = 4000
"""number of layouts that are kept for a plot"""
ROUNDING = 1e-12
"""share by which a bound may exceed what it bounds, as sums are rounded"""
LOOKED_AT = 40
"""number of layouts that are predicted to find the near misses"""
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
    bounds: Bounds | None = None
    """what the search has computed, which makes another one of the same job faster"""


class Open(NamedTuple):
    """Layouts that agree in what is decided so far."""

    layout: Layout
    start: Layout
    """the layout without schedule and sharding"""
    decide: Callable[["Open"], None] | None
    """what comes next; None: it is predicted"""
    prediction: Prediction | None = None


class Search:
    """One search for the best `count` layouts, and for all that take at most `slower` times the fastest's step.

    Twins are left out: a layout that differs from a faster one in schedule and sharding only, and needs no less memory.
    bounds: of this job, or of one with other `fixed` keys or another memory.
    """

    def __init__(self, job: Job, count: int = 10, slower: float = 1.0, bounds: Bounds | None = None) -> None:
        self.job, self.count, self.slower = job, count, slower
        self.capacity = job.hardware.memory
        self.bounds = bounds.of(job) if bounds else Bounds(job)
        self.found = Found(bounds=self.bounds)
        self._least_memory: dict[Layout, float] = {}
        """of the best layouts with the same start"""
        self._missed: dict[tuple[object, ...], tuple[float, Layout]] = {}
        self._queue: list[tuple[float, float, int, Open]] = []
        self._numbers = itertools.count()

    def run(self) -> Found:
        """Return the best layouts, and what became of the others."""
        found, enough = self.found, 0.0
        for mesh in self.job.meshes:
            if reason := self.job.refusal(mesh):
                found.refused[reason] += 1
                continue
            found.layouts += self.job.count(mesh)
            for start in self.starts(mesh):
                self.push(self.bounds.shared(start), Open(start, start, self.schedules))
        while self._queue and not (len(found.best) >= self.count and self._queue[0][0] > enough):
            *_, node = heapq.heappop(self._queue)
            if node.decide:
                node.decide(node)
            elif node.prediction and not self.is_twin(node, node.prediction):
                self._least_memory[node.start] = node.prediction.memory.total
                found.best.append(Ranked(node.layout, node.prediction))
                enough = self.slower * found.best[0].prediction.step
        if rest := found.layouts - found.rejected[MEMORY] - len(found.best):
            found.rejected[SLOW] = rest
        self.near_misses()
        return found

    def push(self, least: float, node: Open) -> None:
        """Add a node to the queue. Of equal times what is open comes first, then what needs least memory."""
        memory = node.prediction.memory.total if node.prediction and not node.decide else 0.0
        if node.decide:  # a bound adds up in another order: rounded up, it would come after a twin of the same time
            least *= 1 - ROUNDING
        heapq.heappush(self._queue, (least, memory, next(self._numbers), node))

    def is_twin(self, node: Open, prediction: Prediction) -> bool:
        """Return whether one of the best differs in schedule and sharding only, and needs no more memory."""
        return prediction.memory.total >= self._least_memory.get(node.start, math.inf)

    def starts(self, mesh: DegreeMesh) -> Iterator[Layout]:
        """Yield the layouts of a mesh without schedule and sharding."""
        pp, data, cp, tp = mesh
        for size, mode, sp, method, ep in itertools.product(
            self.job.pieces(mesh),
            self.job.modes(mesh),
            self.job.sequence_parallel(mesh),
            self.job.context_methods(mesh),
            dict.fromkeys(sharding.ep for sharding in self.bounds.shardings(mesh)),
        ):
            yield Layout(pp, 1, data, cp, tp, "1F1B", 1, size, 0, mode, sp, method, ep)

    def schedules(self, node: Open) -> None:
        """Decide the pipeline's schedule."""
        mesh = mesh_of(node.start)
        shardings = [sharding for sharding in self.bounds.shardings(mesh) if sharding.ep == node.start.ep]
        tail = min(self.bounds.tail(sharded(node.start, sharding)) for sharding in shardings)
        for name, stages in self.job.schedules(mesh, node.start.micro_batch_size):
            layout = node.start._replace(schedule=name, virtual_stages=stages)
            smallest = sharded(layout, shardings[-1])  # shared by most ranks
            if (over := self.bounds.held(smallest) - self.capacity) > 0:
                self.reject(smallest, over, len(shardings))
            else:
                self.push(self.bounds.scheduled(layout) + tail, node._replace(layout=layout, decide=self.shardings))

    def shardings(self, node: Open) -> None:
        """Decide how weights, gradients and optimizer are sharded."""
        unsharded = self.bounds.scheduled(node.layout)
        for sharding in self.bounds.shardings(mesh_of(node.start)):
            if sharding.ep != node.start.ep:
                continue
            layout = sharded(node.layout, sharding)
            if (over := self.bounds.held(layout) - self.capacity) > 0:
                self.reject(layout, over)
            else:
                scheduled = self.bounds.scheduled(layout) if sharding.zero_stage >= 2 else unsharded
                self.push(scheduled + self.bounds.tail(layout), node._replace(layout=layout, decide=self.bounded))

    def bounded(self, node: Open) -> None:
        """Predict everything but the pipeline's simulation."""
        case = self.job.case(node.layout)
        if (over := memory_of(case, self.bounds.sizes(node.layout), 0).total - self.capacity) > 0:
            self.reject(node.layout, over)
            return
        prediction = predict(case, at_least)
        if len(self.found.cloud) < CLOUD:
            self.found.cloud.append((prediction.memory.total, prediction.mfu, prediction.fits))
        if prediction.fits:
            self.push(prediction.step, node._replace(decide=self.predicted, prediction=prediction))
        else:
            self.reject(node.layout, prediction.memory.total - self.capacity)

    def predicted(self, node: Open) -> None:
        """Predict the layout in full."""
        if node.prediction and not self.is_twin(node, node.prediction):
            prediction = predict(self.job.case(node.layout))
            self.push(prediction.step, node._replace(decide=None, prediction=prediction))

    def reject(self, layout: Layout, over: float, count: int = 1) -> None:
        """Count `count` layouts that do not fit, and remember the closest miss."""
        self.found.rejected[MEMORY] += count
        key = layout.pp, layout.cp, layout.tp, layout.micro_batch_size, layout.recompute
        if key not in self._missed or over < self._missed[key][0]:
            self._missed[key] = over, layout

    def near_misses(self) -> None:
        """Keep three different misses that would be faster than the best, the closest first."""
        best, kinds = self.found.best, set[object]()
        misses = []
        for _, layout in sorted(self._missed.values())[:LOOKED_AT]:
            prediction = predict(self.job.case(layout), at_least)
            misses.append(Miss(layout, prediction, prediction.memory.total - self.capacity))
        misses.sort(key=lambda miss: miss.over)
        if not best:
            self.found.least = misses[0] if misses else None
            return
        fastest = best[0].prediction.step
        for miss in misses:
            kind = miss.layout.tp, miss.layout.recompute, miss.layout.micro_batch_size
            if miss.prediction.step >= fastest or kind in kinds or len(kinds) == 3:
                continue
            prediction = predict(self.job.case(miss.layout))
            if prediction.step < fastest:
                kinds.add(kind)
                self.found.misses.append(miss._replace(prediction=prediction))


def mesh_of(layout: Layout) -> DegreeMesh:
    """Return the mesh of a layout."""
    return DegreeMesh(layout.pp, layout.data_ranks, layout.cp, layout.tp)


def sharded(layout: Layout, sharding: ShardingDegrees) -> Layout:
    """Return the layout with another sharding."""
    return layout._replace(**sharding._asdict())


def search(
    job: Job, count: int = 10, objective: Objective = "tokens_per_second", bounds: Bounds | None = None
) -> Found:
    """Return the best `count` layouts. For one number of GPUs, most tokens per second means least GPU-hours too.

    bounds: of a job that differs in `fixed` and memory at most; the more often they are used, the faster is a search.
    """
    if objective != "memory":
        return Search(job, count, bounds=bounds).run()
    found = Search(job, count, slower=SLOWER, bounds=bounds).run()
    found.best = sorted(found.best, key=lambda one: (one.prediction.memory.total, one.prediction.step))[:count]
    return found
