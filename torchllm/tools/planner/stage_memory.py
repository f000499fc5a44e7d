"""Predict the bytes that a pipeline stage adds to its rank: per micro batch in flight, and while it computes.

No torch.

While it computes the peak is at the worst of a few named moments:

  look-up    the embedding's weights are gathered, and the activations of all other micro batches are held
  loss       logits in 16 bits and in float32, their softmax; then its gradient
  head       the head's whole gradient, and the buffer that it is reduced from
  block      a block's backward: recomputed tensors, gradients of activations and weights, weights gathered ahead
  embedding  the same as head, but of the embedding
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchllm.facts.flops import recompute_interval
from torchllm.tools.planner.parameters import StageSize, turned_features
from torchllm.tools.planner.peak import Memory, Peak
from torchllm.tools.planner.rank import BlockMemory, Rank
from torchllm.tools.planner.schedules import Kind
from torchllm.tools.planner.stage_activations import ActivationsOfStage, activations_of_stage


class Stage(NamedTuple):
    """Bytes that a stage adds: per micro batch in flight, per one with deferred weight gradients, and while it runs."""

    held: float
    ends: float
    """part of `held` that the last norm and the head keep"""
    of_head: float
    """part of `ends`: the gradient of the head's weight, computed in the forward pass with training.loss_chunk"""
    logits: float
    deferred: float
    deferred_by_head: float
    """part of `deferred`: the head's input, and the gradients of its logits in 16 bits"""
    extra: dict[Kind, Peak]
    """peak of each kind of action"""


def stage_memory(rank: Rank, stage: StageSize, kinds: Iterable[Kind]) -> Stage:
    """Return the memory that one stage adds; its actions are of `kinds`."""
    model, tokens, software = rank.model, rank.piece.tokens, rank.software
    of_blocks = [block.activations for block in rank.blocks]
    blocks = activations_of_stage(model, rank.recompute, software, stage, of_blocks)
    held, ends, logits, of_head, deferred_by_head = blocks.held, 0.0, 0.0, 0.0, 0.0
    deferred = stage.total([block.deferred for block in of_blocks])
    held += tokens * 8.0 * turned_features(model, stage)  # cosine and sine in float32
    if stage.first and model.features.normed_embeddings:
        held += of_blocks[0].norm
    if stage.last:
        if rank.has_gradients_in_forward and not rank.is_frozen:
            of_head = rank.model.predictions * software.temporary_gradients * rank.table
        ends = of_blocks[-1].norm + of_head
        if rank.training.loss_chunk == 0:
            logits = rank.model.predictions * rank.logit_bytes.kept * tokens * rank.logits_per_token()
        if rank.training.loss_chunk or not rank.is_frozen:  # the head's input, also for its chunks; or its gradient
            ends += rank.model.predictions * rank.hidden_states
        if not rank.is_frozen:
            deferred_by_head = rank.model.predictions * (rank.hidden_states + 2.0 * tokens * rank.logits_per_token())
            deferred += deferred_by_head
    else:
        held += rank.boundary
    held += ends
    memory = Stage(held, ends, of_head, logits, deferred, deferred_by_head, {})
    for kind in kinds:
        if kind == "F":
            moments = _forward(rank, stage, memory, blocks)
        elif kind == "W":
            moments = _weight_gradients(rank, stage, memory)
        else:
            moments = _backward(rank, stage, memory, blocks, kind)
        memory.extra[kind] = Peak.of(list(moments), software)
    return memory


def _previous_reduction(rank: Rank) -> float:
    """Return the buffer of the last reduction of a micro batch, which FSDP keeps until the next one's first."""
    if rank.micro_batches == 1 or not rank.reduces_every_micro_batch:
        return 0.0
    return rank.software.gradients * max(rank.table, rank.root)  # an untied embedding is a unit, too


def _loss(rank: Rank, bytes_per_logit: float) -> float:
    """Return the bytes of the logits of a micro batch, or of a chunk of it, beyond those that a forward keeps."""
    if rank.training.loss_chunk:
        tokens = min(rank.piece.tokens, rank.training.loss_chunk)
        return bytes_per_logit * tokens * rank.logits_per_token()
    beyond = bytes_per_logit - rank.logit_bytes.kept
    return beyond * rank.piece.tokens * rank.logits_per_token()


