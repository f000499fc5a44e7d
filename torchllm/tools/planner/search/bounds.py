"""Lower bounds of the time and memory of layouts: `search` uses them to skip whole groups. No torch.

A bound of a group is the prediction of the cost model with all open settings at no cost. `Bounds.shared` bounds the
time of all schedules and shardings, `Bounds.scheduled` the time of one schedule, with `Bounds.tail` of one sharding
too; `Bounds.shared_memory` bounds the memory of all schedules, `Bounds.held` of one layout, `Bounds.needed` of its
shardings under one ZeRO stage.
"""

import math
from collections import Counter
from collections.abc import Sequence
from copy import copy
from itertools import groupby
from typing import NamedTuple

from torchllm.config import SCHEDULES, Recompute
from torchllm.facts.flops import head_size
from torchllm.facts.stages import stages_of_ranks
from torchllm.tools.planner.activations import BlockActivations
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.compute import Kernels, Piece
from torchllm.tools.planner.frozen_weights import uncut_elements
from torchllm.tools.planner.memory import receiving_buffers, sharded_states, updates_states
from torchllm.tools.planner.moments import REDUCED, WHOLE, of_rank
from torchllm.tools.planner.parameters import (
    StageSize,
    different_views,
    gathered_parameters,
    sizes_of_split,
    stage_parameters,
    trained_share_of_stage,
)
from torchllm.tools.planner.predict import memory_of, stage_sizes, tail
from torchllm.tools.planner.rank import boundary_bytes
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.simulate import StageTimes
from torchllm.tools.planner.stage import BlockCost, Computed, StageCost, boundary, computed, cost_of_block, stage_cost
from torchllm.tools.planner.stage_activations import activations_of_blocks, activations_of_stage

Key = tuple[object, ...]
"""settings that decide a figure: layouts that agree in them share it"""


def at_least(case: Case, stages: Sequence[StageTimes], transfer: float) -> tuple[float, list[float]]:
    """Return a bound of `predict.pipeline_seconds`, and each rank's computing time.

    A rank computes all its work after a first micro batch has come through the previous ranks, and before the last
    one's gradients go back through them. Where the backward is split that last wait may be filled.
    """
    micro_batches = case.micro_batches
    splits_backward = SCHEDULES[case.parallel.schedule].splits_backward
    totals = [sum(times) for times in stages]
    busy = []
    for stages_of_rank in stages_of_ranks(case.parallel):
        busy.append(micro_batches * sum([totals[stage] for stage in stages_of_rank]))
    step = waits = 0.0
    for rank, work in enumerate(busy):
        step = max(step, waits + work)
        waits += _passage(stages[rank], transfer, splits_backward)
    return step, busy


def _passage(entry: StageTimes, transfer: float, splits_backward: bool) -> float:
    """Return the seconds that the ranks after one wait for it: while the first micro batch comes, and the last leaves.

    entry: of the rank's first stage.
    """
    passage = entry.forward + transfer
    if not splits_backward:
        passage += entry.input_gradient + entry.weight_gradient + transfer
    return passage


class RankGroup(NamedTuple):
    """Neighboring ranks of a pipeline that have stages of the same sizes."""

    ranks: int
    entry: StageSize
    """size of the first stage of each rank"""
    stages: Counter[StageSize]
    """number of stages of each size on each rank"""


class StageSplit(NamedTuple):
    """How a schedule spreads the blocks over the ranks of a pipeline."""

    stages: list[StageSize]
    """first to last"""
    sizes: list[StageSize]
    """different ones of `stages`"""
    first_rank: list[StageSize]
    """stages of the first rank"""
    groups: list[RankGroup]


class InFlight(NamedTuple):
    """Memory of the first rank at the end of a forward, or as a backward begins."""

    activations: Counter[StageSize]
    """micro batches whose activations it holds, by their stage"""
    gradients: Counter[StageSize]
    """stages that have whole gradients"""
    backward: StageSize | None
    """the stage whose backward begins"""

    def is_within(self, larger: "InFlight") -> bool:
        """Return whether another one holds as much of everything."""
        is_alike = self.backward == larger.backward
        return is_alike and self.activations <= larger.activations and self.gradients <= larger.gradients


