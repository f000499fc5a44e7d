"""The inputs of a pipeline rank's memory: its blocks, its share of weights, when weights are gathered.

No torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torchllm.config import Model, Parallel, Recompute, TrainedParameters, Training
from torchllm.facts.flops import ALL_TRAINED, recomputes_logits
from torchllm.tools.planner.activations import BlockActivations
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.compute import Kernels, Piece
from torchllm.tools.planner.experts import expert_parameters
from torchllm.tools.planner.muon_time import muon_bytes
from torchllm.tools.planner.parameters import (
    ONE_BLOCK,
    ShardedParameters,
    StageSize,
    gathered_parameters,
    stage_parameters,
    sum_of_parameters,
    sum_over_blocks,
)
from torchllm.tools.planner.software import Software
from torchllm.tools.planner.stage_activations import activations_of_blocks


class LogitBytes(NamedTuple):
    """Bytes that a loss holds per logit."""

    kept: float
    """from its forward to its backward"""
    forward: float
    """at the peak of its forward"""
    backward: float
    """at the peak of its backward"""

    @classmethod
    def of(cls, model: Model, kernels: Kernels, software: Software, tp: int) -> "LogitBytes":
        """Return the bytes of a compiled loss, which converts logits as it reads them, or of the framework's own.

        A soft cap keeps its tanh besides.
        """
        own = cls(software.kept_logits, software.logits_forward, software.logits_backward)
        if software.takes_softmax_again and tp > 1:
            own = CUT_LOSS
        loss = COMPILED_LOSS if kernels.compiled_loss else own
        capped = 2.0 if model.logit_softcap else 0.0
        return cls(*(bytes + capped for bytes in loss))


COMPILED_LOSS = LogitBytes(kept=2.0, forward=2.0, backward=4.0)
"""logits in 16 bits, then also their gradient"""
CUT_LOSS = LogitBytes(kept=2.0, forward=6.0, backward=8.0)
"""logits in 16 bits; also exponentials in float32; also the gradient in 16 bits: `parallel.tensor.cut_cross_entropy`"""


class BlockMemory(NamedTuple):
    """Memory of a block."""

    activations: BlockActivations
    """activations of a micro batch"""
    unit: ShardedParameters
    """parameters that FSDP gathers and reduces as a whole: the whole block, with ep all but its experts"""
    experts: ShardedParameters
    """parameters of a sparse block's experts, a separate unit with ep; else 0"""
    rearranged: float = 0.0
    """parameters of experts that are sharded by hidden states: gathered rank by rank, they are copied once more"""

    @property
    def whole(self) -> float:
        """Parameters on a tp rank, gathered."""
        return self.unit.whole + self.experts.whole

    @property
    def shard(self) -> float:
        """Parameters, divided by the ranks that share them."""
        return self.unit.shard + self.experts.shard


