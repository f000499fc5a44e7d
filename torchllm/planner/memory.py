"""Predict the bytes that a pipeline rank holds at its peak, by purpose. No torch.

A rank holds some memory all step long (weights, optimizer, summed gradients) and some for a while. The peak is at the
worst of a few named moments:

  look-up       the embedding's weights are gathered, and the activations of all other micro batches are held
  loss          logits in 16 bits and in float32, their softmax; then its gradient
  head          the head's whole gradient, and what it is reduced from
  block         a block's backward: what it recomputes, gradients of activations and weights, weights gathered ahead
  embedding     the same as head, for the embedding
  reduction     of a pipeline, when the gradients of all its micro batches are reduced
  first forward of a pipeline, when weights are gathered and there are no gradients yet

The schedule decides how many micro batches are in flight then (`moments.py`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import add
from typing import NamedTuple

from torchllm.config import Lora, Model, Parallel, Recompute, Training
from torchllm.planner.activations import BlockActivations, StageActivations, block_activations, stage_activations
from torchllm.planner.compute import Kernels, Piece, dense_width
from torchllm.planner.experts import expert_parameters, without_experts
from torchllm.planner.frozen_weights import MOMENTS, WEIGHT, uncut_elements
from torchllm.planner.moments import STAGES_AHEAD, Moment, Total, totals
from torchllm.spec.flops import WITHOUT_LORA, head_size, matrices, recompute_interval, recomputes_logits
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

    def plus(self, added: "Memory") -> "Memory":
        """Return the sum, purpose by purpose."""
        return Memory(*map(add, self, added))

    @property
    def under_way(self) -> float:
        """The part that comes and goes within a step."""
        return self.gathered + self.activations + self.logits + self.buffers + self.temporary

    @property
    def live(self) -> float:
        """What tensors hold: without the allocator's cache and memory outside torch."""
        return sum(self[:-2])


def reserved(memory: Memory, software: Software) -> float:
    """Return the bytes that the allocator takes for what tensors hold: it caches a part of what comes and goes."""
    return memory.total + (software.constants.allocator - 1) * memory.under_way


class Peak(NamedTuple):
    """The worst of several moments. What tensors hold and what is reserved may be largest at two different ones."""

    live: Memory
    """the moment at which tensors hold most"""
    reserved: float
    """bytes that the allocator has reserved at most"""

    @classmethod
    def of(cls, moments: Sequence[Memory], software: Software) -> "Peak":
        """Return the peak of these moments."""
        live = max(moments, key=lambda moment: moment.total)
        most_reserved = max([reserved(moment, software) for moment in moments])
        return cls(live, most_reserved)

    def with_peak(self, other: "Peak") -> "Peak":
        """Return the peak of the moments of both."""
        live = max(self.live, other.live, key=lambda moment: moment.total)
        return Peak(live, max(self.reserved, other.reserved))


def counted(memory: Memory, software: Software) -> float:
    """Return the part that a framework's measured peaks count: torch's counters exclude CUDA's context and NCCL.

    Reserved bytes also have what the moments broke up. torch's optimizers make them at the end of the first step, in
    segments that its activations have left; the second step finds no room there, and reserves as much again. Of FSDP2
    runs of Llama 3 8B that torchtitan publishes (d9bdfbb206), that is 7.6 GiB on 8 GPUs, whose moments are 7.5 GiB, and
    1.0 on 64, with 0.9. Where memory is short the allocator frees such segments, so that `Memory.total` has none.
    """
    if software.peaks_allocated:
        return memory.live
    broken_up = min(memory.optimizer, memory.under_way) if software.fsdp else 0.0
    return memory.live + max(memory.allocator, broken_up)


class StageSize(NamedTuple):
    """What one pipeline stage has."""

    blocks: int
    first: bool
    last: bool
    dense: int = 0
    """of `blocks`, the first, dense ones of a model with experts"""
    first_recomputed: int = 0
    """of recompute.mode every_k: number within the stage of the first block that is recomputed"""


def sizes_of_split(model: Model, split: Sequence[int], recompute: Recompute) -> list[StageSize]:
    """Return what each stage has. split: the blocks of each."""
    sizes = []
    dense_left = model.dense_layers if model.experts else 0
    first_recomputed = 0
    for stage, blocks in enumerate(split):
        dense = min(blocks, dense_left)
        dense_left -= dense
        is_last = stage == len(split) - 1
        sizes.append(StageSize(blocks, stage == 0, is_last, dense, first_recomputed))
        if recompute.mode == "every_k":  # every k-th block of the model, wherever stages begin
            first_recomputed = (first_recomputed - blocks) % recompute_interval(recompute, model.layers)
    return sizes


def block_matrices(model: Model, tp: int) -> float:
    """Return the elements of a block's matrices on one of `tp` ranks; of a sparse block where experts are cut by tp."""
    sizes = matrices(model, layer=model.layers - 1)
    if not model.experts:
        return (sizes.attention + sizes.ffn) / tp
    shared = 3 * model.hidden * dense_width(model)
    router = model.hidden * model.experts
    return (sizes.attention + shared) / tp + router + expert_parameters(model, tp)


