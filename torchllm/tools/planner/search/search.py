"""Find the fastest layouts of a job without predicting them all. No torch.

It is a best-first search. One queue holds partly decided layouts, the least possible step time in front. The first is
decided one step further and its parts go back into the queue, until a whole layout comes out with its time predicted.
Groups that need more memory than a GPU has are rejected on the way.

    mesh, micro batch, sequence and context parallelism -> recomputation -> schedule -> sharding -> memory -> time
"""

import gc
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, NamedTuple

from torchllm.tools.planner.predict import Prediction, predict
from torchllm.tools.planner.search.bounds import Bounds, at_least
from torchllm.tools.planner.search.layouts import DegreeMesh, Job, Layout, ShardingDegrees

Objective = Literal["tokens_per_second", "gpu_hours", "memory"]
"""memory: the least among layouts that take at most `SLOWER` times as long as the fastest"""
SLOWER = 1.05
ROUNDING = 1e-12
"""relative rounding error of sums: a bound may exceed the exact value by it"""
LOOKED_AT = 40
"""number of layouts that are predicted to find the closest miss"""
NEARLY = 0.25
"""memory that near misses may need beyond a GPU's, as a share of it"""
NEAR_MISSES = 3
"""number of near misses that are shown"""
MEMORY, HOST_MEMORY, SLOW = "more memory than a GPU has", "more memory than its host has", "slower than those shown"


class Ranked(NamedTuple):
    """A layout and its predicted cost."""

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
    """different layouts that would be faster than the best but nearly fit, those that miss by the fewest bytes first"""
    closest_miss: Miss | None = None
    """the miss by the fewest bytes, if nothing fits"""
    layouts: int = 0
    """number of layouts that the config accepts"""
    rejected: Counter[str] = field(default_factory=Counter)
    """number of these that were rejected, by reason"""
    refused: Counter[str] = field(default_factory=Counter)
    """number of meshes (pp x data x cp x tp) without a valid layout, by reason"""
    bounds: Bounds | None = None
    """intermediate results of the search, which make another search of the same job faster"""


class Open(NamedTuple):
    """Layouts that agree in all settings decided so far."""

    layout: Layout
    start: Layout
    """the layout without schedule and sharding"""
    decide: Callable[["Open"], None] | None
    """the next step; None: the layout is predicted"""
    prediction: Prediction | None = None


class Rejection(NamedTuple):
    """The layout of a kind that misses by the fewest bytes."""

    over: float
    """missing bytes"""
    layout: Layout