def _ends_gathered(rank: Rank, copies: int, block: BlockMemory | None) -> float:
    """Return the weights of the head (or the embedding) and of its neighboring block, if they are gathered per use.

    copies: 2 while the buffer that they are gathered in exists too. block: None if it is not gathered.
    """
    of_block = block.whole if block else 0.0
    return rank.per_use * (copies * rank.table + of_block)


def _head_gather(rank: Rank, memory: Stage, last_block: BlockMemory) -> Memory:
    """Return the moment when the head is gathered; its results do not exist yet.

    FSDP frees the buffer of the last block only after the head has been gathered. If weights are gathered once per
    step, that is in its first forward, when there are no gradients yet.
    """
    blocks = 1 + rank.parallel.keep_last_block
    gathered = rank.per_use * (2 * rank.head + blocks * last_block.whole)
    later_is_larger = rank.micro_batches > 1 and not rank.is_frozen  # with its sums of gradients
    if rank.shards > 1 and rank.parallel.pp == 1 and not later_is_larger:  # of pipelines: `first_forward`
        gathered += rank.per_step * (rank.head + last_block.whole)
    temporary = _previous_reduction(rank)
    return Memory(gathered=gathered, temporary=temporary, logits=-memory.logits, activations=-memory.of_head)


def _forward(rank: Rank, stage: StageSize, memory: Stage, blocks: ActivationsOfStage) -> Iterator[Memory]:
    """Yield the moments of a forward pass."""
    previous = _previous_reduction(rank)
    last_block = rank.last_block(stage)
    if stage.last and rank.head:
        yield _head_gather(rank, memory, last_block)
    if stage.last:
        frees_buffer = rank.model.tied_embeddings or rank.training.loss_chunk > 0
        kept_block = last_block if rank.parallel.keep_last_block else None
        gathered = _ends_gathered(rank, 1 if frees_buffer else 2, kept_block)
        is_largest = rank.micro_batches == 1 or rank.is_frozen  # else sums of gradients are larger
        if not rank.head:  # FSDP frees the buffer of the last block when it gathers a unit after it
            gathered += rank.per_use * last_block.whole
            if is_largest and rank.shards > 1 and not rank.gathers_stages:
                gathered += rank.per_step * last_block.whole
        if rank.has_gradients_in_forward:  # hidden states, and their gradient, which is the result that is kept
            rows = rank.hidden_states
            logits = _loss(rank, rank.logit_bytes.backward)
            yield Memory(gathered=gathered, temporary=previous + 2 * rows, logits=logits, activations=-rows)
        else:
            logits = _loss(rank, rank.logit_bytes.forward)
            yield Memory(gathered=gathered, temporary=previous, logits=logits)
            if not frees_buffer and is_largest and rank.shards > 1 and not rank.gathers_stages:
                yield Memory(gathered=gathered + rank.per_step * rank.table, temporary=previous, logits=logits)
    if stage.first:
        gathered = _ends_gathered(rank, 2, rank.block(stage, 0))
        if rank.is_frozen and rank.parallel.pp > 1:  # of the forward before, before any backward: else sums are larger
            gathered += rank.per_use * last_block.whole * rank.parallel.keep_last_block
        yield Memory(gathered=gathered, temporary=previous, activations=-memory.held)
    if rank.root_of(stage):  # it stays gathered; its buffer is freed once block 0 is copied out of its own buffer
        gathered = rank.per_use * 2 * (rank.root_of(stage) + rank.block(stage, 0).whole)
        yield Memory(gathered=gathered, temporary=previous, activations=-memory.held, logits=-memory.logits)
    kept = 0  # blocks of the forward before that are still gathered; if sums of gradients exist, a backward is larger
    if rank.is_frozen and _has_two_in_flight(rank, stage):
        kept = min(stage.blocks - 1, int(rank.parallel.keep_last_block))
    if not stage.blocks:  # of a measured row
        return
    held = Memory(temporary=previous, activations=-memory.ends, logits=-memory.logits)
    if stage.first and rank.is_frozen and rank.parallel.pp > 1:  # in the first block
        held = held.plus(Memory(gathered=rank.per_use * rank.table))
    yield held.plus(_copied_out(rank, stage, blocks, stage.blocks - kept, kept * last_block.whole))
    yield held.plus(Memory(gathered=rank.per_use * (last_block.whole + last_block.unit.whole)))  # its buffer stays


