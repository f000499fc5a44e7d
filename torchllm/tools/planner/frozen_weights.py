"""The effect of frozen weights on a prediction: bytes per parameter, and the time of their updates. No torch.

Weights with low-rank updates are frozen in 16 bits, without gradients and moments. Bytes of gradients and moments are
counted per parameter, so they shrink by the share of the parameters that are trained.
"""

from dataclasses import replace
from typing import NamedTuple

from torchllm.config import Model, TrainedParameters
from torchllm.facts.flops import parameter_count, trained_parameter_count, updated_shapes
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.compute import MEMORY_RATE, Piece, Seconds, matmul_seconds
from torchllm.tools.planner.parameters import trained_share
from torchllm.tools.planner.software import Software

ROWWISE = ("o_proj", "down_proj")
"""targets whose inputs are cut over tp; of the others the outputs are"""
FROZEN = 2.0
"""bytes of a frozen weight"""
WEIGHT, MOMENTS = 4.0, 8.0
"""bytes of a trained weight, or of its gradient, and of its two moments"""


def with_frozen_weights(software: Software, model: Model, trained: TrainedParameters) -> Software:
    """Return torchllm's sizes per parameter for a run with frozen weights; without any, the same.

    With model.frozen only gradients are smaller that are sent: weights stay float32, and moments are counted by stage
    (`parameters.trained_share_of_stage`). The gradients of a pipeline's stages count as if all were trained.
    """
    if not trained.only_updates:
        return replace(software, reduced=software.sent_gradients * trained_share(model)) if model.frozen else software
    share = trained_parameter_count(model, trained) / parameter_count(model)
    return replace(
        software,
        trained=share,
        shards=FROZEN + software.shards * share,
        states=FROZEN + software.states * share,
        gradients=software.gradients * share,
        kept=software.kept * share,
        temporary_gradients=software.temporary_gradients * share,
    )


def uncut_elements(model: Model, trained: TrainedParameters, tp: int) -> float:
    """Return the elements of a block's low-rank updates that a rank has beyond 1 / tp of all. model: a view.

    tp cuts the factor at the side where it cuts the matrix, and the other is whole on every rank.
    """
    beyond = 0.0
    for target, (outputs, inputs) in updated_shapes(model, trained).items():
        beyond += (outputs if target in ROWWISE else inputs) * (1 - 1 / tp)
    return trained.rank * beyond


class UpdateSeconds(NamedTuple):
    """Times of the low-rank updates of one block and one micro batch."""

    forward: Seconds
    backward: Seconds
    """gradients of their inputs and of their factors"""


def update_seconds(model: Model, trained: TrainedParameters, piece: Piece, hardware: Hardware) -> UpdateSeconds:
    """Return the time of A x, B A x and their sum with W x, and of their gradients."""
    forward = backward = Seconds()
    if not trained.only_updates:
        return UpdateSeconds(forward, backward)
    for target, (outputs, inputs) in updated_shapes(model, trained).items():
        if target in ROWWISE:
            inputs //= piece.tp
        else:
            outputs //= piece.tp
        tokens, rank = piece.tokens, trained.rank
        products = matmul_seconds(tokens, rank, inputs, hardware) + matmul_seconds(tokens, outputs, rank, hardware)
        added = 6.0 * tokens / (hardware.memory_bandwidth * MEMORY_RATE)  # two 16-bit numbers read, one written
        forward = forward.plus(Seconds(products, 0.0, added * outputs, 3))
        backward = backward.plus(Seconds(2 * products, 0.0, added * inputs, 5))
    return UpdateSeconds(forward, backward)
