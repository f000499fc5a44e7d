"""Predict the bytes that a rank of a pipeline holds before its first action and after its last. No torch.

first forward  weights are gathered, and there are no gradients yet
reduction      the gradients of all micro batches are reduced
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from torchllm.tools.planner.moments import STAGES_AHEAD
from torchllm.tools.planner.parameters import ShardedParameters, StageSize, has_copy_of_embedding
from torchllm.tools.planner.peak import Memory, Peak
from torchllm.tools.planner.rank import Rank
from torchllm.tools.planner.stage_memory import Stage


def peak_of_pipeline(rank: Rank, last: Stage) -> Peak:
    """Return the peak of FSDP's temporary memory before and after a pipeline's actions.

    last: memory of the last stage of the rank.
    """
    moments = [*pipeline_reductions(rank), first_forward(rank, last)]
    return Peak.of(moments, rank.software)


class Units(NamedTuple):
    """Parts of a stage with the same sizes. FSDP gathers and reduces each as a whole."""

    parameters: ShardedParameters
    number: int
    has_one_matrix: bool = False
    """whether the last of its parameters is all of it"""


def units_of_stage(rank: Rank, stage: StageSize) -> Iterator[Units]:
    """Yield the units of a stage, in the order of their reductions."""
    table = ShardedParameters(rank.table, rank.table / rank.shards)
    if stage.first or (stage.last and not rank.head) or has_copy_of_embedding(rank.model, stage):
        yield Units(table, 1, has_one_matrix=True)
    for view, alike in groupby(stage.views):
        block, number = rank.blocks[view], len(list(alike))
        yield Units(block.unit, number)
        if block.experts.whole:
            yield Units(block.experts, number)
    if stage.last and rank.head:
        yield Units(table, 1, has_one_matrix=True)


def unit_sizes(rank: Rank, stage: StageSize) -> list[float]:
    """Return the parameters of each unit of a stage, gathered."""
    sizes: list[float] = []
    for units in units_of_stage(rank, stage):
        sizes += units.number * [units.parameters.whole]
    return sizes


def pipeline_reductions(rank: Rank) -> Iterator[Memory]:
    """Yield the memory when the gradients of a rank's first stage, the last to end, are reduced, unit by unit.

    A unit's weights are freed, and its gradients are copied to be sent. Then the whole gradients are freed but the last
    one, because FSDP up to torch 2.14 refers to it while it allocates the result. If no other rank shares
    a unit, nothing comes back, but the copy is divided into one copy more. The gradients of the rank's other stages are
    reduced by then.
    """
    bytes_per_gradient = rank.software.gradients
    later = rank.parameters(first=1)
    held = rank.parameters(end=1).whole + later.shard
    freed = later.whole
    for (whole, shard), number, has_one_matrix in units_of_stage(rank, rank.stages[0]):
        if not number:
            continue
        has_more = has_one_matrix or shard == whole
        yield Memory(
            gradients=bytes_per_gradient * (held + shard * has_more),
            gathered=-rank.per_step * (freed + whole),
            temporary=bytes_per_gradient * whole,
        )
        held -= number * (whole - shard)
        freed += number * whole


def first_forward(rank: Rank, last: Stage) -> Memory:
    """Return the memory when a pipeline gathers weights for a step's first forward, and there are no gradients yet.

    A schedule of several stages per rank gathers whole stages ahead, each unit into a buffer; when the first stage
    computes, one unit after the other is copied out of its buffer. 1F1B and GPipe gather a unit when it is used: when
    the last one of a stage is copied out, the buffer of the one before it is still there. Compared to sums of gradients
    that is little, but with updates of frozen weights there are none.

    last: memory of the last stage of the rank.
    """
    if rank.shards == 1:
        return Memory()
    if rank.gathers_stages:
        copied = rank.stages[:1] if rank.gathers_per_use else rank.stages
        largest = max(max(unit_sizes(rank, stage)) for stage in copied)
        ahead = rank.parameters(end=STAGES_AHEAD).whole
        return Memory(gathered=rank.per_use * ahead + rank.software.gathered * largest)
    stage = rank.stages[-1]
    last_two = unit_sizes(rank, stage)[-2:]
    blocks_passed = stage.blocks if stage.last else stage.blocks - 1
    activations = (last.held - last.ends) * blocks_passed / stage.blocks
    return Memory(gathered=rank.per_step * sum(last_two), activations=activations)