@lru_cache(maxsize=1024)
def stage_parameters(model: Model, stage: StageSize, tp: int, vocab_parallel: bool) -> float:
    """Return the parameters of a stage on one tp rank. A tied embedding is on both ends of a pipeline.

    Of experts those that it has without ep. With ep FSDP shards those of a rank over fewer ranks, which leaves each as
    many. Cached: many layouts have stages of the same sizes.
    """
    features = model.features
    norm = model.hidden * (2 if features.norm == "layer" else 1)
    queries = model.heads * model.head_width / tp
    keys = model.kv * model.head_width / tp
    count = (stage.blocks - stage.dense) * block_matrices(model, tp)
    count += stage.blocks * 2 * norm
    if stage.dense:
        count += stage.dense * block_matrices(without_experts(model), tp)
    if model.qk_norm == "head":
        count += stage.blocks * 2 * model.head_width
    if model.qk_norm == "width":
        count += stage.blocks * (queries + keys)
    if model.has_qkv_bias:
        count += stage.blocks * (queries + 2 * keys)
    if features.biases:  # those after a sum are whole on every rank
        count += stage.blocks * (model.ffn / tp + 2 * model.hidden)
    table = head_size(model) / (tp if vocab_parallel else 1)
    if stage.first:
        positions = features.learned_positions * model.max_sequence_length
        count += table + positions * model.hidden
    if stage.last:
        is_first_too = model.tied_embeddings and stage.first
        count += norm + table * (not is_first_too)
    return count


def gathered_parameters(model: Model, stage: StageSize, piece: Piece, vocab_parallel: bool) -> float:
    """Return the parameters of a stage that a rank has once they are gathered: with ep all of its own experts."""
    count = stage_parameters(model, stage, piece.tp, vocab_parallel)
    if piece.ep > 1:
        sparse = stage.blocks - stage.dense
        of_rank = expert_parameters(model, piece.ep)
        count += sparse * (of_rank - expert_parameters(model, piece.tp))
    return count


class ShardedParameters(NamedTuple):
    """Parameters of some part of the model."""

    whole: float
    """on a tp rank, gathered"""
    shard: float
    """divided by the ranks that share them"""


def sum_of_parameters(stages: Sequence[ShardedParameters]) -> ShardedParameters:
    """Return the parameters of several stages together."""
    whole = sum([stage.whole for stage in stages])
    shard = sum([stage.shard for stage in stages])
    return ShardedParameters(whole, shard)


class LogitBytes(NamedTuple):
    """Bytes that a loss holds per logit."""

    kept: float
    """from its forward to its backward"""
    forward: float
    """at the peak of its forward"""
    backward: float
    """at the peak of its backward"""

    @classmethod
    def of(cls, kernels: Kernels, software: Software) -> "LogitBytes":
        """Return those of a compiled loss, which converts logits as it reads them, or of the framework's own."""
        if kernels.compiled_loss:
            return COMPILED_LOSS
        return cls(software.kept_logits, software.logits_forward, software.logits_backward)


COMPILED_LOSS = LogitBytes(kept=2.0, forward=2.0, backward=4.0)
"""logits in 16 bits, and then their gradient beside them"""


class Block(NamedTuple):
    """A block of one of the kinds that a model has."""

    activations: BlockActivations
    """what it keeps of a micro batch"""
    unit: ShardedParameters
    """what FSDP gathers and reduces as a whole: all of it, with ep all but its experts"""
    experts: ShardedParameters
    """those of the experts of a sparse block, which with ep are a unit of their own; else 0"""

    @property
    def whole(self) -> float:
        """Parameters on a tp rank, gathered."""
        return self.unit.whole + self.experts.whole

    @property
    def shard(self) -> float:
        """Parameters, divided by the ranks that share them."""
        return self.unit.shard + self.experts.shard


