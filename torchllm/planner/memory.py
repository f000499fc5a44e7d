"""Predict the bytes that a pipeline rank holds at its peak, by purpose. No torch.

A rank holds some memory all step long (weights, optimizer, summed gradients) and some for a while. The peak is at the
worst of a few named moments:

  look-up       the embedding's weights are gathered, and the activations of all other micro batches are held
  loss          logits in 16 bits and in float32, their softmax; then its gradient
  head          the head's whole gradient, and what it is reduced from
  block         a block's backward: what it recomputes, gradients of activations and weights, weights gathered ahead
  embedding     the same as head, for the embedding
  reduction     of a pipeline, when the gradients of all its micro batches are reduced

The schedule decides how many micro batches are in flight then (`moments.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import mul
from typing import NamedTuple

from torchllm.config import Model, Parallel, Recompute, Training
from torchllm.planner.activations import BlockActivations, StageActivations, block_activations, stage_activations
from torchllm.planner.compute import Kernels, Piece, dense_width
from torchllm.planner.experts import expert_parameters, without_experts
from torchllm.planner.moments import Moment, totals
from torchllm.spec.flops import head_size, matrices, recomputes_logits
from torchllm.spec.schedules import Kind
from torchllm.spec.software import Software


class Memory(NamedTuple):
    """Bytes of a rank at its peak."""

    weights: float = 0.0
    """float32 shards, 16-bit ones of frozen weights, or the 16-bit copy of a framework that keeps one"""
    gradients: float = 0.0
    optimizer: float = 0.0
    """moments, and the float32 weights of a framework that has 16-bit ones beside them"""
    gathered: float = 0.0
    """weights that are gathered for a while, in 16 bits"""
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    """buffers in which pipeline stages receive"""
    temporary: float = 0.0
    allocator: float = 0.0
    """memory that the allocator caches and nothing uses"""
    reserve: float = 0.0

    @property
    def total(self) -> float:
        """The sum over all purposes."""
        return sum(self)

    @property
    def under_way(self) -> float:
        """The part that comes and goes within a step."""
        return self.gathered + self.activations + self.logits + self.buffers + self.temporary

    @property
    def live(self) -> float:
        """What tensors hold: without the allocator's cache and memory outside torch."""
        return sum(self[:-2])


def counted(memory: Memory, software: Software) -> float:
    """Return the part that a framework's measured peaks count: torch's counters exclude CUDA's context and NCCL."""
    return memory.live if software.peaks_allocated else memory.live + memory.allocator


class StageSize(NamedTuple):
    """What one pipeline stage has."""

    blocks: int
    first: bool
    last: bool
    dense: int = 0
    """of `blocks`, the first, dense ones of a model with experts"""


def sizes_of_split(model: Model, split: Sequence[int]) -> list[StageSize]:
    """Return what each stage has. split: the blocks of each."""
    sizes = []
    dense_left = model.dense_layers if model.experts else 0
    for stage, blocks in enumerate(split):
        dense = min(blocks, dense_left)
        dense_left -= dense
        sizes.append(StageSize(blocks, stage == 0, stage == len(split) - 1, dense))
    return sizes


def block_matrices(model: Model, tp: int) -> float:
    """Return the elements of a block's matrices on one of `tp` ranks; of a sparse block where experts are cut by tp."""
    sizes = matrices(model, layer=model.layers - 1)
    if not model.experts:
        return (sizes.attention + sizes.ffn) / tp
    shared = 3 * model.hidden * dense_width(model)
    return (sizes.attention + shared) / tp + model.hidden * model.experts + expert_parameters(model, tp)