class Rank(NamedTuple):
    """The inputs of all moments of a rank."""

    model: Model
    training: Training
    parallel: Parallel
    recompute: Recompute
    software: Software
    piece: Piece
    blocks: tuple[BlockMemory, ...]
    """a block of each of `parameters.different_views`"""
    zero: int
    """ZeRO stage in effect"""
    micro_batches: int
    logit_bytes: LogitBytes
    stages: tuple[StageSize, ...]
    """of the rank, first to last"""
    of_size: dict[StageSize, ShardedParameters]
    """parameters of a stage of each size"""
    table: float
    """elements of the embedding, or of the head, on a tp rank"""
    trained: TrainedParameters = ALL_TRAINED
    update: float = 0.0
    """bytes of an update, where the memory of forward and backward stays: the pool of a CUDA graph"""

    @property
    def is_frozen(self) -> bool:
        """Whether only low-rank updates are trained: the head and the embedding have no gradients."""
        return self.trained.only_updates

    def block(self, stage: StageSize, position: int) -> BlockMemory:
        """Return a block of a stage, or of one without blocks the last kind."""
        return self.blocks[stage.views[position] if stage.views else -1]

    def parameters(self, first: int = 0, end: int | None = None) -> ShardedParameters:
        """Return the parameters of the stages from `first` to `end` - 1 of the rank, by default of all."""
        return sum_of_parameters([self.of_size[stage] for stage in self.stages[first:end]])

    def block_parameters(self, stage: StageSize, first: int, end: int) -> ShardedParameters:
        """Return the parameters of the blocks from `first` to `end` - 1 of a stage."""
        views = stage.views[first:end]
        return ShardedParameters(
            whole=sum_over_blocks(views, [block.whole for block in self.blocks]),
            shard=sum_over_blocks(views, [block.shard for block in self.blocks]),
        )

    def last_block(self, stage: StageSize) -> BlockMemory:
        """Return the last block of a stage."""
        return self.block(stage, -1)

    @property
    def shards(self) -> int:
        """Number of ranks that share the weights, except the weights of experts."""
        return self.parallel.dp_shard * self.parallel.cp if self.parallel.zero else 1

    @property
    def root(self) -> float:
        """Elements gathered besides the blocks and an untied embedding: a tied embedding, and learned positions."""
        model = self.model
        root = self.table if model.tied_embeddings else 0.0
        if model.features.learned_positions:
            root += model.max_sequence_length * model.hidden
        return root

    def root_of(self, stage: StageSize) -> float:
        """Return the part of `root` on a stage: FSDP gathers it as a whole, and keeps it from forward to backward."""
        return self.root if stage.first or (stage.last and self.model.tied_embeddings) else 0.0

    @property
    def head(self) -> float:
        """Elements of a head that is a separate unit: 0 if it is tied to the embedding."""
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
        return boundary_bytes(self.model, self.parallel, self.piece)

    def logits_per_token(self) -> float:
        """Return the logits of a token on this rank."""
        return self.model.vocab / (1 if self.software.whole_logits else self.piece.tp)


def boundary_bytes(model: Model, parallel: Parallel, piece: Piece) -> float:
    """Return the bytes of the hidden states that a rank sends to the next stage."""
    cut = parallel.tp if parallel.sequence_parallel or parallel.scatter_gather else 1
    return 2.0 * piece.tokens * model.hidden / cut


def describe_rank(case: Case, stages: Sequence[StageSize]) -> Rank:
    """Return the inputs of the memory of a rank with these stages, first to last."""
    model, parallel, software, piece = case.model, case.parallel, case.software, case.piece
    shards = parallel.dp_shard * parallel.cp if parallel.zero else 1
    of_size = {}
    for size in dict.fromkeys(stages):
        whole = gathered_parameters(model, size, piece)
        shard = stage_parameters(model, size, parallel.tp) / shards
        of_size[size] = ShardedParameters(whole, shard)
    activations = activations_of_blocks(case)
    blocks = [block_memory(*block, shards) for block in zip(case.of_views, activations, strict=True)]
    return Rank(
        model,
        case.training,
        parallel,
        case.recompute,
        software,
        piece,
        tuple(blocks),
        zero=parallel.zero if shards > 1 else min(parallel.zero, 1),
        micro_batches=case.micro_batches,
        logit_bytes=LogitBytes.of(case.model, case.kernels, software, piece.tp),
        stages=tuple(stages),
        of_size=of_size,
        table=model.vocab * model.hidden / parallel.tp,
        trained=case.trained,
        update=muon_bytes(case) if case.kernels.graphs else 0.0,
    )


def block_memory(case: Case, activations: BlockActivations, shards: int) -> BlockMemory:
    """Return a block. case: of its view. shards: ranks that share weights."""
    model, piece = case.model, case.piece
    whole = gathered_parameters(model, ONE_BLOCK, piece)
    shard = stage_parameters(model, ONE_BLOCK, piece.tp) / shards
    experts = ShardedParameters(0.0, 0.0)
    if piece.ep > 1:
        experts_shard = expert_parameters(model, piece.tp) / shards
        experts = ShardedParameters(expert_parameters(model, piece.ep), experts_shard)
    unit = ShardedParameters(whole - experts.whole, shard - experts.shard)
    return BlockMemory(activations, unit, experts, rearranged_parameters(model, piece, shards))


def rearranged_parameters(view: Model, piece: Piece, shards: int) -> float:
    """Return a block's parameters of experts that its ranks cannot share expert by expert (`placements_of_experts`)."""
    experts = view.experts // piece.ep
    ranks = shards if piece.ep == 1 else shards * piece.tp // piece.ep
    if experts % ranks == 0 or view.hidden % ranks:
        return 0.0
    return expert_parameters(view, piece.tp if piece.ep == 1 else piece.ep)
