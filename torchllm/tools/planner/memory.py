"""Predict the bytes that a pipeline rank holds at its peak, by purpose. No torch.

A rank holds some memory all step long (weights, optimizer, summed gradients) and some for a while. The peak is at the
worst moment of its stages' actions (`stage_memory.py`) or of the work around them (`pipeline_memory.py`).
The schedule decides how many micro batches are in flight at each action (`moments.py`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchllm.tools.planner.frozen_weights import MOMENTS, WEIGHT, uncut_elements
from torchllm.tools.planner.moments import Moment, Total, totals
from torchllm.tools.planner.parameters import StageSize, different_views, trained_share_of_stage
from torchllm.tools.planner.peak import Memory, Peak, reserved
from torchllm.tools.planner.pipeline_memory import peak_of_pipeline
from torchllm.tools.planner.rank import Rank
from torchllm.tools.planner.software import Software
from torchllm.tools.planner.stage_memory import Stage, stage_memory


def rank_memory(rank: Rank, moments: tuple[Moment, ...]) -> Memory:
    """Return the peak of a rank. moments: from `moments.of_rank`, of its stages."""
    software = rank.software
    standing = standing_memory(rank).plus(Memory(temporary=rank.update))
    if rank.is_frozen:
        standing = standing.plus(updates_memory(rank))
    if software.fsdp:
        buffers = receiving_buffers(rank.stages, rank.micro_batches, rank.boundary)
        standing = standing._replace(buffers=buffers)
    kinds = {moment.kind for moment in moments}
    memory_of_size = {size: stage_memory(rank, size, kinds) for size in rank.of_size}
    peak = peak_of_actions(rank, memory_of_size, moments)
    if software.fsdp and rank.parallel.pp > 1:
        peak = peak.with_peak(peak_of_pipeline(rank, last=memory_of_size[rank.stages[-1]]))
    memory = standing.plus(peak.live)
    cached = reserved(standing, software) + peak.reserved - memory.total
    return memory._replace(allocator=cached, reserve=software.reserve)


def peak_of_actions(rank: Rank, memory_of_size: dict[StageSize, Stage], moments: tuple[Moment, ...]) -> Peak:
    """Return the peak of a rank's temporary memory over all its actions.

    memory_of_size: memory of a stage of each size. moments: `rank_memory`.
    """
    memories = list(memory_of_size.values())
    costs = [StageMemoryCosts.of(rank, size, stage) for size, stage in memory_of_size.items()]
    reserved_costs = [cost.reserved(rank.software) for cost in costs]
    live = Memory()
    most_live = most_reserved = -math.inf
    sizes = list(memory_of_size)
    size_of = tuple(map(sizes.index, rank.stages))
    for moment in totals(moments, size_of):
        extra = memories[moment.size].extra[moment.kind]
        most_reserved = max(most_reserved, extra.reserved + sum_of_stages(moment, reserved_costs))
        bytes = extra.live.total + sum_of_stages(moment, costs)
        if bytes > most_live:
            most_live = bytes
            live = extra.live.plus(memory_of_stages(moment, costs))
    return Peak(live, most_reserved)


class StageMemoryCosts(NamedTuple):
    """Bytes of a stage for its work in flight, whichever stage of the rank computes."""

    activations: float
    """of each micro batch in flight"""
    logits: float
    """of each micro batch in flight"""
    deferred: float
    """of each micro batch whose gradients of weights are put off"""
    whole: float
    """of its gradients, summed during a step"""
    reduced: float
    """of its gradients once they are reduced"""
    freed: float
    """of its weights that are gathered once per step, until its gradients are reduced"""
    after_forward: float
    """of the weights that stay gathered from a forward to the following backward: its root's and its last block's"""
    ahead: float
    """of all its weights, gathered for its first forward"""

    @classmethod
    def of(cls, rank: Rank, size: StageSize, stage: Stage) -> "StageMemoryCosts":
        """Return the bytes of a stage. FSDP sums gradients of a stage, and frees its weights, under a pipeline only."""
        parameters = rank.of_size[size]
        gradient = freed = 0.0
        if rank.software.fsdp and rank.parallel.pp > 1:
            gradient = rank.software.gradients
            freed = rank.per_step * parameters.whole
        whole = gradient * parameters.whole
        reduced = gradient * parameters.shard
        kept_block = rank.last_block(size).whole * rank.parallel.keep_last_block
        after_forward = rank.per_use * (kept_block + rank.root_of(size))
        ahead = rank.per_use * parameters.whole * rank.gathers_stages
        return cls(stage.held, stage.logits, stage.deferred, whole, reduced, freed, after_forward, ahead)

    def reserved(self, software: Software) -> "StageMemoryCosts":
        """Return the bytes that the allocator reserves for them (`peak.reserved`). Gradients do not come and go."""
        reserved = StageMemoryCosts(*(software.constants.allocator * bytes for bytes in self))
        return reserved._replace(whole=self.whole, reduced=self.reduced)


def sum_of_stages(moment: Total, costs: Sequence[StageMemoryCosts]) -> float:
    """Return the total of `memory_of_stages`, in fewer operations."""
    total = 0.0
    for size, stage in enumerate(costs):
        total += moment.flying[size] * (stage.activations + stage.logits)
        total += moment.deferred[size] * stage.deferred
        total += moment.whole[size] * stage.whole
        total += moment.reduced[size] * (stage.reduced - stage.freed)
        total += moment.waiting[size] * stage.after_forward
        total += moment.ahead[size] * stage.ahead
    return total


def memory_of_stages(moment: Total, costs: Sequence[StageMemoryCosts]) -> Memory:
    """Return the memory for the work in flight of all stages of a rank at a moment."""
    memory = Memory()
    for size, stage in enumerate(costs):
        flying, reduced = moment.flying[size], moment.reduced[size]
        activations = flying * stage.activations + moment.deferred[size] * stage.deferred
        gradients = moment.whole[size] * stage.whole + reduced * stage.reduced
        gathered = moment.waiting[size] * stage.after_forward - reduced * stage.freed
        gathered += moment.ahead[size] * stage.ahead
        logits = flying * stage.logits
        of_stage = Memory(gradients=gradients, gathered=gathered, activations=activations, logits=logits)
        memory = memory.plus(of_stage)
    return memory


def standing_memory(rank: Rank) -> Memory:
    """Return the weights, gradients and optimizer's states that are held all step long."""
    software, zero, parallel = rank.software, rank.zero, rank.parallel
    whole, shard = rank.parameters()
    if software.fsdp:
        trained = sum(trained_share_of_stage(rank.model, stage) * rank.of_size[stage].shard for stage in rank.stages)
        gradients = 0.0  # of pipelines: whole once a stage has some, by moment
        if parallel.pp == 1 and rank.micro_batches > 1:
            gradient = software.summed_gradients(zero, parallel.dp_replicate)
            gradients = gradient * (shard if zero >= 2 else whole) * trained / shard
        held = sharded_states(software, shard, trained)
        return held.plus(Memory(gradients=gradients, gathered=rank.per_step * whole))
    weights = software.weights * (shard if zero >= 3 else whole)
    gradients = software.gradients * (shard if zero >= 2 else whole)
    states = software.states * (shard if zero >= 1 else whole)
    copies = software.gradient_copies * whole * (parallel.data_ranks > 1)
    return Memory(weights, gradients, states, temporary=copies)