class Rank(NamedTuple):
    """What the moments of a rank are computed from."""

    model: Model
    training: Training
    parallel: Parallel
    recompute: Recompute
    software: Software
    piece: Piece
    usual: Block
    """with experts: a sparse block"""
    dense: Block
    """of the first, dense blocks of a model with experts; without experts all are alike"""
    zero: int
    """ZeRO stage in effect"""
    micro_batches: int
    logit_bytes: LogitBytes
    sharded: float
    """parameters of the rank's stages, divided by the ranks that share them"""
    table: float
    """elements of the embedding, or of the head, on a tp rank"""
    is_frozen: bool = False
    """whether only low-rank updates are trained: the head and the embedding have no gradients"""

    def block(self, stage: StageSize, position: int) -> Block:
        """Return a block of a stage. The first blocks of a model with experts are dense."""
        return self.dense if position < stage.dense else self.usual

    def parameters(self, stage: StageSize, first: int, end: int) -> ShardedParameters:
        """Return the parameters of the blocks from `first` to `end` - 1 of a stage."""
        dense = max(0, min(end, stage.dense) - first)
        usual = end - first - dense
        return ShardedParameters(
            whole=usual * self.usual.whole + dense * self.dense.whole,
            shard=usual * self.usual.shard + dense * self.dense.shard,
        )

    def last_block(self, stage: StageSize) -> Block:
        """Return the last block of a stage."""
        return self.block(stage, max(0, stage.blocks - 1))

    @property
    def shards(self) -> int:
        """Number of ranks that share the weights that are not those of experts."""
        return self.parallel.dp_shard * self.parallel.cp if self.parallel.zero_stage else 1

    @property
    def root(self) -> float:
        """Elements gathered besides the blocks and an untied embedding: a tied embedding, and learned positions."""
        model = self.model
        root = self.table if model.tied_embeddings else 0.0
        if model.features.learned_positions:
            root += model.max_sequence_length * model.hidden
        return root

    @property
    def head(self) -> float:
        """Elements of a head that is a unit of its own: 0 if it is tied to the embedding."""
        return 0.0 if self.model.tied_embeddings else self.table

    @property
    def gathers_per_use(self) -> bool:
        """Whether weights are gathered each time they are used."""
        return self.zero == 3

    @property
    def per_use(self) -> float:
        """Bytes of a weight that is gathered for each use; 0 if weights are gathered once per step."""
        return self.software.gathered * self.gathers_per_use

    @property
    def per_step(self) -> float:
        """Bytes of a weight that is gathered once per step; 0 if weights are gathered for each use.

        Where every rank holds whole weights in the type of the computation, there is nothing to gather.
        """
        is_there = self.shards == 1 and self.software.shards == self.software.gathered
        if is_there or self.gathers_per_use or not self.software.fsdp:
            return 0.0
        return self.software.gathered

    @property
    def has_gradients_in_forward(self) -> bool:
        """Whether the head computes its gradients in the forward pass."""
        return self.training.loss_chunk > 0 and not recomputes_logits(self.training, self.parallel)

    @property
    def gathers_stages(self) -> bool:
        """Whether whole stages are gathered ahead, as torch's schedules of several stages per rank do."""
        return self.parallel.pp > 1 and self.parallel.schedule not in ("GPipe", "1F1B")

    @property
    def hidden_states(self) -> float:
        """Bytes of a micro batch's hidden states, whole on each tp rank."""
        return 2.0 * self.piece.tokens * self.model.hidden

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether gradients are reduced after every micro batch of several."""
        return self.zero >= 2 and self.parallel.pp == 1 and self.software.fsdp

    @property
    def reduces_in_only_backward(self) -> bool:
        """Whether a step has one backward, which reduces gradients and frees weights as it goes."""
        return self.micro_batches == 1 and self.parallel.pp == 1 and self.software.fsdp

    @property
    def reduces_sums(self) -> bool:
        """Whether the last of several backwards reduces the gradients that were summed over all."""
        is_last_of_several = self.micro_batches > 1 and self.zero < 2
        return is_last_of_several and self.parallel.pp == 1 and self.software.fsdp

    @property
    def reduced_at_once(self) -> float:
        """Bytes of a gradient that is reduced right after the backward of its unit, in the micro batch at hand."""
        return self.software.gradients * (self.reduces_every_micro_batch or self.reduces_in_only_backward)

    @property
    def boundary(self) -> float:
        """Bytes of the hidden states that are sent to the next stage."""
        cut = self.piece.tp if self.parallel.sequence_parallel or self.parallel.scatter_gather else 1
        return 2.0 * self.piece.tokens * self.model.hidden / cut

    def logits_per_token(self) -> float:
        """Return the logits of a token on this rank."""
        is_cut = self.software.vocab_parallel and not self.software.whole_logits
        return self.model.vocab / (self.piece.tp if is_cut else 1)


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
    lora: Lora = WITHOUT_LORA,
) -> Memory:
    """Return the peak of a rank that holds these stages. moments: from `moments.of_rank`, stages in the same order.

    With lora `software` is `frozen_weights.with_frozen_weights` of it.
    """
    shards = parallel.dp_shard * parallel.cp if parallel.zero_stage else 1
    micro_batches = training.global_batch_size // (training.micro_batch_size * parallel.data_ranks)
    vocab_parallel = software.vocab_parallel
    zero = parallel.zero_stage if shards > 1 else min(parallel.zero_stage, 1)
    sizes = list(dict.fromkeys(stages))
    parameters = {}
    for size in sizes:
        whole = gathered_parameters(model, size, piece, vocab_parallel)
        shard = stage_parameters(model, size, parallel.tp, vocab_parallel) / shards
        parameters[size] = ShardedParameters(whole, shard)
    of_stages = [parameters[size] for size in stages]
    all_stages = sum_of_parameters(of_stages)
    activations = activations_of_blocks(model, piece, parallel, kernels, software, lora)
    usual, dense = blocks_of_rank(model, piece, activations, shards)
    table = model.vocab * model.hidden / (parallel.tp if vocab_parallel else 1)
    rank = Rank(
        model,
        training,
        parallel,
        recompute,
        software,
        piece,
        usual,
        dense,
        zero=zero,
        micro_batches=micro_batches,
        logit_bytes=LogitBytes.of(kernels, software),
        sharded=all_stages.shard,
        table=table,
        is_frozen=lora.is_on,
    )
    standing = standing_memory(rank, all_stages.whole)
    if lora.is_on:
        blocks = sum(stage.blocks for stage in stages)
        standing = standing.plus(updates_memory(rank, lora, blocks))
    kinds = {moment.kind for moment in moments}
    memory_of_size = {size: stage_memory(rank, size, kinds) for size in sizes}
    costs = {size: StageMemoryCosts.of(rank, size, memory_of_size[size], parameters[size]) for size in sizes}
    peak = peak_of_actions(stages, memory_of_size, costs, moments, software)
    if software.fsdp and parallel.pp > 1:
        peak = peak.with_peak(peak_of_pipeline(rank, stages, of_stages, memory_of_size[stages[-1]]))
    if software.fsdp:
        ends = sum(stage.first + stage.last for stage in stages)
        neighbours = 2 * len(stages) - ends
        standing = standing._replace(buffers=micro_batches * rank.boundary * neighbours)
    memory = standing.plus(peak.live)
    cached = reserved(standing, software) + peak.reserved - memory.total
    return memory._replace(allocator=cached, reserve=software.reserve)


def peak_of_actions(
    stages: Sequence[StageSize],
    memory_of_size: "dict[StageSize, Stage]",
    costs_of_size: "dict[StageSize, StageMemoryCosts]",
    moments: Sequence[Moment],
    software: Software,
) -> Peak:
    """Return the peak of what a rank with these stages holds for a while, of all its actions."""
    sizes = list(memory_of_size)
    memories = list(memory_of_size.values())
    costs = list(costs_of_size.values())
    reserved_costs = [cost.reserved(software) for cost in costs]
    live = Memory()
    most_live = most_reserved = -math.inf
    size_of = tuple(map(sizes.index, stages))
    for moment in totals(moments, size_of):
        extra = memories[moment.size].extra[moment.kind]
        most_reserved = max(most_reserved, extra.reserved + sum_of_stages(moment, reserved_costs))
        bytes = extra.live.total + sum_of_stages(moment, costs)
        if bytes > most_live:
            most_live = bytes
            live = extra.live.plus(memory_of_stages(moment, costs))
    return Peak(live, most_reserved)


def peak_of_pipeline(
    rank: Rank, stages: Sequence[StageSize], parameters: Sequence[ShardedParameters], last: "Stage"
) -> Peak:
    """Return the peak of what FSDP holds for a while before and after a pipeline's actions.

    parameters: of each stage. last: what the last stage of the rank adds.
    """
    later = sum_of_parameters(parameters[1:])
    moments = list(pipeline_reductions(rank, stages[0], parameters[0].whole, later))
    moments.append(first_forward(rank, stages, parameters, last))
    return Peak.of(moments, rank.software)


def blocks_of_rank(model: Model, piece: Piece, activations: "ActivationsOfBlocks", shards: int) -> tuple[Block, Block]:
    """Return the usual block of a model, and a dense one. shards: ranks that share weights."""
    size = StageSize(1, first=False, last=False)
    whole = gathered_parameters(model, size, piece, True)
    shard = stage_parameters(model, size, piece.tp, True) / shards
    experts = ShardedParameters(0.0, 0.0)
    if piece.ep > 1:
        experts_shard = expert_parameters(model, piece.tp) / shards
        experts = ShardedParameters(expert_parameters(model, piece.ep), experts_shard)
    unit = ShardedParameters(whole - experts.whole, shard - experts.shard)
    usual = Block(activations.usual, unit, experts)
    if not model.experts:
        return usual, usual
    dense = stage_parameters(model, size._replace(dense=1), piece.tp, True)
    dense_unit = ShardedParameters(dense, dense / shards)
    return usual, Block(activations.dense, dense_unit, ShardedParameters(0.0, 0.0))


class StageMemoryCosts(NamedTuple):
    """Bytes that a stage has because of what is under way in it, whichever stage of the rank computes."""

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
    last_block: float
    """of its last block's weights, which stay gathered from a forward to the following backward"""
    ahead: float
    """of all its weights, gathered for its first forward"""

    @classmethod
    def of(cls, rank: Rank, size: StageSize, stage: "Stage", parameters: ShardedParameters) -> "StageMemoryCosts":
        """Return the bytes of a stage. FSDP sums gradients of a stage, and frees its weights, under a pipeline only."""
        gradient = freed = 0.0
        if rank.software.fsdp and rank.parallel.pp > 1:
            gradient = rank.software.gradients
            freed = rank.per_step * parameters.whole
        whole = gradient * parameters.whole
        reduced = gradient * parameters.shard
        last_block = rank.per_use * rank.last_block(size).whole * rank.parallel.keep_last_block
        ahead = rank.per_use * parameters.whole * rank.gathers_stages
        return cls(stage.held, stage.logits, stage.deferred, whole, reduced, freed, last_block, ahead)

    def reserved(self, software: Software) -> "StageMemoryCosts":
        """Return the bytes that the allocator takes for them (`reserved`): it frees those of gradients for others."""
        allocator = software.constants.allocator
        return StageMemoryCosts(
            activations=allocator * self.activations,
            logits=allocator * self.logits,
            deferred=allocator * self.deferred,
            whole=self.whole,
            reduced=self.reduced,
            freed=allocator * self.freed,
            last_block=allocator * self.last_block,
            ahead=allocator * self.ahead,
        )