def stage_parameters(model: Model, stage: StageSize, tp: int, vocab_parallel: bool) -> float:
    """Return the parameters of a stage on one tp rank. A tied embedding is on both ends of a pipeline.

    Of experts those that it has without ep. With ep FSDP shards those of a rank over fewer ranks, which leaves each as
    many.
    """
    features = model.features
    norm = model.hidden * (2 if features.norm == "layer" else 1)
    found = (stage.blocks - stage.dense) * block_matrices(model, tp) + stage.blocks * 2 * norm
    if stage.dense:
        found += stage.dense * block_matrices(without_experts(model), tp)
    if model.qk_norm == "head":
        found += stage.blocks * 2 * model.head_width
    if model.qk_norm == "width":
        found += stage.blocks * (model.heads + model.kv) * model.head_width / tp
    if model.has_qkv_bias:
        found += stage.blocks * (model.heads + 2 * model.kv) * model.head_width / tp
    if features.biases:  # those after a sum are whole on every rank
        found += stage.blocks * (model.ffn / tp + 2 * model.hidden)
    table = head_size(model) / (tp if vocab_parallel else 1)
    found += table * (stage.first + (stage.last and not (model.tied_embeddings and stage.first))) + stage.last * norm
    return found + (stage.first and features.learned_positions) * model.max_sequence_length * model.hidden


def gathered_parameters(model: Model, stage: StageSize, piece: Piece, vocab_parallel: bool) -> float:
    """Return the parameters of a stage that a rank has once they are gathered: with ep all of its own experts."""
    found = stage_parameters(model, stage, piece.tp, vocab_parallel)
    if piece.ep > 1:
        sparse = stage.blocks - stage.dense
        found += sparse * (expert_parameters(model, piece.ep) - expert_parameters(model, piece.tp))
    return found


class Rank(NamedTuple):
    """What the moments of a rank are computed from."""

    model: Model
    training: Training
    parallel: Parallel
    recompute: Recompute
    software: Software
    piece: Piece
    one: BlockActivations
    dense: BlockActivations
    """the same of the first, dense blocks of a model with experts"""
    zero: int
    """ZeRO stage in effect"""
    micro_batches: int
    sharded: float
    """parameters of the rank's stages, divided by the ranks that share them"""
    block: float
    """parameters of a block on a tp rank"""
    table: float
    """elements of the embedding, or of the head, on a tp rank"""

    @property
    def root(self) -> float:
        """Elements gathered besides the blocks and an untied embedding: a tied embedding, and learned positions."""
        positions = self.model.max_sequence_length * self.model.hidden * self.model.features.learned_positions
        return positions + self.table * self.model.tied_embeddings

    @property
    def last_unit(self) -> float:
        """Parameters of what a block's backward reduces last: with ep all but its experts."""
        if self.piece.ep == 1:
            return self.block
        return self.block - expert_parameters(self.model, self.piece.ep)

    @property
    def per_use(self) -> bool:
        """Whether weights are gathered each time they are used."""
        return self.zero == 3

    @property
    def has_gradients_in_forward(self) -> bool:
        """Whether the head computes its gradients in the forward pass."""
        return self.training.loss_chunk > 0 and not recomputes_logits(self.training, self.parallel)

    @property
    def hidden_states(self) -> float:
        """Bytes of a micro batch's hidden states, whole on each tp rank."""
        return 2.0 * self.piece.tokens * self.model.hidden

    @property
    def reduces_at_once(self) -> bool:
        """Whether gradients are reduced after every micro batch."""
        return self.zero >= 2 and self.parallel.pp == 1 and self.software.fsdp

    @property
    def boundary(self) -> float:
        """Bytes of the hidden states that are sent to the next stage."""
        cut = self.piece.tp if self.parallel.sequence_parallel or self.parallel.scatter_gather else 1
        return 2.0 * self.piece.tokens * self.model.hidden / cut