class BlockBytes(NamedTuple):
    """Bytes of a micro batch in the blocks of a stage."""

    kept: float
    """until the backward"""
    backward: float
    """more, or less, at the peak of the last block's backward while its weights are still gathered"""

    @classmethod
    def of(cls, case: Case, stage: StageSize, of_blocks: Sequence[BlockActivations]) -> "BlockBytes":
        """Return the bytes of a stage. of_blocks: of a block of each view."""
        activations = activations_of_stage(case.model, case.recompute, case.software, stage, of_blocks)
        if not stage.blocks:
            return cls(activations.held, 0.0)
        last = stage.views[-1]
        working = max([phase.working for phase in of_blocks[last].phases if not phase.freed])
        return cls(activations.held, working + activations.of_views[last].recomputed)


class StageCosts(NamedTuple):
    """Costs of one micro batch: of a block of each of `Case.of_views`, and of the stages so far."""

    blocks: tuple[BlockCost, ...]
    of_size: dict[StageSize, StageCost]


class Bounds:
    """The bounds of one job's layouts. Results are cached under the settings that decide them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        (self._whole_model,) = sizes_of_split(job.model, [job.model.layers], Recompute())
        # The least that a stage may have: of mode every_k, a block that is not recomputed.
        self._one_block = [
            StageSize((view,), first=False, last=False, first_recomputed=1) for view in set(self._whole_model.views)
        ]
        self._scheduled: dict[Layout, float] = {}
        self._in_flight: dict[Layout, float] = {}
        self._computed: dict[tuple[Piece, Kernels], list[Computed]] = {}
        self._costs: dict[Key, StageCosts] = {}
        self._splits: dict[Key, StageSplit] = {}
        self._transfers: dict[Key, float] = {}
        self._boundaries: dict[Key, float] = {}
        self._tails: dict[Key, float] = {}
        self._needed: dict[Layout, float] = {}
        self._standing: dict[Key, float] = {}
        self._shared_standing: dict[Key, float] = {}
        self._under_way: dict[Key, list[InFlight]] = {}
        self._parameters: dict[Key, float] = {}
        self._freed: dict[Key, float] = {}
        self._block_bytes: dict[Key, dict[StageSize, BlockBytes]] = {}

    def for_job(self, job: Job) -> "Bounds":
        """Return the bounds of a job with other `fixed` keys or another memory. They share all that is computed."""
        bounds = copy(self)
        bounds.job = job
        return bounds

    def shared(self, layout: Layout) -> float:
        """Return the seconds if the ranks of a pipeline share all work evenly and never wait."""
        times = self.costs(layout, [self._whole_model])[self._whole_model].times
        return self.micro_batches(layout) * sum(times) / layout.pp

    def scheduled(self, layout: Layout) -> float:
        """Return `at_least` of the layout. It is computed per group of ranks, as a pipeline has few kinds of ranks."""
        if layout in self._scheduled:
            return self._scheduled[layout]
        split = self.stage_split(layout)
        costs = self.costs(layout, split.sizes)
        transfer = self.transfer(layout)
        splits_backward = SCHEDULES[layout.schedule].splits_backward
        micro_batches = self.micro_batches(layout)
        step = waits = 0.0
        for group in split.groups:
            passage = _passage(costs[group.entry].times, transfer, splits_backward)
            seconds = 0.0
            for size, number in group.stages.items():
                seconds += number * sum(costs[size].times)
            waits += (group.ranks - 1) * passage  # the last of the group waits longest
            step = max(step, waits + micro_batches * seconds)
            waits += passage
        self._scheduled[layout] = step
        return step

    def transfer(self, layout: Layout) -> float:
        """Return the seconds from a stage to the next."""
        key = layout.pp, layout.cp, layout.tp, layout.micro_batch_size, layout.sequence_parallel
        if key not in self._transfers:
            self._transfers[key] = boundary(self.job.case(layout))
        return self._transfers[key]

    def costs(self, layout: Layout, sizes: Sequence[StageSize]) -> dict[StageSize, StageCost]:
        """Return the costs of stages of these sizes, and maybe of others.

        Only ZeRO stages 2 and 3 gather weights, or reduce gradients, meanwhile.
        """
        computes = layout.micro_batch_size, layout.recompute, self.job.compile_of(layout).block
        sequence = layout.cp, layout.cp_method, layout.sequence_parallel, layout.regather
        splits = SCHEDULES[layout.schedule].splits_backward
        sends = layout.pp > 1, splits, *sequence, layout.tp, layout.ep
        gathers = (layout.dp_shard, layout.zero_stage) if layout.zero_stage >= 2 else ()
        key = *computes, *sends, *gathers
        costs = self._costs.get(key)
        if costs is None:
            costs = self._costs[key] = self._costs_of_blocks(self.job.case(layout))
        missing = [size for size in sizes if size not in costs.of_size]
        if missing:
            case = self.job.case(layout)
            for size in missing:
                costs.of_size[size] = stage_cost(case, size, costs.blocks)
        return costs.of_size

    def _costs_of_blocks(self, case: Case) -> StageCosts:
        """Return the costs of blocks, and of no stage yet."""
        key = case.piece, case.kernels
        views = case.of_views
        if key not in self._computed:
            self._computed[key] = [computed(view) for view in views]
        blocks = [cost_of_block(view, work) for view, work in zip(views, self._computed[key], strict=True)]
        return StageCosts(tuple(blocks), {})

    def stage_split(self, layout: Layout) -> StageSplit:
        """Return how the blocks are spread over the ranks."""
        key = _split_key(layout)
        if key not in self._splits:
            case = self.job.case(layout)
            stages = stage_sizes(case)
            sizes = list(dict.fromkeys(stages))
            ranks = [[stages[stage] for stage in stages_of_rank] for stages_of_rank in stages_of_ranks(case.parallel)]
            groups = []
            for sizes_of_rank, alike in groupby(ranks):
                number = len(list(alike))
                groups.append(RankGroup(number, sizes_of_rank[0], Counter(sizes_of_rank)))
            self._splits[key] = StageSplit(stages, sizes, ranks[0], groups)
        return self._splits[key]

    def tail(self, layout: Layout) -> float:
        """Return the seconds at the end of a step, if a rank has no end of the model and its backward hides all."""
        key = layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.zero_stage, layout.ep
        if key not in self._tails:
            views = self._whole_model.views
            cost = StageCost(StageTimes(0.0, math.inf, 0.0), {})
            for view in set(views):  # a rank has at least its share of the blocks of a view
                size = StageSize((view,) * (views.count(view) // layout.pp), first=False, last=False)
                terms = tail(self.job.case(layout), [size], [cost])
                self._tails[key] = max(self._tails.get(key, 0.0), sum(terms.values()))
        return self._tails[key]

    def shared_memory(self, layout: Layout) -> float:
        """Return the bytes per rank if the ranks of a pipeline share all memory evenly.

        In any schedule a first micro batch has come through all stages of a rank before its first backward, which frees
        nothing before it has computed a block again.
        """
        shards = layout.dp_shard * layout.cp
        sums_gradients = self._sums_gradients(layout)
        key = layout.pp, layout.tp, layout.ep, shards, layout.zero_stage, sums_gradients
        if key not in self._shared_standing:
            self._shared_standing[key] = self._standing_of(layout, [self._whole_model]) / layout.pp
        bytes_of_size = self.block_bytes(layout, [self._whole_model, *self._one_block])
        backward = min([bytes_of_size[block].backward for block in self._one_block]) - self._freed_head(layout)
        stage_per_rank = [StageSize((), stage == 0, stage == layout.pp - 1) for stage in range(layout.pp)]
        shared = bytes_of_size[self._whole_model].kept + self._buffers(layout, stage_per_rank)
        comes_and_goes = shared / layout.pp + max(0.0, backward)
        in_flight = self.job.software.constants.allocator * comes_and_goes
        return self.job.software.reserve + self._shared_standing[key] + in_flight

    def held(self, layout: Layout) -> float:
        """Return the bytes that the first rank holds all step long, and at the action that adds most."""
        return self.standing(layout) + self.in_flight(layout)

    def in_flight(self, layout: Layout) -> float:
        """Return the bytes that the first rank holds at an action that adds most, whatever the sharding of weights."""
        if layout not in self._in_flight:
            software = self.job.software
            allocator = software.constants.allocator
            stages = self.stage_split(layout).first_rank
            bytes_of_size = self.block_bytes(layout, stages)
            freed_head = self._freed_head(layout)
            largest = 0.0
            for under_way in self.under_way(layout):
                comes_and_goes = gradients = 0.0
                for size, count in under_way.activations.items():
                    comes_and_goes += count * bytes_of_size[size].kept
                for size, count in under_way.gradients.items():
                    gradients += software.gradients * count * self.parameters(layout, size)
                if under_way.backward:
                    comes_and_goes += bytes_of_size[under_way.backward].backward - freed_head
                largest = max(largest, allocator * comes_and_goes + gradients)
            self._in_flight[layout] = largest + allocator * self._buffers(layout, stages)
        return self._in_flight[layout]

    def _buffers(self, layout: Layout, stages: Sequence[StageSize]) -> float:
        """Return the bytes of the receive buffers of a rank with these stages."""
        if layout.pp == 1:
            return 0.0
        key = layout.cp, layout.tp, layout.micro_batch_size, layout.sequence_parallel
        if key not in self._boundaries:
            case = self.job.case(layout)
            self._boundaries[key] = boundary_bytes(case.model, case.parallel, case.piece)
        return receiving_buffers(stages, self.micro_batches(layout), self._boundaries[key])

    def _freed_head(self, layout: Layout) -> float:
        """Return the bytes of the head's weights, if a step's only backward frees them before the blocks' weights."""
        if layout.pp > 1 or self.micro_batches(layout) > 1:
            return 0.0
        return self.job.software.gathered * head_size(self.job.model) / layout.tp

    def needed(self, layout: Layout) -> float:
        """Return the bytes that the first or the last rank needs with more shards than in any layout.

        If the first does not fit, the last is not looked at. More shards need less memory. A higher ZeRO stage may need
        more, as it gathers weights while blocks compute.
        """
        sharded = layout._replace(dp_replicate=1, dp_shard=layout.data_ranks)
        if sharded not in self._needed:
            case = self.job.case(sharded)
            stages = self.stage_split(sharded).stages
            needed = memory_of(case, stages, 0).total
            if layout.pp > 1 and needed <= self.job.hardware.memory:
                needed = max(needed, memory_of(case, stages, layout.pp - 1).total)
            self._needed[sharded] = needed
        return self._needed[sharded]

    def standing(self, layout: Layout) -> float:
        """Return the bytes that the first rank holds all step long."""
        shards = layout.dp_shard * layout.cp
        stages = layout.pp, layout.schedule, layout.virtual_stages
        key = *stages, layout.tp, layout.ep, shards, layout.zero_stage, self._sums_gradients(layout)
        if key not in self._standing:
            standing = self._standing_of(layout, self.stage_split(layout).first_rank)
            self._standing[key] = self.job.software.reserve + standing
        return self._standing[key]

    def _sums_gradients(self, layout: Layout) -> bool:
        """Return whether a rank has sums of gradients all step long. In a pipeline it has them for a while."""
        return layout.pp == 1 and self.micro_batches(layout) > 1

    def _standing_of(self, layout: Layout, stages: Sequence[StageSize]) -> float:
        """Return the bytes of some stages that a rank holds all step long."""
        software = self.job.software
        standing = self.states(layout, stages)
        if layout.zero_stage < 3:
            for size in stages:
                standing += software.gathered * self.parameters(layout, size)
        if self._sums_gradients(layout):
            for size in stages:
                trained = trained_share_of_stage(self.job.model, size)
                gradient = software.summed_gradients(layout.zero_stage, layout.dp_replicate)
                standing += gradient * self.summed_gradients(layout, size) * trained
        return standing

    def states(self, layout: Layout, stages: Sequence[StageSize]) -> float:
        """Return the bytes of the weights and the optimizer of some stages."""
        model, software, updates = self.job.model, self.job.software, self.job.trained
        shards = layout.dp_shard * layout.cp if layout.zero_stage else 1
        parameters = trained = 0.0
        uncut = 0.0
        for size in stages:
            of_stage = stage_parameters(model, size, layout.tp)
            parameters += of_stage
            trained += of_stage * trained_share_of_stage(model, size)
            if updates.only_updates:
                uncut += size.total([uncut_elements(view, updates, layout.tp) for view in different_views(model)])
        states = sharded_states(software, parameters / shards, trained / shards)
        if updates.only_updates:
            states = states.plus(updates_states(uncut / shards))
        return states.total

    def summed_gradients(self, layout: Layout, size: StageSize) -> float:
        """Return the parameters of a stage whose gradients a rank sums over a step's micro batches."""
        if layout.zero_stage < 2:
            return self.parameters(layout, size)
        whole = stage_parameters(self.job.model, size, layout.tp)
        return whole / (layout.dp_shard * layout.cp)

    def parameters(self, layout: Layout, size: StageSize) -> float:
        """Return the parameters of a stage, gathered."""
        key = layout.tp, layout.ep, size
        if key not in self._parameters:
            case = self.job.case(layout)
            self._parameters[key] = gathered_parameters(case.model, size, case.piece)
        return self._parameters[key]

    def block_bytes(self, layout: Layout, stages: Sequence[StageSize]) -> dict[StageSize, BlockBytes]:
        """Return the bytes of a micro batch in the blocks of these stages, and maybe of others."""
        compiled = self.job.compile_of(layout).block
        tokens = layout.micro_batch_size, layout.cp, layout.cp_method, layout.sequence_parallel
        key = *tokens, layout.tp, layout.ep, compiled, layout.recompute, layout.regather
        bytes_of_size = self._block_bytes.setdefault(key, {})
        missing = [size for size in stages if size not in bytes_of_size]
        if missing:
            case = self.job.case(layout)
            of_blocks = activations_of_blocks(case)
            for size in missing:
                bytes_of_size[size] = BlockBytes.of(case, size, of_blocks)
        return bytes_of_size

    def freed_by_regather(self, layout: Layout) -> float:
        """Return the largest share of a block's kept activations that gathering its inputs again frees.

        It does not depend on the number of tokens.
        """
        compiled = self.job.compile_of(layout).block
        key = layout.cp, layout.cp_method, layout.tp, layout.ep, layout.recompute, compiled
        if key not in self._freed:
            kept = self.block_bytes(layout, self._one_block)
            again = self.block_bytes(layout._replace(regather=True), self._one_block)
            self._freed[key] = max(1 - again[block].kept / kept[block].kept for block in self._one_block)
        return self._freed[key]

    def micro_batches(self, layout: Layout) -> int:
        """Return the micro batches of a step on one data rank."""
        return self.job.training.global_batch_size // (layout.micro_batch_size * layout.data_ranks)

    def under_way(self, layout: Layout) -> list[InFlight]:
        """Return the states of the first rank that may be its peak."""
        key = *_split_key(layout), self.micro_batches(layout)
        if key not in self._under_way:
            self._under_way[key] = _under_way_of(self.job.case(layout), self.stage_split(layout).first_rank)
        return self._under_way[key]