def sum_of_stages(moment: Total, costs: Sequence[StageMemoryCosts]) -> float:
    """Return the total of `memory_of_stages`, in fewer operations."""
    total = 0.0
    for size, stage in enumerate(costs):
        total += moment.flying[size] * (stage.activations + stage.logits)
        total += moment.deferred[size] * stage.deferred
        total += moment.whole[size] * stage.whole
        total += moment.reduced[size] * (stage.reduced - stage.freed)
        total += moment.waiting[size] * stage.last_block
        total += moment.ahead[size] * stage.ahead
    return total


def memory_of_stages(moment: Total, costs: Sequence[StageMemoryCosts]) -> Memory:
    """Return what all stages of a rank have under way at a moment."""
    memory = Memory()
    for size, stage in enumerate(costs):
        flying, reduced = moment.flying[size], moment.reduced[size]
        activations = flying * stage.activations + moment.deferred[size] * stage.deferred
        gradients = moment.whole[size] * stage.whole + reduced * stage.reduced
        gathered = moment.waiting[size] * stage.last_block - reduced * stage.freed
        gathered += moment.ahead[size] * stage.ahead
        logits = flying * stage.logits
        of_stage = Memory(gradients=gradients, gathered=gathered, activations=activations, logits=logits)
        memory = memory.plus(of_stage)
    return memory