def rank_memory(
    model: Model,
    training: Training,
    parallel: Parallel,
    recompute: Recompute,
    kernels: Kernels,
    software: Software,
    piece: Piece,
    stages: Sequence[StageSize],
    moments: tuple[Moment, ...],
) -> Memory:
    """Return the peak of a rank that holds these stages. moments: from `moments.of_rank`, stages in the same order."""
    shards = parallel.dp_shard * parallel.cp if parallel.zero_stage else 1
    zero = parallel.zero_stage if shards > 1 else min(parallel.zero_stage, 1)
    count = training.global_batch_size // (training.micro_batch_size * parallel.data_ranks)
    one = block_activations(model, piece, parallel, kernels, software)
    dense = block_activations(without_experts(model), piece, parallel, kernels, software) if model.experts else one
    table = model.vocab * model.hidden / (parallel.tp if software.vocab_parallel else 1)
    block_size = gathered_parameters(model, StageSize(1, False, False), piece, True)
    sizes = list(dict.fromkeys(stages))
    of_sizes = [gathered_parameters(model, size, piece, software.vocab_parallel) for size in sizes]
    shards_of_sizes = [stage_parameters(model, size, parallel.tp, software.vocab_parallel) / shards for size in sizes]
    size_of = tuple(map(sizes.index, stages))
    parameters = [of_sizes[at] for at in size_of]
    sharded_parts = [shards_of_sizes[at] for at in size_of]
    sharded = sum(sharded_parts)
    rank = Rank(
        model, training, parallel, recompute, software, piece, one, dense, zero, count, sharded, block_size, table
    )
    standing = stands(rank, sum(parameters))
    moments_of_sizes = totals(moments, size_of)
    kinds = {moment.kind for moment in moments}
    alike = [stage_memory(rank, stage, kinds) for stage in sizes]
    # Bytes per stage of each size: activations and logits of a micro batch in flight, what a deferred one leaves, and
    # gradients, which FSDP sums during a step only under a pipeline: whole, then sharded once they are reduced.
    held = [stage.held for stage in alike]
    logits = [stage.logits for stage in alike]
    flying = [stage.held + stage.logits for stage in alike]
    deferred = [stage.deferred for stage in alike]
    gradient_bytes = software.gradients if software.fsdp and parallel.pp > 1 else 0.0
    whole = [gradient_bytes * size for size in of_sizes]
    reduced = [gradient_bytes * part for part in shards_of_sizes]
    extra_bytes = [{kind: extra.total for kind, extra in stage.extra.items()} for stage in alike]
    needs = []
    for moment in moments_of_sizes:
        counts = (*moment.flying, *moment.deferred, *moment.whole, *moment.reduced)
        under_way = sum(map(mul, counts, (*flying, *deferred, *whole, *reduced)))
        needs.append(under_way + extra_bytes[moment.size][moment.kind])
    most = max(needs)
    at_peak = moments_of_sizes[needs.index(most)]
    extra = alike[at_peak.size].extra[at_peak.kind]
    worst = extra._replace(
        gradients=extra.gradients + sum(map(mul, (*at_peak.whole, *at_peak.reduced), (*whole, *reduced))),
        activations=extra.activations + sum(map(mul, (*at_peak.flying, *at_peak.deferred), (*held, *deferred))),
        logits=extra.logits + sum(map(mul, at_peak.flying, logits)),
    )
    if software.fsdp and parallel.pp > 1:
        reduction = reduces(rank, parameters[0], sum(sharded_parts[1:]), stages[0], shards)
        if reduction.total > most:
            worst = reduction
    peak = Memory(*(a + b for a, b in zip(standing, worst, strict=True)))
    if software.fsdp:
        neighbours = sum((not stage.first) + (not stage.last) for stage in stages)
        peak = peak._replace(buffers=count * rank.boundary * neighbours)
    return peak._replace(allocator=(software.constants.allocator - 1) * peak.under_way, reserve=software.reserve)


def reduces(rank: Rank, parameters: float, reduced: float, stage: StageSize, shards: int) -> Memory:
    """Return the memory when the gradients of a rank's first stage, the last to end, are reduced, largest first.

    parameters: of that stage; reduced: of the other stages, on this shard.
    """
    unit = max(rank.block, rank.table * (stage.first or stage.last))
    of = rank.software.gradients
    gradients = of * (parameters + reduced + unit / shards)
    return Memory(
        gradients=gradients, gathered=-rank.software.gathered * unit * (not rank.per_use), temporary=of * unit
    )


