"""Predict what the routed experts of a sparse block cost: parameters, seconds, bytes sent and kept. No torch.

The first blocks of a model with experts may be dense. They are predicted as blocks of `without_experts`, a model whose
blocks are all like them. The shared experts of a sparse block are one layer that every token uses: `compute` predicts
them as it predicts a dense feed-forward layer.

Shapes: T tokens that a rank routes, D hidden, E experts, K experts per token, F width of an expert.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from torchllm.config import Model
from torchllm.planner import comms
from torchllm.planner.compute import (
    DEPTH,
    MEMORY_RATE,
    TILE,
    WAVE,
    Kernels,
    Piece,
    Seconds,
    gradient_traffic,
    matmul_seconds,
    product_rate,
)
from torchllm.spec.cluster import Hardware
from torchllm.spec.software import Software

IMBALANCE = 1.2
"""rows of the busiest rank's experts over those of an average rank, where a run has not measured it (`metrics.jsonl`,
experts/largest_load, is that of single experts: an upper bound)"""
FLOAT32_RATE = 1 / 16
"""rate of float32 products over that of 16-bit ones: 19.5 of 312 TFLOP/s on an A100, 67 of 989 on an H100, by their
data sheets"""
TILE_ROWS = 128
"""rows of a tile: the last one of each expert is half empty on average"""
PERMUTED, PERMUTED_FUSED = (4.0, 8.0), (4.0, 4.0)
"""bytes per element that putting rows in another order moves, forward and backward: in torch the backward adds to
zeros, in a kernel of its own it reads and writes"""
COMBINED, COMBINED_FUSED = (10.0, 20.0), (2.0, 6.0)
"""bytes per element of the results that their weighted sum moves, forward and backward: in float32 tensors, and in the
registers of one kernel"""
ACTIVATION, ACTIVATION_FUSED = (10.0, 18.0), (6.0, 10.0)
"""bytes per feature that SwiGLU moves between the products, forward and backward, as in a dense feed-forward layer"""
SCORED = (100.0, 60.0)
"""bytes per token and expert that scores, their sort, and the record of the choices move, forward and backward"""


@lru_cache(maxsize=1024)
def without_experts(model: Model) -> Model:
    """Return the model whose blocks are all like the first, dense blocks of a model with experts."""
    return replace(model, experts=0, shared_experts=0, dense_layers=0, expert_ffn=0, router_bias=False)


def expert_parameters(model: Model, ranks: int) -> float:
    """Return the parameters of a block's routed experts on one of the `ranks` that share them, router excluded."""
    return 3.0 * model.experts * model.hidden * model.expert_width / ranks


class RoutedRows(NamedTuple):
    """What the experts of the busiest rank compute with in one micro batch."""

    tokens: float
    """tokens that this rank routes"""
    rows: float
    """rows that reach its experts, a row per token and expert"""
    experts: int
    """number of experts of which this rank has some or all features"""
    width: float
    """features of each expert that are on this rank"""


