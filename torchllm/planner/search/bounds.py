"""Lower bounds of the time and memory of layouts, by which `search` leaves out whole groups. No torch.

A bound of a group is what the cost model says of its layouts if what is open costs nothing. `Bounds.shared` bounds the
time of all schedules and shardings, `Bounds.scheduled` of one schedule, with `Bounds.tail` of one sharding too;
`Bounds.held` bounds the memory.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, partial
from typing import NamedTuple

from torchllm.config import SCHEDULES
from torchllm.planner.activations import block_activations, stage_activations
from torchllm.planner.case import Case
from torchllm.planner.experts import without_experts
from torchllm.planner.memory import StageSize, gathered_parameters
from torchllm.planner.moments import WHOLE, of_rank
from torchllm.planner.predict import memory_of, stage_sizes, tail
from torchllm.planner.search.layouts import Job, Layout
from torchllm.planner.simulate import StageTimes
from torchllm.planner.stage import BlockCost, StageCost, boundary, cost_of_block, stage_cost
from torchllm.spec.stages import stage_of_rank, stages_of_ranks


def at_least(case: Case, stages: Sequence[StageTimes], transfer: float) -> tuple[float, list[float]]:
    """Return a bound of `predict.pipeline_seconds`, and each rank's computing time.

    A rank computes all its work after a first micro batch has come through the previous ranks, and before the last
    one's gradients go back through them. Where the backward is split that last wait may be filled.
    """
    m = case.micro_batches
    splits_backward = SCHEDULES[case.parallel.schedule].splits_backward
    totals = [sum(stage) for stage in stages]
    busy = [m * sum([totals[stage] for stage in mine]) for mine in stages_of_ranks(case.parallel)]
    step = waits = 0.0
    for rank, work in enumerate(busy):
        step = max(step, waits + work)
        way_back = 0.0 if splits_backward else totals[rank] - stages[rank].forward + transfer
        waits += stages[rank].forward + transfer + way_back
    return step, busy


class Forward(NamedTuple):
    """What the first rank holds at the end of a forward."""

    flying: Counter[StageSize]
    """micro batches whose activations it holds, by their stage"""
    gradients: float
    """bytes of the gradients that its stages have so far"""

    def is_within(self, other: "Forward") -> bool:
        """Return whether another holds as much of everything."""
        return self.gradients <= other.gradients and self.flying <= other.flying


class Bounds:
    """The bounds of one job's layouts. What layouts share is computed once, and kept by what it depends on."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.shardings = cache(job.shardings)
        self._costs: dict[tuple[object, ...], tuple[BlockCost, dict[StageSize, StageCost]]] = {}
        self._sizes: dict[tuple[object, ...], list[StageSize]] = {}
        self._tails: dict[tuple[object, ...], float] = {}
        self._standing: dict[tuple[object, ...], float] = {}
        self._forwards: dict[tuple[object, ...], list[Forward]] = {}
        self._kept: dict[tuple[object, ...], Callable[[StageSize], float]] = {}
        self._dense = job.model.dense_layers if job.model.experts else 0

    def of(self, job: Job) -> "Bounds":
        """Return the bounds of a job with other `fixed` keys or another memory, which share what is known."""
        other = copy(self)
        other.job = job
        other.shardings = cache(job.shardings)
        return other

    def shared(self, layout: Layout) -> float:
        """Return the seconds if the ranks of a pipeline share all work evenly and never wait."""
        whole = StageSize(self.job.model.layers, first=True, last=True, dense=self._dense)
        (cost,) = self.costs(layout, [whole])
        return self.micro_batches(layout) * sum(cost.times) / layout.pp

    def scheduled(self, layout: Layout) -> float:
        """Return `at_least` of the layout."""
        case, costs = self.job.case(layout), self.costs(layout, self.sizes(layout))
        return at_least(case, [cost.times for cost in costs], boundary(case))[0]

    def costs(self, layout: Layout, sizes: list[StageSize]) -> list[StageCost]:
        """Return the cost of each stage. Only ZeRO stages 2 and 3 gather weights, or reduce gradients, meanwhile."""
        computes = layout.micro_batch_size, layout.recompute, self.job.compile_of(layout).block
        sends = layout.pp > 1, layout.cp, layout.cp_method, layout.tp, layout.sequence_parallel, layout.ep
        gathers = (layout.dp_shard, layout.zero_stage) if layout.zero_stage >= 2 else ()
        key = *computes, *sends, *gathers
        if key not in self._costs:
            self._costs[key] = cost_of_block(self.job.case(layout)), {}
        block, known = self._costs[key]
        for size in sizes:
            if size not in known:
                known[size] = stage_cost(self.job.case(layout), size, block)
        return [known[size] for size in sizes]

    def sizes(self, layout: Layout) -> list[StageSize]:
        """Return the size of each stage."""
        key = layout.pp, layout.schedule, layout.virtual_stages
        if key not in self._sizes:
            self._sizes[key] = stage_sizes(self.job.case(layout))
        return self._sizes[key]

    def tail(self, layout: Layout) -> float:
        """Return the seconds at the end of a step, if a rank has no end of the model and its backward hides all."""
        key = layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.zero_stage, layout.ep
        if key not in self._tails:
            size = StageSize((self.job.model.layers - self._dense) // layout.pp, first=False, last=False)
            cost = StageCost(StageTimes(0.0, math.inf, 0.0), {})
            self._tails[key] = sum(tail(self.job.case(layout), [size], [cost]).values())
        return self._tails[key]

    def held(self, layout: Layout) -> float:
        """Return the bytes that the first rank holds all step long, and at the end of the forward that adds most."""
        kept = self.kept(layout)
        most = 0.0
        for forward in self.forwards(layout):
            activations = sum([count * kept(size) for size, count in forward.flying.items()])
            most = max(most, self.job.software.constants.allocator * activations + forward.gradients)
        return self.standing(layout) + most

    def standing(self, layout: Layout) -> float:
        """Return the bytes that the first rank holds all step long."""
        sums = layout.pp == 1 and self.micro_batches(layout) > 1  # gradients; a pipeline has them for a while
        split = layout.pp, layout.schedule, layout.virtual_stages, layout.tp, layout.ep
        key = *split, layout.dp_shard * layout.cp, layout.zero_stage, sums
        if key not in self._standing:
            case, sizes = self.job.case(layout), self.sizes(layout)
            memory = memory_of(case, sizes, 0)
            whole = 0.0  # weights; `memory.gathered` has what is gathered at its peak, too, which a micro batch decides
            if layout.zero_stage < 3:
                stages = [sizes[stage] for stage in stage_of_rank(case.parallel, 0)]
                vocab_parallel = case.software.vocab_parallel
                parameters = sum(gathered_parameters(case.model, stage, case.piece, vocab_parallel) for stage in stages)
                whole = case.software.gathered * parameters
            gradients = memory.gradients if sums else 0.0
            self._standing[key] = memory.weights + whole + gradients + memory.optimizer + memory.reserve
        return self._standing[key]

    def kept(self, layout: Layout) -> Callable[[StageSize], float]:
        """Return a function: stage -> bytes that its blocks keep of a micro batch."""
        sends = layout.cp, layout.cp_method, layout.tp, layout.sequence_parallel, layout.ep
        key = *sends, layout.micro_batch_size, layout.recompute, self.job.compile_of(layout).block
        if key not in self._kept:
            self._kept[key] = cache(partial(self._kept_of, self.job.case(layout)))
        return self._kept[key]

    def _kept_of(self, case: Case, size: StageSize) -> float:
        """Return the bytes that the blocks of a stage keep of a micro batch."""
        held = 0.0
        for model, blocks in ((case.model, size.blocks - size.dense), (without_experts(case.model), size.dense)):
            if blocks:
                one = block_activations(model, case.piece, case.parallel, case.kernels, case.software, case.lora)
                held += stage_activations(case.model, blocks, case.recompute, one, case.software).held
        return held

    def micro_batches(self, layout: Layout) -> int:
        """Return the micro batches of a step on one data rank."""
        return self.job.training.global_batch_size // (layout.micro_batch_size * layout.data_ranks)

    def forwards(self, layout: Layout) -> list[Forward]:
        """Return the forwards at whose end the first rank may hold most."""
        order = layout.pp, layout.schedule, layout.virtual_stages, self.micro_batches(layout)
        key = *order, layout.tp, layout.ep
        if key not in self._forwards:
            case, sizes = self.job.case(layout), self.sizes(layout)
            parallel, software = case.parallel, case.software
            stages = [sizes[stage] for stage in stage_of_rank(parallel, 0)]
            found: list[Forward] = []
            for moment in of_rank(layout.schedule, layout.pp, parallel.stages_per_rank, case.micro_batches, 0):
                if moment.kind != "F":
                    continue
                flying, gradients = Counter[StageSize](), 0.0
                for stage, count, graded in zip(stages, moment.flying, moment.graded, strict=True):
                    flying[stage] += count
                    if layout.pp > 1 and graded == WHOLE:
                        whole = gathered_parameters(case.model, stage, case.piece, software.vocab_parallel)
                        gradients += software.gradients * whole
                forward = Forward(flying, gradients)
                if not any(forward.is_within(other) for other in found):
                    found = [other for other in found if not other.is_within(forward)] + [forward]
            self._forwards[key] = found
        return self._forwards[key]