def stands(rank: Rank, parameters: float) -> Memory:
    """Return the memory that is held all step long. parameters: of the rank's stages, gathered."""
    software, zero, parallel = rank.software, rank.zero, rank.parallel
    if software.fsdp:
        gradients = 0.0  # of pipelines: whole once a stage has some, by moment
        if parallel.pp == 1 and rank.micro_batches > 1:
            gradients = software.gradients * (rank.sharded if zero >= 2 else parameters)
        whole = 0.0 if rank.per_use else software.gathered * parameters
        moments = software.states - software.shards
        return Memory(software.shards * rank.sharded, gradients, moments * rank.sharded, whole)
    weights = software.weights * (rank.sharded if zero >= 3 else parameters)
    gradients = software.gradients * (rank.sharded if zero >= 2 else parameters)
    copies = software.gradient_copies * parameters * (parallel.data_ranks > 1)
    states = software.states * (rank.sharded if zero >= 1 else parameters)
    return Memory(weights, gradients, states, temporary=copies)


class Stage(NamedTuple):
    """Bytes that a stage adds: per micro batch in flight, per one with deferred weight gradients, and while it runs."""

    held: float
    ends: float
    """part of `held` that the last norm and the head keep"""
    of_head: float
    """part of `ends`: the gradient of the head's weight, computed in the forward pass with training.loss_chunk"""
    logits: float
    deferred: float
    extra: dict[Kind, Memory]
    """memory at the worst moment of each kind of action"""


def activations_of_stage(rank: Rank, stage: StageSize) -> StageActivations:
    """Return what the blocks of a stage keep, dense and sparse ones; the backward recomputes one at a time."""
    model, recompute, software = rank.model, rank.recompute, rank.software
    usual = stage_activations(model, stage.blocks - stage.dense, recompute, rank.one, software)
    if not stage.dense:
        return usual
    dense = stage_activations(model, stage.dense, recompute, rank.dense, software)
    again = dense.again if stage.dense == stage.blocks else max(dense.again, usual.again)
    return StageActivations(usual.held + dense.held, again)


def stage_memory(rank: Rank, stage: StageSize, kinds: Iterable[Kind]) -> Stage:
    """Return what one stage adds; its actions are of `kinds`."""
    model, piece, software = rank.model, rank.piece, rank.software
    blocks = activations_of_stage(rank, stage)
    held, ends, logits = blocks.held, 0.0, 0.0
    deferred = (stage.blocks - stage.dense) * rank.one.deferred + stage.dense * rank.dense.deferred
    of_head = software.temporary_gradients * rank.table * (stage.last and rank.has_gradients_in_forward)
    if not model.features.learned_positions:
        held += piece.tokens * 8.0 * model.head_width  # cosine and sine, each as wide as a head
    if stage.last:
        ends = rank.one.norm + piece.tokens * 2.0 * model.hidden + of_head
        rows = model.vocab / (piece.tp if software.vocab_parallel and not software.whole_logits else 1)
        whole = rank.training.loss_chunk == 0
        logits = software.kept_logits * piece.tokens * rows * whole
        deferred += piece.tokens * (2.0 * model.hidden + 2.0 * rows)
    else:
        held += rank.boundary
    held += ends
    of = Stage(held, ends, of_head, logits, deferred, {})
    for kind in kinds:
        moments = _forward(rank, stage, held) if kind == "F" else _backward(rank, stage, of, blocks, kind)
        of.extra[kind] = max(moments, key=lambda of: of.total)
    return of


def _previous(rank: Rank) -> float:
    """Return the buffer of the last reduction of a micro batch, which FSDP keeps until the next one's first."""
    return rank.software.gradients * rank.table * (rank.reduces_at_once and rank.micro_batches > 1)


def _loss(rank: Rank, each: float) -> float:
    """Return the bytes of the logits of a micro batch, or of a chunk of it; each: bytes per token and row."""
    software, piece = rank.software, rank.piece
    rows = rank.model.vocab / (piece.tp if software.vocab_parallel and not software.whole_logits else 1)
    tokens = min(piece.tokens, rank.training.loss_chunk or piece.tokens)
    return (each - (0 if rank.training.loss_chunk else software.kept_logits)) * tokens * rows


def _ends_gathered(rank: Rank, copies: int, has_block: bool = True) -> float:
    """Return the weights of the head (or the embedding) and of its neighbouring block, if they are gathered per use.

    copies: 2 while the buffer that they are gathered in exists too. has_block: whether the block is gathered.
    """
    return rank.software.gathered * (copies * rank.table + rank.block * has_block) * rank.per_use