def _split_key(layout: Layout) -> Key:
    """Return the settings that decide the sizes of the stages: with every_k also which blocks are recomputed."""
    return layout.pp, layout.schedule, layout.virtual_stages, layout.recompute == "every_k"


def _under_way_of(case: Case, stages: Sequence[StageSize]) -> list[InFlight]:
    """Return the states of the first rank, with these stages, that no other state exceeds in everything.

    A backward counts before it frees any weights, because these are gathered once per step.
    """
    parallel = case.parallel
    moments = of_rank(parallel.schedule, parallel.pp, parallel.stages_per_rank, case.micro_batches, rank=0)
    largest: list[InFlight] = []
    for moment in moments:
        is_backward = moment.kind in "BI"
        if moment.kind == "W" or (is_backward and REDUCED in moment.graded):
            continue
        under_way = InFlight(Counter(), Counter(), stages[moment.stage] if is_backward else None)
        for size, count, graded in zip(stages, moment.flying, moment.graded, strict=True):
            under_way.activations[size] += count
            if parallel.pp > 1 and graded == WHOLE:
                under_way.gradients[size] += 1
        if not any(under_way.is_within(larger) for larger in largest):
            largest = [smaller for smaller in largest if not smaller.is_within(under_way)]
            largest.append(under_way)
    return largest
