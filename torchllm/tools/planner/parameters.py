"""Count the parameters of a pipeline stage on a rank. No torch."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torchllm.config import Model, Recompute, without_experts
from torchllm.facts.block_kinds import block_kind
from torchllm.facts.flops import head_size, matrices, recompute_interval
from torchllm.facts.shapes import parameter_shapes
from torchllm.tools.planner.compute import Piece, dense_width
from torchllm.tools.planner.experts import expert_parameters


class StageSize(NamedTuple):
    """The parts of the model in one pipeline stage."""

    blocks: int
    first: bool
    last: bool
    dense: int = 0
    """of `blocks`, the first, dense ones of a model with experts"""
    first_recomputed: int = 0
    """of recompute.mode every_k: number within the stage of the first block that is recomputed"""
    of_views: tuple[int, ...] = ()
    """of `blocks`, those of each of `different_views`; empty: all are of the last view"""

    def total(self, numbers: Sequence[float]) -> float:
        """Return the sum over the blocks of a number for each view."""
        of_views = self.of_views or (0,) * (len(numbers) - 1) + (self.blocks,)
        return sum(blocks * number for blocks, number in zip(of_views, numbers, strict=True))


@lru_cache(maxsize=1024)
def different_views(model: Model) -> tuple[Model, ...]:
    """Return the views of the blocks, each once, in the order of their first blocks."""
    return tuple(dict.fromkeys(model.views))


@lru_cache(maxsize=1024)
def number_by_view(model: Model, first: int, end: int) -> tuple[int, ...]:
    """Return how many of the blocks from `first` to `end`, excluded, are of each of `different_views`."""
    counted = Counter(model.of_block(index) for index in range(first, end))
    return tuple(counted[view] for view in different_views(model))


def sizes_of_split(model: Model, split: Sequence[int], recompute: Recompute) -> list[StageSize]:
    """Return the size of each stage. split: the blocks of each."""
    sizes = []
    first = 0
    dense_left = model.dense_layers if model.experts else 0
    first_recomputed = 0
    for stage, blocks in enumerate(split):
        dense = min(blocks, dense_left)
        dense_left -= dense
        is_last = stage == len(split) - 1
        of_views = number_by_view(model, first, first + blocks)
        sizes.append(StageSize(blocks, stage == 0, is_last, dense, first_recomputed, of_views))
        first += blocks
        if recompute.mode == "every_k":  # every k-th block of the model, wherever stages begin
            first_recomputed = (first_recomputed - blocks) % recompute_interval(recompute, model.layers)
    return sizes


@lru_cache(maxsize=1024)
def turned_features(model: Model, stage: StageSize) -> int:
    """Return the features of a head whose angles a stage computes: each of its different rotary settings once."""
    views = different_views(model)
    widths = {}
    for number, view in zip(stage.of_views or (1,) * len(views), views, strict=True):
        if number and view.rotary_settings:
            widths[view.rotary_settings] = view.rotary_width
    return sum(widths.values())


def block_matrices(model: Model, tp: int) -> float:
    """Return the elements of a block's matrices on one of `tp` ranks; of a sparse block where experts are cut by tp."""
    sizes = matrices(model, layer=model.layers - 1)
    if not model.experts:
        return (sizes.attention + sizes.ffn) / tp
    shared = 3 * model.hidden * dense_width(model)
    router = model.hidden * model.experts
    return (sizes.attention + shared) / tp + router + expert_parameters(model, tp)


def added_parameters(model: Model, tp: int) -> float:
    """Return the parameters that a fork's kind of block adds on one of `tp` ranks, beyond `block_matrices`."""
    count = 0.0
    shapes = block_kind(model).shapes(model)
    for added in block_kind(model).parameters:
        size = math.prod(shapes[added.name])
        size_on_rank = size / tp if added.cut in ("colwise", "rowwise") else size
        in_matrices = size / tp if added.role == "matrix" else 0.0
        count += size_on_rank - in_matrices
    return count


@lru_cache(maxsize=1024)
def stage_parameters(model: Model, stage: StageSize, tp: int, vocab_parallel: bool) -> float:
    """Return the parameters of a stage on one tp rank. A tied embedding is on both ends of a pipeline.

    Experts count as without ep. With ep FSDP shards a rank's experts over fewer ranks, which leaves the same number on
    each. Cached: many layouts have stages of the same sizes.
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
    count += stage.blocks * added_parameters(model, tp)
    table = head_size(model) / (tp if vocab_parallel else 1)
    if stage.first:
        positions = features.learned_positions * model.max_sequence_length
        count += table + positions * model.hidden
    if stage.last:
        is_first_too = model.tied_embeddings and stage.first
        count += norm + table * (not is_first_too)
    return count


def trained_share(model: Model, parts: str | tuple[str, ...] = "") -> float:
    """Return the share of the parameters whose names begin with one of `parts` that model.frozen leaves trained."""
    return _trained_share(model, parts) if model.frozen else 1.0


@lru_cache(maxsize=1024)
def _trained_share(model: Model, parts: str | tuple[str, ...]) -> float:
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(model).items() if name.startswith(parts)}
    return sum(size for name, size in sizes.items() if not model.freezes(name)) / sum(sizes.values())


def trained_share_of_stage(model: Model, stage: StageSize) -> float:
    """Return the share of a stage's parameters that model.frozen leaves trained.

    A stage in the middle may have any blocks that follow each other: those of which most is trained.
    """
    if not model.frozen:
        return 1.0
    blocks = range(model.layers - stage.blocks + 1)  # the first block that the stage may have
    firsts = blocks[:1] if stage.first else blocks[-1:] if stage.last else blocks
    ends = ("embed_",) * stage.first + ("norm.", "lm_head.") * stage.last
    ends += ("embed_tokens.",) * (stage.last and model.tied_embeddings)
    stages = [(*ends, *(f"layers.{layer}." for layer in range(first, first + stage.blocks))) for first in firsts]
    return max(trained_share(model, parts) for parts in stages)


def gathered_parameters(model: Model, stage: StageSize, piece: Piece, vocab_parallel: bool) -> float:
    """Return the parameters of a stage on a rank after the gather: with ep all of the rank's experts."""
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