class Units(NamedTuple):
    """Parts of a stage that are alike. FSDP gathers and reduces each as a whole."""

    parameters: ShardedParameters
    number: int
    has_one_matrix: bool = False
    """whether the last of its parameters is all of it"""


def units_of_stage(rank: Rank, stage: StageSize) -> Iterator[Units]:
    """Yield the units of a stage, in the order in which a pipeline reduces their gradients."""
    table = ShardedParameters(rank.table, rank.table / rank.shards)
    if stage.first or (stage.last and not rank.head):
        yield Units(table, 1, has_one_matrix=True)
    if stage.dense:
        yield Units(rank.dense.unit, stage.dense)
    sparse_blocks = stage.blocks - stage.dense
    yield Units(rank.usual.unit, sparse_blocks)
    if rank.piece.ep > 1:
        yield Units(rank.usual.experts, sparse_blocks)
    if stage.last and rank.head:
        yield Units(table, 1, has_one_matrix=True)


def pipeline_reductions(rank: Rank, stage: StageSize, parameters: float, later: ShardedParameters) -> Iterator[Memory]:
    """Yield the memory when the gradients of a rank's first stage, the last to end, are reduced, unit by unit.

    A unit's weights are freed, and its gradients are copied to be sent. Then the whole gradients are freed but the last
    one, to which FSDP to torch 2.14 still refers while it takes memory for what comes back. Where no other rank shares
    a unit, nothing comes back, but the copy is divided into one copy more.

    parameters: of that stage. later: of the rank's other stages, whose gradients are reduced by then.
    """
    bytes_per_gradient = rank.software.gradients
    held = parameters + later.shard
    freed = later.whole
    for (whole, shard), number, has_one_matrix in units_of_stage(rank, stage):
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


def first_forward(
    rank: Rank, stages: Sequence[StageSize], parameters: Sequence[ShardedParameters], last: "Stage"
) -> Memory:
    """Return the memory when a pipeline gathers weights for a step's first forward, and there are no gradients yet.

    A schedule of several stages per rank gathers whole stages ahead, each unit into a buffer; when the first stage
    computes, one unit after the other is copied out of its buffer. 1F1B and GPipe gather a unit when it is used: when
    the last one of a stage is copied out, the buffer of the one before it is still there. Beside sums of gradients that
    is little, but with LoRA there are none.

    parameters: of each stage. last: what the last stage of the rank keeps of a micro batch.
    """
    if rank.shards == 1:
        return Memory()
    if rank.gathers_stages:
        copied = stages[:1] if rank.gathers_per_use else stages
        largest = max(max(unit_sizes(rank, stage)) for stage in copied)
        ahead = sum_of_parameters(parameters[:STAGES_AHEAD]).whole
        return Memory(gathered=rank.per_use * ahead + rank.software.gathered * largest)
    stage = stages[-1]
    last_two = unit_sizes(rank, stage)[-2:]
    blocks_passed = stage.blocks if stage.last else stage.blocks - 1
    activations = (last.held - last.ends) * blocks_passed / stage.blocks
    return Memory(gathered=rank.per_step * sum(last_two), activations=activations)


def unit_sizes(rank: Rank, stage: StageSize) -> list[float]:
    """Return the parameters of each unit of a stage, gathered."""
    sizes: list[float] = []
    for units in units_of_stage(rank, stage):
        sizes += units.number * [units.parameters.whole]
    return sizes


def standing_memory(rank: Rank, parameters: float) -> Memory:
    """Return the memory that is held all step long. parameters: of the rank's stages, gathered."""
    software, zero, parallel = rank.software, rank.zero, rank.parallel
    if software.fsdp:
        gradients = 0.0  # of pipelines: whole once a stage has some, by moment
        if parallel.pp == 1 and rank.micro_batches > 1:
            gradients = software.gradients * (rank.sharded if zero >= 2 else parameters)
        held = sharded_states(software, rank.sharded)
        return held.plus(Memory(gradients=gradients, gathered=rank.per_step * parameters))
    weights = software.weights * (rank.sharded if zero >= 3 else parameters)
    gradients = software.gradients * (rank.sharded if zero >= 2 else parameters)
    states = software.states * (rank.sharded if zero >= 1 else parameters)
    copies = software.gradient_copies * parameters * (parallel.data_ranks > 1)
    return Memory(weights, gradients, states, temporary=copies)


def updates_memory(rank: Rank, lora: Lora, blocks: int) -> Memory:
    """Return what low-rank updates need beyond their share of all parameters: tp cuts one factor of each alone."""
    beyond = blocks * uncut_elements(rank.model, lora, rank.piece.tp)
    in_shards = beyond / rank.shards
    gradients = 0.0
    if rank.micro_batches > 1 and rank.parallel.pp == 1:
        gradients = WEIGHT * (in_shards if rank.zero >= 2 else beyond)
    return updates_states(in_shards).plus(Memory(gradients=gradients))