def routed_rows(model: Model, piece: Piece) -> RoutedRows:
    """Return the rows of the busiest rank.

    With ep a rank routes its own part of a sequence and has whole experts; without, tp cuts every expert.
    """
    if piece.ep > 1:
        tokens = piece.tokens / piece.tp
        rows = tokens * model.top_k * piece.imbalance
        return RoutedRows(tokens, rows, model.experts // piece.ep, model.expert_width)
    return RoutedRows(piece.tokens, piece.tokens * model.top_k, model.experts, model.expert_width / piece.tp)


def grouped_seconds(
    routed: RoutedRows, outputs: float, inputs: float, hardware: Hardware, float8: float = 0.0
) -> float:
    """Return the seconds of one product per expert, all in one kernel: the roofline of `matmul_seconds`.

    Rows are padded to tiles, and the kernel reads every expert's matrix, however few rows it has.
    float8: `Kernels.float8`.
    """
    padded = routed.rows + routed.experts * TILE_ROWS / 2
    waves = padded * outputs / (TILE * hardware.multiprocessors)
    rate = product_rate(hardware, float8)
    operations = 2.0 * padded * outputs * inputs / rate * (1 + WAVE / waves) * (1 + DEPTH / inputs)
    elements = routed.rows * (inputs + outputs) + routed.experts * outputs * inputs
    return max(operations, 2.0 * elements / (hardware.memory_bandwidth * MEMORY_RATE))


def grouped_gradient_seconds(
    routed: RoutedRows, outputs: float, inputs: float, hardware: Hardware, float8: float = 0.0
) -> float:
    """Return the seconds of the gradients of all experts' matrices: products over the rows of each expert."""
    depth = max(1.0, routed.rows / routed.experts)
    waves = max(1.0, routed.experts * outputs * inputs / (TILE * hardware.multiprocessors))
    rate = product_rate(hardware, float8)
    operations = 2.0 * routed.rows * outputs * inputs / rate * (1 + WAVE / waves) * (1 + DEPTH / depth)
    elements = routed.rows * (inputs + outputs) + routed.experts * outputs * inputs
    return max(operations, 2.0 * elements / (hardware.memory_bandwidth * MEMORY_RATE))


def routed_forward(model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware) -> Seconds:
    """Return the time of router and routed experts in a block's forward, without what is sent."""
    if not model.experts:
        return Seconds()
    routed = routed_rows(model, piece)
    products = 2 * grouped_seconds(routed, routed.width, model.hidden, hardware, kernels.float8)
    products += grouped_seconds(routed, model.hidden, routed.width, hardware, kernels.float8)
    products += _router_seconds(model, routed, hardware)
    return Seconds(products, 0.0, _moving(model, piece, kernels, software, hardware, False), 45.0)


def routed_backward(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware
) -> tuple[Seconds, Seconds]:
    """Return the times of the gradients of what goes into router and experts, and of their weights."""
    if not model.experts:
        return Seconds(), Seconds()
    routed = routed_rows(model, piece)
    inputs = 2 * grouped_seconds(routed, model.hidden, routed.width, hardware, kernels.float8)
    inputs += grouped_seconds(routed, routed.width, model.hidden, hardware, kernels.float8)
    inputs += _router_seconds(model, routed, hardware)
    weights = 2 * grouped_gradient_seconds(routed, routed.width, model.hidden, hardware, kernels.float8)
    weights += grouped_gradient_seconds(routed, model.hidden, routed.width, hardware, kernels.float8)
    weights += _router_seconds(model, routed, hardware)
    added = gradient_traffic(software) * 3 * routed.experts * routed.width * model.hidden
    moved = added / (hardware.memory_bandwidth * MEMORY_RATE)
    around = _moving(model, piece, kernels, software, hardware, True)
    return Seconds(inputs, 0.0, around, 60.0), Seconds(weights, 0.0, moved, 8.0)


def _router_seconds(model: Model, routed: RoutedRows, hardware: Hardware) -> float:
    """Return the seconds of the product of tokens and router, in float32."""
    return matmul_seconds(int(routed.tokens), model.experts, model.hidden, hardware) / FLOAT32_RATE


def _moving(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware, backward: bool
) -> float:
    """Return the seconds of the elementwise work around router and experts, by the bytes that it moves."""
    routed = routed_rows(model, piece)
    permutations = 4 if piece.ep > 1 else 2  # by expert and back; with ep by rank and back too
    fused = kernels.compiled or software.fused_elementwise
    activation = (ACTIVATION_FUSED if fused else ACTIVATION)[backward]
    permuted = (PERMUTED_FUSED if software.fuses_permutations else PERMUTED)[backward]
    combined = (COMBINED_FUSED if software.fuses_permutations else COMBINED)[backward]
    moved = routed.rows * model.hidden * (permutations * permuted + combined)
    moved += routed.rows * routed.width * activation
    moved += routed.tokens * (6.0 * model.hidden + SCORED[backward] * model.experts)  # the input in float32
    return moved * software.constants.traffic / (hardware.memory_bandwidth * MEMORY_RATE)


def shared_seconds(model: Model, piece: Piece, hardware: Hardware) -> float:
    """Return the seconds of the shared experts' products in a forward, behind which rows may be sent."""
    width = model.shared_experts * model.expert_width // piece.tp
    if not width:
        return 0.0
    up = matmul_seconds(piece.tokens, 2 * width, model.hidden, hardware)
    return up + matmul_seconds(piece.tokens, model.hidden, width, hardware)


def exchange_seconds(
    model: Model, piece: Piece, mesh: Sequence[int], hardware: Hardware, sends_tokens_once: bool = False
) -> float:
    """Return the seconds in which the busiest rank sends or receives its rows once: 0 without ep.

    T x K x D elements of 16 bits (GShard, arXiv 2006.16668, section 3.2), over the innermost ranks. mesh: of all ranks.
    sends_tokens_once: `Software.sends_tokens_once`.
    """
    if not model.experts or piece.ep == 1:
        return 0.0
    routed = routed_rows(model, piece)
    group = expert_group(mesh, piece.ep, hardware)
    rows = 2.0 * routed.rows * model.hidden
    if not sends_tokens_once:
        return group.exchange(rows)
    tokens = rows / model.top_k
    over_network = tokens * other_places(group.size // group.on_node, model.top_k) / group.card
    over_node = tokens * other_places(group.size, model.top_k) / group.bandwidth
    return max(over_network, over_node) + group.latency


def other_places(count: int, top_k: int) -> float:
    """Return at how many of `count` nodes or ranks, without its own, a token has at least one of its K experts.

    The mean over evenly loaded experts; several of a token's experts may be at one place.
    """
    return (count - 1) * (1 - (1 - 1 / count) ** top_k)


def expert_group(mesh: Sequence[int], ep: int, hardware: Hardware) -> comms.Group:
    """Return the ranks that share the experts of a block: the innermost ones."""
    ranks = 1
    for size in mesh:
        ranks *= size
    return comms.group((ranks // ep, ep), [1], hardware)


def expert_shards(mesh: Sequence[int], ep: int, hardware: Hardware, software: Software) -> comms.Group:
    """Return the ranks over which FSDP shards a rank's experts: what ep leaves of dp_shard x cp x tp (efsdp)."""
    pp, replicate, *borrowed = mesh
    sharing = 1
    for size in borrowed:
        sharing *= size
    return comms.group((pp * replicate, sharing // ep, ep), [1], hardware, software.constants.fall, software.one_card)


class RoutedActivations(NamedTuple):
    """Bytes that router and routed experts leave of one micro batch for their backward."""

    choices: float
    """of the router: its input in float32, logits, scores, the order of the experts"""
    rows: float
    """rows in the order of the experts, their input"""
    inner: float
    """between the products of an expert"""
    gates: float
    """part of `inner`: results of the products"""
    results: float
    """rows that the experts return, which the weighted sum keeps"""
    products: float
    """results of products and of what is sent: what selective recomputation keeps"""
    shared: float
    """part of `products` that is kept without recomputation too"""
    half: float
    """results of every second product, and of what is sent: what selective_half keeps"""
    half_shared: float
    """part of `half` that is kept without recomputation too"""

    @property
    def whole(self) -> float:
        """What is kept if nothing is recomputed."""
        return self.choices + self.rows + self.inner + self.results


def routed_activations(model: Model, piece: Piece, kernels: Kernels) -> RoutedActivations:
    """Return what router and routed experts keep, of evenly loaded experts times `piece.imbalance`."""
    if not model.experts:
        return RoutedActivations(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    routed = routed_rows(model, piece)
    own = routed.tokens * model.top_k
    order = 8.0 * (2 * own) + 8.0 * routed.rows * (piece.ep > 1)  # which token a row is of, and where it goes
    choices = routed.tokens * (4.0 * model.hidden + 16.0 * model.experts + 8.0 * model.top_k) + order
    gates = 4.0 * routed.rows * routed.width
    inner = gates + (2.0 if kernels.compiled else 4.0) * routed.rows * routed.width
    rows, results = 2.0 * routed.rows * model.hidden, 2.0 * own * model.hidden
    logits = 4.0 * routed.tokens * model.experts
    sent = (rows + results) * (piece.ep > 1)
    # Products in order: q, k, v, o, router, gate, up, down of the shared experts, gate, up, down of the routed ones. Of
    # the routed ones the second, fourth, ... is up with shared experts; without them they are gate and down.
    has_shared = model.shared_experts > 0
    return RoutedActivations(
        choices,
        rows,
        inner,
        gates,
        results,
        products=logits + gates + rows + sent,
        shared=logits + gates + results * (piece.ep > 1),
        half=gates / 2 + rows * (not has_shared) + sent,
        half_shared=gates / 2 + results * (piece.ep > 1),
    )