def _copied_out(rank: Rank, stage: StageSize, blocks: ActivationsOfStage, end: int, kept: float) -> Memory:
    """Return the largest of the moments when a block before `end` is copied out of its buffer.

    Those ahead of it are gathered into theirs, and have no activations yet. Nor has the block itself, unless its
    experts are a separate unit: that is gathered after its attention. kept: parameters of blocks that are still
    gathered.
    """
    moments = []
    for position in range(end):
        block = rank.block(stage, position)
        ahead = rank.block_parameters(stage, position, min(end, position + 1 + rank.parallel.prefetch))
        gathered = rank.per_use * (ahead.whole + block.whole + block.rearranged + kept)
        to_come = stage.blocks - position - (block.experts.whole > 0)
        moments.append(Memory(gathered=gathered, activations=-blocks.freed(stage, to_come)))
    return max(moments, key=lambda moment: moment.total)


def _has_two_in_flight(rank: Rank, stage: StageSize) -> bool:
    """Return whether a forward follows a forward, and a backward a backward, and each gathers weights itself."""
    if rank.parallel.pp == 1 or rank.micro_batches == 1 or rank.gathers_stages:
        return False
    return not (stage.last and rank.parallel.schedule == "1F1B")


def _weight_gradients(rank: Rank, stage: StageSize, memory: Stage) -> Iterator[Memory]:
    """Yield the moments when deferred gradients of weights are computed: of the blocks, then of the head."""
    after_block = rank.last_block(stage).activations.phases[-1]
    neighbors = [rank.block_parameters(stage, first, first + 2).whole for first in range(max(1, stage.blocks - 1))]
    gathered = rank.per_use * max(neighbors)
    gradient = rank.software.temporary_gradients
    yield Memory(gathered=gathered, temporary=gradient * (after_block.gradients - after_block.of_experts))
    if memory.deferred_by_head:
        yield Memory(temporary=gradient * rank.table, activations=memory.deferred_by_head - memory.deferred)


def _backward(rank: Rank, stage: StageSize, memory: Stage, blocks: ActivationsOfStage, kind: Kind) -> Iterator[Memory]:
    """Yield the moments of a backward pass, of both gradients (B) or of the gradients of inputs (I).

    The activations of a micro batch are freed as its backward proceeds, its logits first.
    """
    gradient = rank.software.temporary_gradients * (kind == "B")
    if stage.last:
        deferred = _deferred(rank, stage, memory, 0, kind)
        yield from _loss_backward(rank, memory, gradient, rank.last_block(stage), deferred)
    if rank.root_of(stage) and _has_two_in_flight(rank, stage):
        # A backward after a backward gathers the root again, with one micro batch less in flight: a backward after a
        # forward finds it gathered.
        ahead = rank.block_parameters(stage, max(0, stage.blocks - 1 - rank.parallel.prefetch), stage.blocks)
        gathered = rank.per_use * (2 * rank.root_of(stage) + ahead.whole)
        yield Memory(gathered=gathered, activations=-memory.held, logits=-memory.logits)
    last_of_views = [stage.blocks - 1 - stage.last_of(view) for view in set(stage.views)]
    for finished in sorted({0, 1, *last_of_views, stage.blocks - 1}):
        if 0 <= finished < stage.blocks:
            yield from _block_backward(rank, stage, memory, blocks, finished, kind)
    if rank.reduces_sums:
        yield _last_reduction(rank, memory, blocks, stage)
    if stage.first:
        deferred = _deferred(rank, stage, memory, stage.blocks, kind)
        yield from _embedding_backward(rank, stage, memory, deferred)


def _deferred(rank: Rank, stage: StageSize, memory: Stage, finished: int, kind: Kind) -> float:
    """Return the bytes that the head and the last `finished` blocks keep for gradients of weights that come later.

    A segment is recomputed as a whole: its finished blocks count as recomputed.
    """
    if kind == "B":
        return 0.0
    first = stage.blocks - finished
    if rank.recompute.mode == "segment":
        size = recompute_interval(rank.recompute, rank.model.layers)
        first = min(stage.blocks, size * math.ceil(first / size))
    of_blocks = [rank.block(stage, position).activations.deferred for position in range(first, stage.blocks)]
    return memory.deferred_by_head + sum(of_blocks)