def sharded_states(software: Software, parameters: float) -> Memory:
    """Return the weights and moments of an FSDP rank. parameters: its share of them."""
    return Memory(weights=software.shards * parameters, optimizer=(software.states - software.shards) * parameters)


def updates_states(elements: float) -> Memory:
    """Return the weights and moments of low-rank updates, of which a rank has these elements beyond its share."""
    return Memory(weights=WEIGHT * elements, optimizer=MOMENTS * elements)


class Stage(NamedTuple):
    """Bytes that a stage adds: per micro batch in flight, per one with deferred weight gradients, and while it runs."""

    held: float
    ends: float
    """part of `held` that the last norm and the head keep"""
    of_head: float
    """part of `ends`: the gradient of the head's weight, computed in the forward pass with training.loss_chunk"""
    logits: float
    deferred: float
    extra: dict[Kind, Peak]
    """peak of each kind of action"""


class ActivationsOfBlocks(NamedTuple):
    """What a block keeps of each kind that a model has; both are the same in one without experts."""

    usual: BlockActivations
    """with experts: of a sparse block"""
    dense: BlockActivations
    """of the first, dense blocks of a model with experts"""


def activations_of_blocks(
    model: Model, piece: Piece, parallel: Parallel, kernels: Kernels, software: Software, lora: Lora
) -> ActivationsOfBlocks:
    """Return what the blocks of a layout keep."""
    ulysses = parallel.cp > 1 and parallel.cp_method == "ulysses"
    usual = block_activations(model, piece, kernels, software, lora, ulysses)
    if not model.experts:
        return ActivationsOfBlocks(usual, usual)
    dense = block_activations(without_experts(model), piece, kernels, software, lora, ulysses)
    return ActivationsOfBlocks(usual, dense)


class ActivationsOfStage(NamedTuple):
    """What the blocks of a stage keep of one micro batch, by kind."""

    usual: StageActivations
    dense: StageActivations

    @property
    def held(self) -> float:
        """Bytes that are kept until the backward."""
        return self.usual.held + self.dense.held

    def freed(self, stage: StageSize, finished: int) -> float:
        """Return the part of `held` that is freed once the backward of the last `finished` blocks is over."""
        usual_blocks = stage.blocks - stage.dense
        finished_usual = min(finished, usual_blocks)
        finished_dense = finished - finished_usual
        freed = 0.0
        if finished_usual:
            freed += self.usual.held * finished_usual / usual_blocks
        if finished_dense:
            freed += self.dense.held * finished_dense / stage.dense
        return freed


def activations_of_stage(
    model: Model, recompute: Recompute, software: Software, stage: StageSize, of_blocks: ActivationsOfBlocks
) -> ActivationsOfStage:
    """Return what the blocks of a stage keep, dense and sparse ones; the backward recomputes one at a time."""
    usual_blocks = stage.blocks - stage.dense
    first_recomputed = (stage.first_recomputed - stage.dense) % recompute_interval(recompute, model.layers)
    return ActivationsOfStage(
        stage_activations(model, usual_blocks, recompute, of_blocks.usual, software, first_recomputed),
        stage_activations(model, stage.dense, recompute, of_blocks.dense, software, stage.first_recomputed),
    )


def stage_memory(rank: Rank, stage: StageSize, kinds: Iterable[Kind]) -> Stage:
    """Return what one stage adds; its actions are of `kinds`."""
    model, tokens, software = rank.model, rank.piece.tokens, rank.software
    of_blocks = ActivationsOfBlocks(rank.usual.activations, rank.dense.activations)
    blocks = activations_of_stage(model, rank.recompute, software, stage, of_blocks)
    held, ends, logits, of_head = blocks.held, 0.0, 0.0, 0.0
    deferred = (stage.blocks - stage.dense) * rank.usual.activations.deferred
    deferred += stage.dense * rank.dense.activations.deferred
    if not model.features.learned_positions:
        held += tokens * 8.0 * model.rotary_width  # cosine and sine in float32
    if stage.last:
        if rank.has_gradients_in_forward and not rank.is_frozen:
            of_head = software.temporary_gradients * rank.table
        ends = rank.usual.activations.norm + of_head
        if rank.training.loss_chunk == 0:
            logits = rank.logit_bytes.kept * tokens * rank.logits_per_token()
        if not rank.is_frozen:  # the head's input, for the gradient of its weight
            ends += tokens * 2.0 * model.hidden
            deferred += tokens * (2.0 * model.hidden + 2.0 * rank.logits_per_token())
    else:
        held += rank.boundary
    held += ends
    memory = Stage(held, ends, of_head, logits, deferred, {})
    for kind in kinds:
        if kind == "F":
            moments = _forward(rank, stage, memory)
        elif kind == "W":
            moments = _weight_gradients(rank, stage)
        else:
            moments = _backward(rank, stage, memory, blocks, kind)
        memory.extra[kind] = Peak.of(list(moments), software)
    return memory


def _previous_reduction(rank: Rank) -> float:
    """Return the buffer of the last reduction of a micro batch, which FSDP keeps until the next one's first."""
    if rank.micro_batches == 1 or not rank.reduces_every_micro_batch:
        return 0.0
    return rank.software.gradients * rank.table