class Search:
    """One search for the best `count` layouts, and for all that take at most `slower` times the fastest's step.

    Twins are left out: a layout that differs from a faster one in schedule and sharding only, and needs no less memory;
    and one that splits sequences over cp ranks which could as well have whole ones.
    bounds: of this job, or of one with other `fixed` keys or another memory. below: seconds of a step; layouts that
    take as long are not looked for.
    """

    def __init__(
        self,
        job: Job,
        count: int = 10,
        slower: float = 1.0,
        bounds: Bounds | None = None,
        below: float = math.inf,
    ) -> None:
        self.job, self.count, self.slower, self.below = job, count, slower, below
        self.capacity = job.hardware.memory
        self.bounds = bounds.for_job(job) if bounds else Bounds(job)
        self.outcome = Found(bounds=self.bounds)
        self._least_memory: dict[Layout, float] = {}
        """bytes of the smallest of the best layouts that have the same start"""
        self._rejections: dict[tuple[object, ...], Rejection] = {}
        self.shardings = cache(self._shardings_of)
        self.least_tail = cache(self._least_tail_of)
        self._queue: list[tuple[float, float, int, Open]] = []
        self._numbers = itertools.count()

    def run(self) -> Found:
        """Return the best layouts, the fate of the others, and near misses."""
        self.find_best()
        self.find_near_misses()
        return self.outcome

    def find_best(self) -> Found:
        """Return the best layouts, and the fate of the others."""
        was_on = gc.isenabled()
        gc.disable()  # to look for cycles among millions of tuples, which have none, takes a quarter of the time
        try:
            self.take_from_queue()
        finally:
            if was_on:
                gc.enable()
        if not self.outcome.best:  # twins, which are not looked at, need no less memory
            self.outcome.rejected[MEMORY] = self.outcome.layouts - self.outcome.rejected[HOST_MEMORY]
        slow = self.outcome.layouts - self.outcome.rejected.total() - len(self.outcome.best)
        if slow:
            self.outcome.rejected[SLOW] = slow
        return self.outcome

    def take_from_queue(self) -> None:
        """Decide the layouts in front, until the best are found."""
        self.open_meshes()
        while self._queue and not self.is_done():
            *_, node = heapq.heappop(self._queue)
            if node.decide:
                node.decide(node)
            elif node.prediction and not self.is_twin(node, node.prediction):
                self._least_memory[node.start] = node.prediction.memory.total
                self.outcome.best.append(Ranked(node.layout, node.prediction))

    def open_meshes(self) -> None:
        """Put the starts of all meshes into the queue."""
        for mesh in self.job.meshes:
            reason = self.job.refusal(mesh)
            if reason:
                self.outcome.refused[reason] += 1
                continue
            self.outcome.layouts += self.job.count(mesh)
            for start in self.starts(mesh):
                self.push(self.bounds.shared(start), Open(start, start, self.decide_recomputation))

    def is_done(self) -> bool:
        """Return whether all others take at least `below` seconds, or are too slow compared to the layouts found."""
        best = self.outcome.best
        least_seconds = self._queue[0][0]
        if least_seconds >= self.below:
            return True
        if len(best) < self.count:
            return False
        return least_seconds > self.slower * best[0].prediction.step

    def push(self, seconds: float, node: Open) -> None:
        """Add a node that takes at least `seconds` to the queue.

        Among equal times, undecided nodes come first, then the least memory.
        """
        memory = 0.0
        if node.decide:  # a bound adds up in another order: rounded up, it would come after a twin of the same time
            seconds *= 1 - ROUNDING
        elif node.prediction:
            memory = node.prediction.memory.total
        heapq.heappush(self._queue, (seconds, memory, next(self._numbers), node))

    def is_twin(self, node: Open, prediction: Prediction) -> bool:
        """Return whether one of the best differs in schedule and sharding only, and needs no more memory."""
        return prediction.memory.total >= self._least_memory.get(node.start, math.inf)

    def starts(self, mesh: DegreeMesh) -> Iterator[Layout]:
        """Yield the layouts of a mesh without schedule and sharding, with the recomputation that takes least time."""
        recompute = self.job.modes(mesh)[0]  # "none", unless the run sets it
        on_mesh = Layout(mesh.pp, 1, mesh.data, mesh.cp, mesh.tp, virtual_stages=1, zero_stage=0, recompute=recompute)
        pieces = [size for size in self.job.pieces(mesh) if self.job.needs_context_parallelism(mesh, size)]
        expert_degrees = dict.fromkeys(sharding.ep for sharding in self.job.shardings(mesh))
        for sp in self.job.sequence_parallel(mesh):
            for method in self.job.context_methods(mesh):
                for ep in expert_degrees:
                    start = on_mesh._replace(sequence_parallel=sp, cp_method=method, ep=ep)
                    for size in pieces:
                        yield start._replace(micro_batch_size=size)

    def decide_recomputation(self, node: Open) -> None:
        """Decide the mode of recomputation."""
        for mode in self.job.modes(mesh_of(node.start)):
            start = node.start._replace(recompute=mode)
            self.open_mode(start._replace(regather=self.job.regather(start)[0]))

    def open_mode(self, start: Layout) -> None:
        """Put a start whose recomputation is decided into the queue, if some sharding of it may fit."""
        mesh = mesh_of(start)
        shardings = self.shardings(mesh, start.ep)
        smallest = sharded(start, shardings[-1])  # shared by most ranks
        over = self.bounds.shared_memory(smallest) - self.capacity
        if over > 0:
            schedules = self.job.schedules(mesh, start.micro_batch_size)
            schedule, virtual_stages = schedules[0]
            smallest = smallest._replace(schedule=schedule, virtual_stages=virtual_stages)
            self.reject(smallest, over, len(schedules) * len(shardings))
            if again := self.regathered(start, over):
                self.open_mode(again)
        else:
            self.push(self.bounds.shared(start), Open(start, start, self.decide_schedule))

    def decide_schedule(self, node: Open) -> None:
        """Decide the pipeline's schedule."""
        mesh = mesh_of(node.start)
        shardings = self.shardings(mesh, node.start.ep)
        smallest = sharded(node.start, shardings[-1])  # shared by most ranks
        for schedule, virtual_stages in self.job.schedules(mesh, node.start.micro_batch_size):
            layout = node.start._replace(schedule=schedule, virtual_stages=virtual_stages)
            smallest = smallest._replace(schedule=schedule, virtual_stages=virtual_stages)
            over = self.bounds.standing(smallest) + self.bounds.in_flight(layout) - self.capacity
            if over > 0:
                self.reject(smallest, over, len(shardings))
                self.gather_again(node._replace(layout=layout), over, self.decide_sharding)
            else:
                seconds = self.bounds.scheduled(layout) + self.least_tail(mesh, node.start.ep)
                self.push(seconds, node._replace(layout=layout, decide=self.decide_sharding))

    def _shardings_of(self, mesh: DegreeMesh, ep: int) -> list[ShardingDegrees]:
        """Return the shardings with this degree of expert parallelism, the one that needs least memory last."""
        return [sharding for sharding in self.job.shardings(mesh) if sharding.ep == ep]

    def _least_tail_of(self, mesh: DegreeMesh, ep: int) -> float:
        """Return a bound of the seconds at the end of a step, of all shardings."""
        layout = Layout(mesh.pp, 1, mesh.data, mesh.cp, mesh.tp)
        return min(self.bounds.tail(sharded(layout, sharding)) for sharding in self.shardings(mesh, ep))

    def decide_sharding(self, node: Open) -> None:
        """Decide how weights, gradients and optimizer are sharded. ZeRO stages 2 and 3 also send meanwhile."""
        seconds = self.bounds.scheduled(node.layout)
        in_flight = self.bounds.in_flight(node.layout)
        for sharding in self.shardings(mesh_of(node.start), node.start.ep):
            layout = sharded(node.layout, sharding)
            over = self.bounds.standing(layout) + in_flight - self.capacity
            if over > 0:
                self.reject(layout, over)
                self.gather_again(node._replace(layout=layout), over, self.check_memory)
                continue
            decide = self.add_gathers if sharding.zero_stage >= 2 else self.check_memory
            self.push(seconds + self.bounds.tail(layout), node._replace(layout=layout, decide=decide))

    def add_gathers(self, node: Open) -> None:
        """Bound the time again, with the communication while blocks compute."""
        seconds = self.bounds.scheduled(node.layout) + self.bounds.tail(node.layout)
        self.push(seconds, node._replace(decide=self.check_memory))

    def check_memory(self, node: Open) -> None:
        """Predict everything but the pipeline's simulation."""
        over = self.bounds.needed(node.layout) - self.capacity
        if over > 0:
            self.reject(node.layout, over)
            self.gather_again(node, over, self.check_memory)
            return
        prediction = predict(self.job.case(node.layout), at_least)
        if prediction.fits:
            self.push(prediction.step, node._replace(decide=self.simulate, prediction=prediction))
        elif not prediction.has_room_on_host and prediction.memory.total <= self.capacity:
            self.count_rejected(HOST_MEMORY, node.layout)
        else:
            over = prediction.memory.total - self.capacity
            self.reject(node.layout, over)
            self.gather_again(node, over, self.check_memory)

    def gather_again(self, node: Open, over: float, decide: Callable[[Open], None]) -> None:
        """Put the layout of a node into the queue with inputs that are gathered again: it is `over` bytes too large.

        That frees memory and takes longer: where a layout fits without, it is not looked at.
        """
        if again := self.regathered(node.layout, over):
            start = node.start._replace(regather=True)
            seconds = self.bounds.scheduled(again)
            self.push(seconds, node._replace(start=start, layout=again, decide=decide, prediction=None))

    def regathered(self, layout: Layout, over: float) -> Layout | None:
        """Return the layout with inputs that are gathered again; None if that is ruled out, or frees too little."""
        if layout.regather or True not in self.job.regather(layout):
            return None
        is_enough = over <= self.bounds.freed_by_regather(layout) * (self.capacity + over)  # of all that it needs
        return layout._replace(regather=True) if is_enough else None

    def simulate(self, node: Open) -> None:
        """Predict the layout in full."""
        if node.prediction and not self.is_twin(node, node.prediction):
            prediction = predict(self.job.case(node.layout))
            self.push(prediction.step, node._replace(decide=None, prediction=prediction))

    def reject(self, layout: Layout, over: float, count: int = 1) -> None:
        """Count `count` layouts that do not fit, and remember the closest miss of each kind."""
        self.count_rejected(MEMORY, layout, count)
        kind = layout.pp, layout.cp, layout.tp, layout.micro_batch_size, layout.recompute
        closest = self._rejections.get(kind)
        if closest is None or over < closest.over:
            self._rejections[kind] = Rejection(over, layout)

    def count_rejected(self, reason: str, layout: Layout, count: int = 1) -> None:
        """Count `count` layouts that are rejected for a reason."""
        if layout.regather == self.job.regather(layout)[0]:  # else it is counted without
            self.outcome.rejected[reason] += count

    def find_near_misses(self) -> None:
        """Keep layouts that would be faster than the best and nearly fit, one of each kind.

        If nothing fits, keep the closest miss.
        """
        if not self.outcome.best:
            self.find_closest_miss()
            return
        hardware = replace(self.job.hardware, memory=(1 + NEARLY) * self.capacity)
        larger = replace(self.job, hardware=hardware)
        fastest = self.outcome.best[0].prediction.step
        closest: dict[tuple[object, ...], Miss] = {}
        for layout, _ in Search(larger, self.count, bounds=self.bounds, below=fastest).find_best().best:
            prediction = predict(self.job.case(layout))
            miss = Miss(layout, prediction, prediction.memory.total - self.capacity)
            kind = layout.tp, layout.recompute, layout.micro_batch_size
            if kind not in closest or miss.over < closest[kind].over:
                closest[kind] = miss
        self.outcome.misses = sorted(closest.values(), key=lambda miss: miss.over)[:NEAR_MISSES]

    def find_closest_miss(self) -> None:
        """Keep the layout that misses by the fewest bytes."""
        misses = []
        for _, layout in sorted(self._rejections.values())[:LOOKED_AT]:
            prediction = predict(self.job.case(layout), at_least)
            misses.append(Miss(layout, prediction, prediction.memory.total - self.capacity))
        self.outcome.closest_miss = min(misses, key=lambda miss: miss.over, default=None)


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
    outcome = Search(job, count, slower=SLOWER, bounds=bounds).run()
    outcome.best.sort(key=lambda ranked: (ranked.prediction.memory.total, ranked.prediction.step))
    outcome.best = outcome.best[:count]
    return outcome