def _loss_backward(
    rank: Rank, memory: Stage, gradient: float, last_block: BlockMemory, deferred: float
) -> Iterator[Memory]:
    """Yield the moments of the backward of loss and head.

    gradient: bytes of a weight's. deferred: bytes that the head keeps for it, if it is computed later.
    """
    previous = _previous_reduction(rank)
    gathered = _ends_gathered(rank, 1, last_block)
    of_weight = 0.0 if rank.is_frozen else gradient * rank.table
    if rank.has_gradients_in_forward:  # multiplied by the gradient of the loss
        yield Memory(gathered=gathered, temporary=previous + of_weight + rank.hidden_states)
    else:
        of_loss = _ends_gathered(rank, 1, last_block if rank.parallel.keep_last_block else None)
        logits = _loss(rank, rank.logit_bytes.backward)
        of_chunks = 0.0
        if 0 < rank.training.loss_chunk < rank.piece.tokens:
            # Chunks before the last left gradients of their input and, if the weight's is put off, of their logits.
            share = 1 - rank.training.loss_chunk / rank.piece.tokens
            of_chunks = of_weight + share * max(rank.hidden_states, deferred)
            # autograd's sum of chunks so far, one's own, the new sum
            yield Memory(gathered=of_loss, temporary=previous + 3 * of_weight + rank.hidden_states)
        yield Memory(gathered=of_loss, temporary=previous + of_chunks, logits=logits)
        yield Memory(gathered=of_loss, temporary=previous + of_weight, logits=_loss(rank, 2.0))  # their 16-bit gradient
    if rank.reduces_sums and not rank.is_frozen:  # the sum is copied to be sent; the result is a second buffer
        sent = rank.software.gradients * rank.head * (1 + 1 / rank.shards)
        freed = rank.per_step * rank.head
        yield Memory(gathered=-freed, temporary=sent, logits=-memory.logits, activations=-memory.of_head)
    elif rank.software.fsdp and rank.parallel.pp == 1 and not rank.is_frozen:
        of_weight += rank.software.gradients * rank.head
        previous = 0.0  # FSDP frees it before it copies the next gradients
    gathered -= rank.per_use * rank.head  # freed before its gradient is reduced
    activations = deferred - memory.of_head
    yield Memory(gathered=gathered, temporary=previous + of_weight, logits=-memory.logits, activations=activations)


def _block_backward(
    rank: Rank, stage: StageSize, memory: Stage, blocks: ActivationsOfStage, finished: int, kind: Kind
) -> Iterator[Memory]:
    """Yield the moments of a block's backward. finished: blocks whose is over."""
    gradient = rank.software.temporary_gradients
    deferred = _deferred(rank, stage, memory, finished, kind)
    tied = rank.model.tied_embeddings
    waiting = rank.table * (tied and stage.last)  # a tied embedding sums the gradients of both its uses
    head = rank.head * stage.last
    position = stage.blocks - 1 - finished
    block = rank.block(stage, position)
    recomputed = blocks.of_views[stage.views[position]].recomputed
    first_ahead = max(0, position - rank.parallel.prefetch)
    gathered = rank.per_use * (rank.block_parameters(stage, first_ahead, position + 1).whole + rank.root_of(stage))
    gathered += _buffer_of_segment(rank, stage, position)
    gradients = 0.0
    if rank.reduces_in_only_backward:
        over = rank.block_parameters(stage, position + 1, stage.blocks)
        gathered -= rank.per_step * (over.whole + head)
        gradients = rank.software.gradients * (over.shard + head / rank.shards)
    freeing = rank.per_use + rank.per_step * rank.reduces_in_only_backward
    at_once = rank.reduced_at_once
    previous = 0.0
    if finished:
        previous = at_once * rank.block(stage, position + 1).unit.whole
    elif stage.last:  # without a separate head it is of the micro batch before
        previous = at_once * head or _previous_reduction(rank)
    freed = blocks.freed(stage, finished)
    is_kept = rank.parallel.keep_last_block and not finished and not _has_two_in_flight(rank, stage)
    if block.rearranged and not is_kept:
        copies = rank.per_use * ((block.experts.whole or block.whole) + block.rearranged)  # the buffer, and one more
        activations = deferred - memory.ends - freed
        yield Memory(0.0, gradients, 0.0, gathered + copies, activations, -memory.logits)
    for phase in block.activations.phases:
        working = phase.working + recomputed
        shard = block.experts.shard if phase.reduces_experts else phase.reduced / rank.shards
        reduced = phase.reduced + shard  # the buffer that is sent, and the result
        computed = phase.gradients + waiting if kind == "B" else phase.of_experts
        temporary = max(0.0, working) + gradient * computed
        temporary += at_once * reduced
        temporary += previous * phase.after_unit
        activations = min(0.0, working) - memory.ends - freed
        activations += deferred + phase.deferred * (kind == "I")
        still_gathered = gathered - freeing * phase.freed
        yield Memory(0.0, gradients, 0.0, still_gathered, activations, -memory.logits, temporary=temporary)