def _forward(rank: Rank, stage: StageSize, held: float) -> Iterator[Memory]:
    """Yield the moments of a forward pass, at whose end a micro batch keeps `held` bytes."""
    software = rank.software
    previous = _previous(rank)
    if stage.last:
        frees_buffer = rank.model.tied_embeddings or rank.training.loss_chunk > 0
        gathered = _ends_gathered(rank, 1 if frees_buffer else 2, rank.parallel.keep_last_block)
        if rank.has_gradients_in_forward:  # hidden states, and their gradient, which is the result that is kept
            rows = rank.hidden_states
            logits = _loss(rank, software.logits_backward)
            yield Memory(gathered=gathered, temporary=previous + 2 * rows, logits=logits, activations=-rows)
        else:
            yield Memory(gathered=gathered, temporary=previous, logits=_loss(rank, software.logits_forward))
    if stage.first:
        yield Memory(gathered=_ends_gathered(rank, 2), temporary=previous, activations=-held)
    gathered = (2 + rank.parallel.prefetch) * software.gathered * rank.block * rank.per_use
    yield Memory(gathered=gathered, temporary=previous)


def _backward(rank: Rank, stage: StageSize, of: Stage, blocks: StageActivations, kind: Kind) -> Iterator[Memory]:
    """Yield the moments of a backward pass, of both gradients (B), of those of inputs (I) or of weights (W).

    What a micro batch has kept is freed as its backward proceeds, its logits first.
    """
    software, block, tied = rank.software, rank.block, rank.model.tied_embeddings
    root = rank.root * (stage.first or (tied and stage.last))
    waiting = rank.table * (tied and stage.last)  # a tied embedding's gradient is that of both its uses
    if kind == "W":
        yield Memory(
            gathered=2 * software.gathered * block * rank.per_use, temporary=software.temporary_gradients * block
        )
        return
    gradient = software.temporary_gradients * (kind == "B")
    reduced = software.gradients * (software.fsdp and rank.parallel.pp == 1)
    at_once = reduced * (rank.zero >= 2)
    previous = at_once * rank.last_unit
    if stage.last:
        gathered = _ends_gathered(rank, 1)
        before = _previous(rank)
        if rank.has_gradients_in_forward:  # they are multiplied by that of the loss
            yield Memory(gathered=gathered, temporary=before + gradient * rank.table + rank.hidden_states)
        else:
            of_loss = _ends_gathered(rank, 1, rank.parallel.keep_last_block)
            yield Memory(gathered=of_loss, temporary=before, logits=_loss(rank, software.logits_backward))
        later = 0.0 if tied else reduced
        temporary = before + (gradient + later) * rank.table
        if not tied:  # freed before its gradient is reduced
            gathered -= software.gathered * rank.table * rank.per_use
        yield Memory(gathered=gathered, temporary=temporary, logits=-of.logits, activations=-of.of_head)
        previous = at_once * (0 if tied else rank.table)
    gathered = software.gathered * ((1 + rank.parallel.prefetch) * block + root) * rank.per_use
    for phase in rank.one.phases:
        more = phase.more + blocks.again
        temporary = max(0.0, more) + gradient * (phase.gradients + waiting) + at_once * phase.reduced
        left = gathered - software.gathered * phase.freed * rank.per_use
        seen = min(0.0, more) - of.ends
        before = previous * phase.after_unit
        yield Memory(gathered=left, temporary=temporary + before, logits=-of.logits, activations=seen)
        if stage.blocks > 1:
            seen -= blocks.held / stage.blocks
            before = at_once * rank.last_unit * phase.after_unit
            yield Memory(gathered=left, temporary=temporary + before, logits=-of.logits, activations=seen)
    if stage.first:
        gathered = software.gathered * (block + root) * rank.per_use
        shards = rank.parallel.dp_shard * rank.parallel.cp
        of_input = 2.0 * rank.piece.tokens * rank.model.hidden
        temporary = (gradient + reduced) * rank.table + at_once * rank.last_unit + of_input
        new = reduced * (rank.sharded - rank.table / shards) * (rank.micro_batches == 1)
        yield Memory(0.0, new, gathered=gathered, temporary=temporary, logits=-of.logits, activations=-of.held)