def _loss(rank: Rank, bytes_per_logit: float) -> float:
    """Return the bytes of the logits of a micro batch, or of a chunk of it, beyond those that a forward keeps."""
    if rank.training.loss_chunk:
        tokens = min(rank.piece.tokens, rank.training.loss_chunk)
        return bytes_per_logit * tokens * rank.logits_per_token()
    beyond = bytes_per_logit - rank.logit_bytes.kept
    return beyond * rank.piece.tokens * rank.logits_per_token()


def _ends_gathered(rank: Rank, copies: int, block: Block | None) -> float:
    """Return the weights of the head (or the embedding) and of its neighbouring block, if they are gathered per use.

    copies: 2 while the buffer that they are gathered in exists too. block: None if it is not gathered.
    """
    of_block = block.whole if block else 0.0
    return rank.per_use * (copies * rank.table + of_block)


def _head_gather(rank: Rank, memory: Stage, last_block: Block) -> Memory:
    """Return the moment at which the head is gathered, of which there are no results yet.

    FSDP frees the buffer in which the last block came only when the head is there. If weights are gathered once per
    step, that is in its first forward, when there are no gradients yet.
    """
    blocks = 1 + rank.parallel.keep_last_block
    gathered = rank.per_use * (2 * rank.head + blocks * last_block.whole)
    later_is_larger = rank.micro_batches > 1 and not rank.is_frozen  # with its sums of gradients
    if rank.shards > 1 and rank.parallel.pp == 1 and not later_is_larger:  # of pipelines: `first_forward`
        gathered += rank.per_step * (rank.head + last_block.whole)
    temporary = _previous_reduction(rank)
    return Memory(gathered=gathered, temporary=temporary, logits=-memory.logits, activations=-memory.of_head)


def _forward(rank: Rank, stage: StageSize, memory: Stage) -> Iterator[Memory]:
    """Yield the moments of a forward pass."""
    previous = _previous_reduction(rank)
    last_block = rank.last_block(stage)
    if stage.last and rank.head:
        yield _head_gather(rank, memory, last_block)
    if stage.last:
        frees_buffer = rank.model.tied_embeddings or rank.training.loss_chunk > 0
        kept_block = last_block if rank.parallel.keep_last_block else None
        gathered = _ends_gathered(rank, 1 if frees_buffer else 2, kept_block)
        if rank.has_gradients_in_forward:  # hidden states, and their gradient, which is the result that is kept
            rows = rank.hidden_states
            logits = _loss(rank, rank.logit_bytes.backward)
            yield Memory(gathered=gathered, temporary=previous + 2 * rows, logits=logits, activations=-rows)
        else:
            logits = _loss(rank, rank.logit_bytes.forward)
            yield Memory(gathered=gathered, temporary=previous, logits=logits)
            is_largest = rank.micro_batches == 1 or rank.is_frozen  # else sums of gradients are larger
            if not frees_buffer and is_largest and not rank.gathers_stages:
                yield Memory(gathered=gathered + rank.per_step * rank.table, temporary=previous, logits=logits)
    if stage.first:
        gathered = _ends_gathered(rank, 2, rank.block(stage, 0))
        if rank.is_frozen and rank.parallel.pp > 1:  # of the forward before, before any backward: else sums are larger
            gathered += rank.per_use * last_block.whole * rank.parallel.keep_last_block
        yield Memory(gathered=gathered, temporary=previous, activations=-memory.held)
    units = 1 + min(stage.blocks, 1 + rank.parallel.prefetch)  # one of them is the buffer of the next
    gathered = rank.per_use * units * last_block.whole
    if stage.first and rank.is_frozen and rank.parallel.pp > 1:  # in the first block
        gathered += rank.per_use * rank.table
    yield Memory(gathered=gathered, temporary=previous)


def _weight_gradients(rank: Rank, stage: StageSize) -> Iterator[Memory]:
    """Yield the moment at which deferred gradients of weights are computed."""
    units = min(stage.blocks, 2)
    block = rank.last_block(stage).whole
    gathered = rank.per_use * units * block
    yield Memory(gathered=gathered, temporary=rank.software.temporary_gradients * block)


def _backward(rank: Rank, stage: StageSize, memory: Stage, blocks: ActivationsOfStage, kind: Kind) -> Iterator[Memory]:
    """Yield the moments of a backward pass, of both gradients (B) or of those of inputs (I).

    What a micro batch has kept is freed as its backward proceeds, its logits first.
    """
    gradient = rank.software.temporary_gradients * (kind == "B")
    if stage.last:
        yield from _loss_backward(rank, memory, gradient, rank.last_block(stage))
    usual_blocks = stage.blocks - stage.dense
    for finished in sorted({0, 1, usual_blocks, stage.blocks - 1}):
        if 0 <= finished < stage.blocks:
            yield from _block_backward(rank, stage, memory, blocks, gradient, finished)
    if rank.reduces_sums:
        yield _last_reduction(rank, memory, blocks.usual, stage)
    if stage.first:
        yield _embedding_backward(rank, stage, memory, gradient)


