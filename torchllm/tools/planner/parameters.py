"""Count the parameters of a pipeline stage on a rank. No torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from torchllm.config import Model, Recompute
from torchllm.facts.flops import head_size, recompute_interval
from torchllm.facts.parameters import rule_of
from torchllm.facts.parts.registry import mixer
from torchllm.facts.shapes import block_shapes, norm_shapes, parameter_shapes
from torchllm.tools.planner.compute import Piece
from torchllm.tools.planner.experts import expert_parameters


class StageSize(NamedTuple):
    """The parts of the model in one pipeline stage."""

    views: tuple[int, ...]
    """of each block, first to last: which of `different_views` it is"""
    first: bool
    last: bool
    first_recomputed: int = 0
    """of recompute.mode every_k: number within the stage of the first block that is recomputed"""

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.views)

    def last_of(self, view: int) -> int:
        """Return the position of the last block of a view that the stage has."""
        return self.blocks - 1 - self.views[::-1].index(view)

    def total(self, numbers: Sequence[float]) -> float:
        """Return the sum over the blocks of a number for each view."""
        return sum_over_blocks(self.views, numbers)


DEFAULTS = Model()
ONE_BLOCK = StageSize((0,), first=False, last=False)
"""a block of a model whose blocks are all like it"""


def sum_over_blocks(views: tuple[int, ...], numbers: Sequence[float]) -> float:
    """Return the sum over blocks of a number for each view. views: of each block."""
    return sum([views.count(view) * number for view, number in enumerate(numbers)])


@lru_cache(maxsize=1024)
def different_views(model: Model) -> tuple[Model, ...]:
    """Return the views of the blocks, each once, in the order of their first blocks."""
    return tuple(dict.fromkeys(model.views))


@lru_cache(maxsize=1024)
def as_read(view: Model) -> Model:
    """Return a view with the defaults of the keys that its mixer does not read."""
    return replace(view, **{key: getattr(DEFAULTS, key) for key in mixer(view).unread})


@lru_cache(maxsize=1024)
def why_not_costed(model: Model) -> str:
    """Return why a model cannot be planned: the mixer of some blocks has costs that are not known; "" if it can."""
    unknown = {view.mixer for view in different_views(model) if mixer(view).costs is None}
    if not unknown:
        return ""
    names = ", ".join(sorted(unknown))
    return f"model.mixer: the planner does not know what {names} costs: --run.dry_run=true counts memory and messages"


@lru_cache(maxsize=1024)
def view_of_each_block(model: Model) -> tuple[int, ...]:
    """Return which of `different_views` each block is."""
    return tuple(map(different_views(model).index, model.views))


def sizes_of_split(model: Model, split: Sequence[int], recompute: Recompute) -> list[StageSize]:
    """Return the size of each stage. split: the blocks of each."""
    sizes = []
    views = view_of_each_block(model)
    first = first_recomputed = 0
    for stage, blocks in enumerate(split):
        is_last = stage == len(split) - 1
        end = model.blocks if is_last else first + blocks
        sizes.append(StageSize(views[first:end], stage == 0, is_last, first_recomputed))
        first += blocks
        if recompute.mode == "every_k":  # every k-th block of the model, wherever stages begin
            first_recomputed = (first_recomputed - blocks) % recompute_interval(recompute, model.layers)
    return sizes


@lru_cache(maxsize=1024)
def turned_features(model: Model, stage: StageSize) -> int:
    """Return the features of a head whose angles a stage computes: each of its different rotary settings once."""
    views = [different_views(model)[view] for view in set(stage.views)]
    widths = {view.rotary_settings: view.rotary_width for view in views if view.rotary_settings}
    return sum(widths.values())


@lru_cache(maxsize=1024)
def block_parameters(model: Model, tp: int) -> float:
    """Return the parameters of a block on one of `tp` ranks; experts are cut by tp. model: a view."""
    count = 0.0
    for name, shape in block_shapes(model, layer=0).items():
        is_cut = rule_of(f"layers.0.{name}").cut in ("colwise", "rowwise")
        count += math.prod(shape) / tp if is_cut else math.prod(shape)
    return count


@lru_cache(maxsize=1024)
def stage_parameters(model: Model, stage: StageSize, tp: int) -> float:
    """Return the parameters of a stage on one tp rank. A tied embedding is on both ends of a pipeline.

    Experts count as without ep. With ep FSDP shards a rank's experts over fewer ranks, which leaves the same number on
    each. Cached: many layouts have stages of the same sizes.
    """
    count = stage.total([block_parameters(view, tp) for view in different_views(model)])
    table = head_size(model) / tp
    if stage.first:
        positions = model.features.learned_positions * model.max_sequence_length
        count += table + positions * model.hidden
    if stage.last:
        is_first_too = model.tied_embeddings and stage.first
        norm = sum(math.prod(shape) for shape in norm_shapes(model, "norm").values())
        count += norm + table * (not is_first_too) + table * has_copy_of_embedding(model, stage)
    return count


def has_copy_of_embedding(model: Model, stage: StageSize) -> bool:
    """Return whether the last stage of a pipeline embeds tokens further ahead, by an embedding that is not the head."""
    return stage.last and not stage.first and model.embeds_at_both_ends and not model.tied_embeddings


@lru_cache(maxsize=1024)
def trained_share(model: Model, parts: str | tuple[str, ...] = "") -> float:
    """Return the share of the parameters whose names begin with one of `parts` that model.frozen leaves trained."""
    if not model.frozen:
        return 1.0
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(model).items() if name.startswith(parts)}
    return sum(size for name, size in sizes.items() if not model.freezes(name)) / sum(sizes.values())


def trained_share_of_stage(model: Model, stage: StageSize) -> float:
    """Return the share of a stage's parameters that model.frozen leaves trained.

    A stage in the middle may have any consecutive blocks: the ones with the largest trained share are assumed.
    """
    if not model.frozen:
        return 1.0
    blocks = range(model.blocks - stage.blocks + 1)  # the first block that the stage may have
    firsts = blocks[:1] if stage.first else blocks[-1:] if stage.last else blocks
    ends = ("embed_",) * stage.first + ("norm.", "lm_head.") * stage.last
    ends += ("embed_tokens.",) * (stage.last and model.embeds_at_both_ends)
    stages = [(*ends, *(f"layers.{layer}." for layer in range(first, first + stage.blocks))) for first in firsts]
    return max(trained_share(model, parts) for parts in stages)


def gathered_parameters(model: Model, stage: StageSize, piece: Piece) -> float:
    """Return the parameters of a stage on a rank after the gather: with ep all of the rank's experts."""
    count = stage_parameters(model, stage, piece.tp)
    if piece.ep > 1:
        views = different_views(model)
        count += stage.total([expert_parameters(view, piece.ep) - expert_parameters(view, piece.tp) for view in views])
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
