"""Predict the bytes that the blocks of a pipeline stage keep of a micro batch, as `recompute` says. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from torchllm.config import Model, Recompute
from torchllm.facts.flops import recompute_interval
from torchllm.tools.planner.activations import BlockActivations, block_activations
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.parameters import StageSize, sum_over_blocks
from torchllm.tools.planner.software import Software


def activations_of_blocks(case: Case) -> tuple[BlockActivations, ...]:
    """Return the activations of a block of each of `case.of_views`."""
    return tuple(
        block_activations(
            of.model, of.piece, of.kernels, of.software.under(of.parallel, of.recompute), of.trained, of.tokens_before
        )
        for of in case.of_views
    )


class StageActivations(NamedTuple):
    """Activations of one micro batch in the blocks of a stage that are of one view."""

    held: float
    """bytes that are kept until the backward"""
    recomputed: float
    """bytes that the backward recomputes for the last of them, or for its segment"""


def stage_activations(
    view: int,
    stage: StageSize,
    model: Model,
    recompute: Recompute,
    of_blocks: Sequence[BlockActivations],
    software: Software,
) -> StageActivations:
    """Return the activations that the blocks of one view keep in a stage. of_blocks: a block of each view."""
    block, blocks = of_blocks[view], stage.views.count(view)
    if not blocks:
        return StageActivations(0.0, 0.0)
    match recompute.mode:
        case "full" if recompute.offload:  # in the backward its own input, and the one before, on its way
            return StageActivations(0.0, block.whole + 2 * block.entry)
        case "full":
            return StageActivations(blocks * block.entry, block.whole)
        case "segment":
            size = recompute_interval(recompute, model.layers)
            begins = stage.views[::size].count(view)
            end = stage.last_of(view) + 1
            of_segment = stage.views[max(0, end - size) : end]
            whole = sum_over_blocks(of_segment, [of.whole for of in of_blocks])
            if recompute.offload:
                return StageActivations(0.0, whole + 2 * block.entry)
            return StageActivations(begins * block.entry, whole)
        case "every_k":  # blocks behind the last recomputed one are freed before anything is recomputed
            interval = recompute_interval(recompute, model.layers)
            recomputed_blocks = stage.views[stage.first_recomputed :: interval].count(view)
            ends_with_recomputed = (stage.last_of(view) - stage.first_recomputed) % interval == 0
            held = recomputed_blocks * block.entry + (blocks - recomputed_blocks) * block.whole
            return StageActivations(held, block.whole * ends_with_recomputed)
        case "ffn":
            kept = block.attention + block.residual + block.entry  # the layer's input is spread as the block's
            return StageActivations(blocks * kept, block.whole - kept)
        case "selective" if software.recomputes_attention_only:
            return StageActivations(blocks * (block.whole - block.core), block.core)
        case "selective":
            return _selective(blocks, block.whole, block.products, software)
        case "selective_half":
            return _selective(blocks, block.whole, block.half, software)
    return StageActivations(blocks * block.whole, 0.0)


def _selective(blocks: int, whole: float, saved: float, software: Software) -> StageActivations:
    """Return the activations of blocks that save some results.

    The recomputation of a block takes its saved results, and leaves the tensors that autograd keeps without
    recomputation; the other tensors are freed.
    """
    if not software.saves_collectives:
        saved = min(saved, whole)
    return StageActivations(blocks * saved, whole - saved)


class ActivationsOfStage(NamedTuple):
    """Activations of one micro batch in the blocks of a stage."""

    of_views: tuple[StageActivations, ...]

    @property
    def held(self) -> float:
        """Bytes that are kept until the backward."""
        return sum([of_view.held for of_view in self.of_views])

    def freed(self, stage: StageSize, finished: int) -> float:
        """Return the part of `held` that is freed once the backward of the last `finished` blocks is over."""
        freed = 0.0
        of_finished = stage.views[stage.blocks - finished :]
        for view in set(of_finished):
            freed += self.of_views[view].held * of_finished.count(view) / stage.views.count(view)
        return freed


def activations_of_stage(
    model: Model, recompute: Recompute, software: Software, stage: StageSize, of_blocks: Sequence[BlockActivations]
) -> ActivationsOfStage:
    """Return the activations of a stage's blocks. of_blocks: of a block of each view."""
    views = range(len(of_blocks))
    return ActivationsOfStage(
        tuple(stage_activations(view, stage, model, recompute, of_blocks, software) for view in views)
    )