def _loss_backward(rank: Rank, memory: Stage, gradient: float, last_block: Block) -> Iterator[Memory]:
    """Yield the moments of the backward of loss and head. gradient: bytes of a weight's."""
    previous = _previous_reduction(rank)
    gathered = _ends_gathered(rank, 1, last_block)
    of_weight = 0.0 if rank.is_frozen else gradient * rank.table
    if rank.has_gradients_in_forward:  # they are multiplied by that of the loss
        yield Memory(gathered=gathered, temporary=previous + of_weight + rank.hidden_states)
    else:
        of_loss = _ends_gathered(rank, 1, last_block if rank.parallel.keep_last_block else None)
        yield Memory(gathered=of_loss, temporary=previous, logits=_loss(rank, rank.logit_bytes.backward))
    if rank.reduces_sums and not rank.is_frozen:  # the sum is copied to be sent, and what comes back is beside it
        sent = rank.software.gradients * rank.head * (1 + 1 / rank.shards)
        freed = rank.per_step * rank.head
        yield Memory(gathered=-freed, temporary=sent, logits=-memory.logits, activations=-memory.of_head)
    elif rank.software.fsdp and rank.parallel.pp == 1 and not rank.is_frozen:
        of_weight += rank.software.gradients * rank.head
    gathered -= rank.per_use * rank.head  # freed before its gradient is reduced
    yield Memory(gathered=gathered, temporary=previous + of_weight, logits=-memory.logits, activations=-memory.of_head)


def _block_backward(
    rank: Rank, stage: StageSize, memory: Stage, blocks: ActivationsOfStage, gradient: float, finished: int
) -> Iterator[Memory]:
    """Yield the moments of a block's backward. gradient: bytes of a weight's. finished: blocks whose is over."""
    tied = rank.model.tied_embeddings
    root = rank.root * (stage.first or (tied and stage.last))
    waiting = rank.table * (tied and stage.last)  # a tied embedding's gradient is that of both its uses
    head = rank.head * stage.last
    position = stage.blocks - 1 - finished
    block = rank.block(stage, position)
    recomputed = (blocks.dense if position < stage.dense else blocks.usual).recomputed
    first_ahead = max(0, position - rank.parallel.prefetch)
    gathered = rank.per_use * (rank.parameters(stage, first_ahead, position + 1).whole + root)
    gradients = 0.0
    if rank.reduces_in_only_backward:
        over = rank.parameters(stage, position + 1, stage.blocks)
        gathered -= rank.per_step * (over.whole + head)
        gradients = rank.software.gradients * (over.shard + head / rank.shards)
    freeing = rank.per_use + rank.per_step * rank.reduces_in_only_backward
    at_once = rank.reduced_at_once
    previous = 0.0
    if finished:
        previous = at_once * rank.block(stage, position + 1).unit.whole
    elif stage.last:
        previous = at_once * head
    freed = blocks.freed(stage, finished)
    for phase in block.activations.phases:
        working = phase.working + recomputed
        shard = block.experts.shard if phase.reduces_experts else phase.reduced / rank.shards
        reduced = phase.reduced + shard  # what is sent, and what comes back
        temporary = max(0.0, working) + gradient * (phase.gradients + waiting)
        temporary += at_once * reduced
        temporary += previous * phase.after_unit
        activations = min(0.0, working) - memory.ends - freed
        still_gathered = gathered - freeing * phase.freed
        yield Memory(0.0, gradients, 0.0, still_gathered, activations, -memory.logits, temporary=temporary)


def _last_reduction(rank: Rank, memory: Stage, blocks: StageActivations, stage: StageSize) -> Memory:
    """Return the moment at which the last block's gradients, summed over a step's micro batches, are reduced.

    They are copied to be sent, and what comes back is memory of its own. The weights are no longer gathered.
    """
    block = rank.usual
    first_norm = block.activations.phases[-1].working + blocks.recomputed
    head = rank.head * stage.last
    in_shards = 1 / rank.shards
    # Sums of the head are gone by then. `gradients` stays what is held all step long, which `search.bounds` reads.
    reduced = block.unit.whole * (1 + in_shards) - head * (1 - in_shards)
    sent = rank.software.gradients * max(0.0, reduced)
    gathered = -rank.per_step * (block.unit.whole + head)
    activations = min(0.0, first_norm) - memory.ends
    temporary = max(0.0, first_norm) + sent
    return Memory(gathered=gathered, activations=activations, logits=-memory.logits, temporary=temporary)


def _embedding_backward(rank: Rank, stage: StageSize, memory: Stage, gradient: float) -> Memory:
    """Return the moment at which the embedding's gradient is reduced. gradient: bytes of a weight's."""
    of_weight = gradient
    if rank.software.fsdp and rank.parallel.pp == 1 and not rank.reduces_sums:  # which are reduced when others are gone
        of_weight += rank.software.gradients
    gathered = rank.per_use * rank.root
    gradients = 0.0
    if rank.reduces_in_only_backward:
        head = rank.head * stage.last
        of_blocks = rank.parameters(stage, 0, stage.blocks)
        gathered -= rank.per_step * (of_blocks.whole + head)
        gradients = rank.software.gradients * (rank.sharded - rank.table / rank.shards)
    temporary = rank.reduced_at_once * rank.block(stage, 0).unit.whole + rank.hidden_states
    if not rank.is_frozen:
        temporary += of_weight * rank.table
    return Memory(0.0, gradients, 0.0, gathered, -memory.held, -memory.logits, temporary=temporary)
