"""Lower bounds on the time and memory of partly decided layouts, by which `search` rejects whole groups. No torch.

Seconds: all ranks' work divided evenly, and the wait for a first micro batch. Bytes: what the first rank holds all step
long, and the activations of the micro batches that its schedule keeps. A bound is no more than what `predict` says of
any layout of the group, and is composed of few parts that many layouts share.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchllm.config import SCHEDULES, PipelineSchedule
from torchllm.planner.case import Case
from torchllm.planner.compute import Kernels, Piece
from torchllm.planner.memory import StageSize, stage_parameters
from torchllm.planner.predict import memory_of, tail
from torchllm.planner.search.layouts import DegreeMesh, Job, Layout, ShardingDegrees
from torchllm.planner.simulate import StageTimes, most_in_flight
from torchllm.planner.stage import BlockCost, Computed, StageCost, computed, cost_of_block, end_times
from torchllm.spec.flops import recompute_interval
from torchllm.spec.stages import V_SHAPED, balanced_split, stage_of_rank

SPLIT = tuple(name for name, kind in SCHEDULES.items() if kind.splits_backward)
"""schedules that may fill the wait for the last gradients with gradients of weights"""


def at_least(case: Case, stages: Sequence[StageTimes], transfer: float) -> tuple[float, list[float]]:
    """Return a bound of `predict.pipeline_seconds`, and each rank's computing time.

    A rank computes all its work after a first micro batch has come through the previous ranks, and before the last
    one's gradients go back through them. Where the backward is split that last wait may be filled.
    """
    parallel, m = case.parallel, case.micro_batches
    busy = [m * sum(sum(stages[at]) for at in stage_of_rank(parallel, rank)) for rank in range(parallel.pp)]
    step = waits = 0.0
    for rank in range(parallel.pp):
        step = max(step, waits + busy[rank])
        forward, inputs, weights = stages[rank]
        waits += forward + transfer + (0.0 if parallel.schedule in SPLIT else inputs + weights + transfer)
    return step, busy


class ScheduleBound(NamedTuple):
    """A schedule, and the least that its first rank holds."""

    schedule: PipelineSchedule
    virtual_stages: int
    graded: bool
    """whether all its stages have gradients at a time with one micro batch fewer in flight"""
    flying: int
    """blocks times the micro batches that they keep at once"""
    blocks: int
    """blocks of its largest stage, which one micro batch fewer frees; 0 if one is always in flight"""
    ends: int
    """ends of its stages that receive from other ranks"""


class Sharding(NamedTuple):
    """A way to share weights, gradients and optimizer on a mesh."""

    degrees: ShardingDegrees
    standing: float
    """lower bound of the bytes held all step long"""
    reserve: float
    """bytes outside torch"""
    gradients: float
    """bytes of the gradients when all stages have some"""
    tail: float
    """lower bound of the seconds at the end of a step"""


class Bounds:
    """The bounds of one job; what is computed once is cached."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._computed: dict[tuple[Piece, Kernels], Computed] = {}
        self._block: dict[tuple[object, ...], tuple[StageTimes, float, float]] = {}
        self._ends: dict[tuple[Piece, Kernels], tuple[float, float]] = {}
        self._ranks: dict[tuple[object, ...], list[tuple[int, int, bool, bool]]] = {}
        self._sharded: dict[DegreeMesh, list[Sharding]] = {}
        self._standing: dict[tuple[int, ...], tuple[float, float, float]] = {}
        self._orders: dict[tuple[int, int], list[ScheduleBound]] = {}
        self._smallest: dict[tuple[int, int], ScheduleBound] = {}
        self._received: dict[tuple[object, ...], float] = {}
        self._stages: dict[tuple[object, ...], list[StageSize]] = {}
        self._ways: dict[DegreeMesh, list[tuple[ShardingDegrees, float, float]]] = {}
        self._kept: dict[tuple[object, ...], float] = {}

    def block_key(self, layout: Layout) -> tuple[object, ...]:
        """Return what decides how a block computes: layouts with equal keys share one entry of a cache."""
        return (
            layout.cp,
            layout.cp_method,
            layout.tp,
            layout.sequence_parallel,
            layout.recompute,
            self.job.compile_of(layout).block,
        )

    def block(self, layout: Layout) -> tuple[StageTimes, float, float]:
        """Return the seconds of one micro batch in a block, in the embedding, and in the head."""
        gathers = layout.zero_stage > 1 and layout.dp_shard * layout.cp > 1
        sharding = (layout.pp > 1, layout.dp_shard, layout.zero_stage) if gathers else ()
        key = (*self.block_key(layout), layout.micro_batch_size, *sharding)
        known = self._block.get(key)
        if known is None:
            case = self.job.case(layout if gathers else layout._replace(dp_replicate=1, dp_shard=1, zero_stage=0))
            block = self.block_cost(case)
            known = self._block[key] = block.times, *self.ends(case, block.over_tp)
        return known

    def block_cost(self, case: Case) -> BlockCost:
        """Return the time of a block; what it computes is cached for layouts that send and recompute differently."""
        key = case.piece, case.kernels
        if key not in self._computed:
            self._computed[key] = computed(case)
        return cost_of_block(case, self._computed[key])

    def ends(self, case: Case, over_tp: float) -> tuple[float, float]:
        """Return the seconds in the embedding and in the head, which many layouts share."""
        key = case.piece, case.kernels
        if key not in self._ends:
            sizes = StageSize(0, True, False), StageSize(0, False, True)
            first, last = (sum(end_times(case, size, over_tp)[0]) for size in sizes)
            self._ends[key] = first, last
        return self._ends[key]

    def work(self, layout: Layout, decided: bool = True) -> float:
        """Return a bound of the schedule's time, like `at_least` but without transfers.

        Without a schedule (`decided` is False) it is the ranks' average work, and their average wait for a first micro
        batch if each previous rank had one block.
        """
        block, embedding, head = self.block(layout)
        m = self.job.training.global_batch_size // (layout.micro_batch_size * layout.data_ranks)
        each = sum(block)
        if layout.pp == 1 or not decided:
            work = m * (self.job.model.layers * each + embedding + head) / layout.pp
            return work + (layout.pp - 1) / 2 * block.forward
        way = block.forward if layout.schedule in SPLIT else each
        step = 0.0
        for before, blocks, first, last in self.ranks(layout):
            step = max(step, before * way + m * (blocks * each + first * embedding + last * head))
        return step

    def ranks(self, layout: Layout) -> list[tuple[int, int, bool, bool]]:
        """Return (blocks before a rank's first one, its own blocks, is first, is last) for each kind of rank.

        Of ranks that are alike it is the last one, which waits longest.
        """
        key = layout.pp, layout.schedule, layout.virtual_stages
        if key not in self._ranks:
            parallel, stages, before = self.job.parallel(layout), self.stages(layout), 0
            alike: dict[tuple[int, bool, bool], int] = {}
            for rank in range(layout.pp):
                mine = [stages[stage] for stage in stage_of_rank(parallel, rank)]
                has = sum(of.blocks for of in mine), any(of.first for of in mine), any(of.last for of in mine)
                alike[has] = before
                before += stages[rank].blocks
            self._ranks[key] = [(before, *has) for has, before in alike.items()]
        return self._ranks[key]

    def stages(self, layout: Layout) -> list[StageSize]:
        """Return the size of each stage."""
        key = layout.pp, layout.schedule, layout.virtual_stages
        if key not in self._stages:
            split = balanced_split(self.job.model, self.job.parallel(layout), self.job.training.sequence_length)
            self._stages[key] = [StageSize(blocks, at == 0, at == len(split) - 1) for at, blocks in enumerate(split)]
        return self._stages[key]

    def shardings(self, mesh: DegreeMesh) -> list[Sharding]:
        """Return bounds of what each sharding keeps of a rank's blocks, and of its cost at the end of a step."""
        if mesh not in self._sharded:
            sizes = [StageSize(self.job.model.layers // mesh.pp, False, False)] * mesh.pp
            cost = StageCost(StageTimes(0.0, math.inf, 0.0), {})  # a backward that hides what can be hidden
            found = []
            for replicate, shard, zero, ep in self.job.shardings(mesh):
                case = self.job.case(Layout(mesh.pp, replicate, shard, mesh.cp, mesh.tp, zero_stage=zero, ep=ep))
                key = mesh.pp, mesh.tp, shard * mesh.cp, zero
                if key not in self._standing:
                    of = memory_of(case, sizes, 0)
                    standing = of.weights + of.optimizer + (of.gathered if zero < 3 else 0.0)
                    whole = stage_parameters(case.model, sizes[0], mesh.tp, case.software.vocab_parallel)
                    scattered = shard * mesh.cp if zero >= 2 and mesh.pp == 1 else 1
                    self._standing[key] = standing, of.reserve, case.software.gradients * whole / scattered
                seconds = sum(tail(case, sizes[:1], [cost]).values())
                found.append(Sharding(ShardingDegrees(replicate, shard, zero, ep), *self._standing[key], seconds))
            self._sharded[mesh] = sorted(found, key=lambda one: one.standing)
        return self._sharded[mesh]

    def cheapest(self, layout: Layout, mesh: DegreeMesh, order: ScheduleBound) -> tuple[Layout, float]:
        """Return the layout with the cheapest sharding per micro batch that may fit, and the missing bytes.

        Only zero_stage 3 gathers weights for a micro batch, and the fewer ranks share them the less.
        """
        if mesh not in self._ways:
            shardings = self.shardings(mesh)
            whole = [one for one in shardings if one.degrees[2] < 3]
            apart = sorted((one for one in shardings if one.degrees[2] == 3), key=lambda one: one.degrees[1])
            self._ways[mesh] = [(one.degrees, one.standing + one.reserve, one.gradients) for one in whole[:1] + apart]
        capacity, least = self.job.hardware.memory, math.inf
        received, most, later = self.held(layout, order)
        for (replicate, shard, zero, ep), standing, gradients in self._ways[mesh]:
            graded = later + gradients
            over = standing + received + (graded if graded > most else most) - capacity
            if over <= 0:
                if zero == 3:
                    layout = layout._replace(dp_replicate=replicate, dp_shard=shard, zero_stage=zero, ep=ep)
                return layout, over
            least = min(least, over)
        return layout, least

    def holds(self, layout: Layout, sharding: Sharding, order: ScheduleBound) -> float:
        """Return a bound of the first rank's memory."""
        received, most, later = self.held(layout, order)
        return sharding.standing + sharding.reserve + received + max(most, later + sharding.gradients)

    def held(self, layout: Layout, order: ScheduleBound) -> tuple[float, float, float]:
        """Return bounds of the bytes that vary within a step.

        They are: the buffers in which a pipeline receives; the activations of all micro batches in flight; and those of
        one micro batch fewer, which are held beside gradients in the middle of a step.
        """
        received = 0.0
        if layout.pp > 1:
            key = layout.data_ranks, layout.cp, layout.tp, layout.sequence_parallel
            if key not in self._received:
                case = self.job.case(layout._replace(schedule="1F1B", virtual_stages=1))
                self._received[key] = memory_of(case, [StageSize(1, True, False)] * layout.pp, 0).buffers
            received = self._received[key] * order.ends
        kept = self.kept(layout) * self.job.software.constants.allocator
        later = kept * (order.flying - order.blocks) if order.graded else -math.inf
        return received, kept * order.flying, later

    def memory(self, layout: Layout, mesh: DegreeMesh) -> float:
        """Return a bound of what the first rank holds besides `Sharding.standing`, with any sharding."""
        least = math.inf
        for zero in (1, 3) if layout.pp == 1 else (3,):  # what is reduced at once has buffers of its own
            case = self.job.case(layout._replace(dp_replicate=1, dp_shard=mesh.data, zero_stage=zero))
            of = memory_of(case, self.stages(layout), 0)
            gathered = of.gathered * case.software.constants.allocator
            least = min(least, of.total - gathered - of.weights - of.optimizer)
        return least

    def kept(self, layout: Layout) -> float:
        """Return the bytes that a block keeps of a micro batch."""
        key = self.block_key(layout)
        if key not in self._kept:
            mode = "full" if layout.recompute == "every_k" else layout.recompute  # of one block a stage it is the same
            case = self.job.case(layout._replace(pp=1, dp_replicate=1, dp_shard=1, micro_batch_size=1, recompute=mode))
            many = self.job.model.layers * recompute_interval(case.recompute, self.job.model.layers)
            one, two = (memory_of(case, [StageSize(times * many, True, True)], 0).activations for times in (1, 2))
            self._kept[key] = (two - one) / many
        return self._kept[key] * layout.micro_batch_size

    def orders(self, layout: Layout, mesh: DegreeMesh) -> list[ScheduleBound]:
        """Return the possible schedules with their bounds."""
        m = self.job.training.global_batch_size // (layout.micro_batch_size * mesh.data)
        if (mesh.pp, m) not in self._orders:
            schedules = self.job.schedules(mesh, layout.micro_batch_size)
            self._orders[mesh.pp, m] = [self.order(mesh.pp, m, name, stages) for name, stages in schedules]
        return self._orders[mesh.pp, m]

    def smallest(self, layout: Layout, mesh: DegreeMesh) -> ScheduleBound:
        """Return one schedule whose every bound is the smallest of all schedules."""
        key = mesh.pp, layout.micro_batch_size * mesh.data
        if key not in self._smallest:
            orders = self.orders(layout, mesh)
            self._smallest[key] = orders[0]._replace(
                graded=all(one.graded for one in orders),
                flying=min(one.flying for one in orders),
                blocks=max(one.blocks for one in orders),
                ends=min(one.ends for one in orders),
            )
        return self._smallest[key]

    def order(self, pp: int, m: int, name: PipelineSchedule, v: int) -> ScheduleBound:
        """Return the bounds of a schedule of `m` micro batches without simulating it."""
        layers = self.job.model.layers
        if pp == 1:
            return ScheduleBound(name, v, m > 1, layers, 0, 0)
        blocks = [size.blocks for size in self.stages(Layout(pp, 1, 1, 1, 1, name, v))]
        round = m // max(1, m // pp)
        if name in V_SHAPED:
            both = most_in_flight(name, pp, 2, min(m, 3 * round + m % round), 0)
            return ScheduleBound(
                name, v, m >= 3 * pp, max(both[0] * blocks[0], both[1] * blocks[-1]), max(blocks[0], blocks[-1]), 2
            )
        mine = blocks[::pp]
        flying, graded = m * sum(mine), v == 1 and m > 1  # GPipe and LoopedBFS keep all
        if name not in ("GPipe", "LoopedBFS"):
            ahead = (v - 1) * round + (2 if name == "Interleaved1F1B" else 1) * (pp - 1)
            flying = min(m * v, ahead + 1) * min(mine)
            graded = graded or m * v > ahead + v * round  # after a round of backwards
        return ScheduleBound(name, v, graded, flying, max(mine), 2 * len(mine) - 1)
