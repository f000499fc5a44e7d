"""Predict the bytes that the blocks of a pipeline stage keep of a micro batch, as `recompute` says. No torch."""

import math
from typing import NamedTuple

from torchllm.config import Model, Recompute, without_experts
from torchllm.facts.flops import recompute_interval
from torchllm.tools.planner.activations import BlockActivations, block_activations
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.parameters import StageSize
from torchllm.tools.planner.software import Software


class ActivationsOfBlocks(NamedTuple):
    """Activations of a block of each kind; both are the same in a model without experts."""

    usual: BlockActivations
    """with experts: of a sparse block"""
    dense: BlockActivations
    """of the first, dense blocks of a model with experts"""


def activations_of_blocks(case: Case) -> ActivationsOfBlocks:
    """Return the activations of the blocks of a layout."""
    parallel = case.parallel
    ulysses = parallel.cp > 1 and parallel.cp_method == "ulysses"
    settings = case.piece, case.kernels, case.software, case.trained, ulysses, case.tokens_before
    usual = block_activations(case.model, *settings)
    if not case.model.experts:
        return ActivationsOfBlocks(usual, usual)
    dense = block_activations(without_experts(case.model), *settings)
    return ActivationsOfBlocks(usual, dense)


class StageActivations(NamedTuple):
    """Activations of one micro batch in the blocks of a stage."""

    held: float
    """bytes that are kept until the backward"""
    recomputed: float
    """bytes that the backward recomputes, for one block (or segment) at a time"""


def stage_activations(
    model: Model,
    blocks: int,
    recompute: Recompute,
    block: BlockActivations,
    software: Software,
    first_recomputed: int = 0,
) -> StageActivations:
    """Return what `blocks` blocks keep. first_recomputed: of mode every_k, which of them is the first recomputed."""
    if not blocks:
        return StageActivations(0.0, 0.0)
    interval = recompute_interval(recompute, model.layers)
    match recompute.mode:
        case "full":
            return StageActivations(blocks * block.entry, block.whole)
        case "segment":
            size = min(blocks, interval)
            return StageActivations(math.ceil(blocks / size) * block.entry, size * block.whole)
        case "every_k":  # blocks behind the last recomputed one are freed before anything is recomputed
            recomputed_blocks = range(first_recomputed, blocks, interval)
            ends_with_recomputed = blocks - 1 in recomputed_blocks
            held = len(recomputed_blocks) * block.entry + (blocks - len(recomputed_blocks)) * block.whole
            return StageActivations(held, block.whole * ends_with_recomputed)
        case "ffn":
            kept = block.attention + block.residual + block.entry  # the layer's input is spread as the block's
            return StageActivations(blocks * kept, block.whole - kept)
        case "selective" if software.recomputes_attention_only:
            return StageActivations(blocks * (block.whole - block.core), block.core)
        case "selective":
            return _selective(blocks, block.whole, block.products, block.shared, software)
        case "selective_half":
            return _selective(blocks, block.whole, block.half, block.half_shared, software)
    return StageActivations(blocks * block.whole, 0.0)


def _selective(blocks: int, whole: float, saved: float, shared: float, software: Software) -> StageActivations:
    """Return the activations of blocks that save some results. shared: part of `saved` kept without recomputation."""
    if not software.saves_collectives:
        saved = min(saved, whole)
    return StageActivations(blocks * saved, max(0.0, whole - shared))


class ActivationsOfStage(NamedTuple):
    """Activations of one micro batch in the blocks of a stage, by kind."""

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
    """Return the activations of a stage's blocks, dense and sparse ones; the backward recomputes one at a time."""
    usual_blocks = stage.blocks - stage.dense
    first_recomputed = (stage.first_recomputed - stage.dense) % recompute_interval(recompute, model.layers)
    return ActivationsOfStage(
        stage_activations(model, usual_blocks, recompute, of_blocks.usual, software, first_recomputed),
        stage_activations(model, stage.dense, recompute, of_blocks.dense, software, stage.first_recomputed),
    )