def _buffer_of_segment(rank: Rank, stage: StageSize, position: int) -> float:
    """Return the bytes of a buffer that the recomputation of a segment leaves to the backward of its earlier blocks.

    FSDP keeps the buffer of the last gather of a forward until the next. The segment's last block is gathered for its
    own backward, and with it the block before, which then has run: there is no block ahead, but its buffer.
    """
    if rank.recompute.mode != "segment":
        return 0.0
    size = recompute_interval(rank.recompute, rank.model.layers)
    last = min(stage.blocks, position - position % size + size) - 1
    return rank.per_use * rank.block(stage, last - 1).whole if position < last else 0.0


def _last_reduction(rank: Rank, memory: Stage, blocks: ActivationsOfStage, stage: StageSize) -> Memory:
    """Return the moment when the last block's gradients, summed over a step's micro batches, are reduced.

    They are copied to be sent, and the result is another buffer. The weights are no longer gathered.
    """
    block = rank.last_block(stage)
    first_norm = block.activations.phases[-1].working + blocks.of_views[stage.views[-1]].recomputed
    head = rank.head * stage.last
    in_shards = 1 / rank.shards
    # The head's sums are freed by then. `gradients` stays the part held all step long, for `search.bounds`.
    reduced = block.unit.whole * (1 + in_shards) - head * (1 - in_shards)
    sent = rank.software.gradients * max(0.0, reduced)
    gathered = -rank.per_step * (block.unit.whole + head)
    activations = min(0.0, first_norm) - memory.ends
    temporary = max(0.0, first_norm) + sent
    return Memory(gathered=gathered, activations=activations, logits=-memory.logits, temporary=temporary)


def _embedding_backward(rank: Rank, stage: StageSize, memory: Stage, deferred: float) -> Iterator[Memory]:
    """Yield the moments of the embedding's gradient, which is never put off: as it is computed, and as it is reduced.

    deferred: bytes that the rest of the stage keeps for gradients of weights that come later.

    A tied embedding has three then: the head's, its own, and autograd's sum of them, which is a new tensor (in a trace
    of torch 2.13, `aten::add`, not `add_`). FSDP frees the buffer that block 0 was reduced from before it makes the
    embedding's.
    """
    gradient = rank.software.temporary_gradients
    gathered = rank.per_use * rank.root
    gradients = 0.0
    if rank.reduces_in_only_backward:
        head = rank.head * stage.last
        of_blocks = rank.block_parameters(stage, 0, stage.blocks)
        gathered -= rank.per_step * (of_blocks.whole + head)
        gradients = rank.software.gradients * (rank.parameters().shard - rank.table / rank.shards)
    rest = Memory(0.0, gradients, 0.0, gathered, deferred - memory.held, -memory.logits)
    computed = rank.reduced_at_once * rank.block(stage, 0).unit.whole + rank.hidden_states
    if rank.is_frozen:
        yield rest._replace(temporary=computed)
        return
    copies = 3 if rank.model.tied_embeddings and stage.last else 1
    yield rest._replace(temporary=computed + copies * gradient * rank.table)
    if rank.software.fsdp and rank.parallel.pp == 1 and not rank.reduces_sums:
        yield rest._replace(temporary=(gradient + rank.software.gradients) * rank.table)