def receiving_buffers(stages: Sequence[StageSize], micro_batches: int, boundary: float) -> float:
    """Return the bytes of torch's receive buffers: per micro batch the message of each neighbor of a stage."""
    ends = sum(stage.first + stage.last for stage in stages)
    neighbors = 2 * len(stages) - ends
    return micro_batches * boundary * neighbors


def updates_memory(rank: Rank) -> Memory:
    """Return the extra memory of low-rank updates, beyond their share of all parameters: tp cuts one factor of each."""
    of_views = [uncut_elements(view, rank.trained, rank.piece.tp) for view in different_views(rank.model)]
    beyond = sum(stage.total(of_views) for stage in rank.stages)
    in_shards = beyond / rank.shards
    gradients = 0.0
    if rank.micro_batches > 1 and rank.parallel.pp == 1:
        gradients = WEIGHT * (in_shards if rank.zero >= 2 else beyond)
    return updates_states(in_shards).plus(Memory(gradients=gradients))


def sharded_states(software: Software, parameters: float, trained: float) -> Memory:
    """Return the weights and moments of an FSDP rank. parameters: its share of them; trained: by model.frozen."""
    return Memory(weights=software.shards * parameters, optimizer=(software.states - software.shards) * trained)


def updates_states(elements: float) -> Memory:
    """Return the weights and moments of low-rank updates. elements: of a rank, beyond its share of the model."""
    return Memory(weights=WEIGHT * elements, optimizer=MOMENTS * elements)
