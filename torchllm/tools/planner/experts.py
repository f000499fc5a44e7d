"""Predict the costs of the routed experts of a sparse block: parameters, seconds, bytes sent and kept. No torch.

A block is predicted from its view, as others of the model may be dense. The shared experts of a sparse block are one
layer that every token uses: `compute` predicts them as it predicts a dense feed-forward layer.

Shapes: T tokens that a rank routes, D hidden, E experts, K experts per token, F width of an expert.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchllm.config import Model
from torchllm.facts.parts.costs import PerPass
from torchllm.tools.planner import comms
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.compute import (
    ELEMENT_BYTES,
    FLOAT32_BYTES,
    GATED_BYTES,
    GATED_BYTES_FUSED,
    MULTIPLY_ADD,
    NO_TIME,
    TILE,
    BackwardSeconds,
    Kernels,
    Piece,
    Seconds,
    gradient_traffic,
    matmul_seconds,
    memory_seconds,
    product_rate,
    tiled_seconds,
)
from torchllm.tools.planner.software import Software

IMBALANCE = 1.2
"""rows of the busiest rank's experts, divided by the average over ranks, if a run has not measured it
(`metrics.jsonl`, experts/largest_load, is measured for single experts: an upper bound)"""
PADDED = 2 ** (2 / 8)
"""rows of the buffers of parallel.expert_dispatch = "optimistic", divided by the busiest rank's: their margin"""
FLOAT32_RATE = 1 / 16
"""rate of float32 products relative to 16-bit ones: 19.5 of 312 TFLOP/s on an A100, 67 of 989 on an H100, from their
data sheets"""
TILE_ROWS = 128
"""rows of a tile: the last one of each expert is half empty on average"""
MATRICES = 3
"""matrices of an expert: gate, up, down"""

PERMUTED_BYTES, PERMUTED_BYTES_FUSED = PerPass(4.0, 8.0), PerPass(4.0, 4.0)
"""bytes per element that putting rows in another order moves: in torch the backward adds to zeros, in a separate
kernel it reads and writes"""
COMBINED_BYTES, COMBINED_BYTES_FUSED = PerPass(10.0, 20.0), PerPass(2.0, 6.0)
"""bytes per element of the results that their weighted sum moves: in float32 tensors, and in the registers of one
kernel"""
ROUTER_SCORE_BYTES = PerPass(100.0, 60.0)
"""bytes per token and expert that scores, their sort, and the record of the choices move"""
ROUTER_INPUT_BYTES = 6.0
"""bytes per element of the router's input: 16 bits read, float32 written"""
ROUTED_KERNELS = PerPass(45.0, 60.0)
"""kernels of router and routed experts; the gradients of their weights come on top"""
CHUNK_KERNELS = PerPass(41.0, 40.0)
"""further kernels for each chunk but the first, the gradients of weights included; counted on the hollow GPU"""
ROUTED_GRADIENT_KERNELS = 8.0
"""kernels of the gradients of their weights, and of adding them to the step's"""

ADDED_GRADIENT_BYTES = 3 * ELEMENT_BYTES
"""bytes per element that adding two gradients of 16 bits moves"""

UNFUSED_GATE_BYTES = {"clamped_silu": 8.0}
"""bytes per feature that autograd keeps of a gate that is not compiled, in addition to both factors and the result, by
model.activation; others keep the activated gate in 16 bits"""
INDEX_BYTES = 8.0
"""bytes of an index in torch"""


def expert_parameters(model: Model, ranks: int) -> float:
    """Return the parameters of a block's routed experts on one of the `ranks` that share them, router excluded."""
    parameters = MATRICES * model.hidden * model.expert_width * model.experts
    return parameters / ranks


def unfused_gate_bytes(model: Model) -> float:
    """Return the bytes per feature of `UNFUSED_GATE_BYTES`."""
    return UNFUSED_GATE_BYTES.get(model.activation, ELEMENT_BYTES)


class RoutedRows(NamedTuple):
    """Sizes of the experts' products on the busiest rank in one micro batch."""

    tokens: float
    """tokens that this rank routes"""
    rows: float
    """rows that reach its experts, a row per token and expert"""
    experts: int
    """number of experts that have some or all of their features on this rank"""
    width: float
    """features of each expert that are on this rank"""
    padded: float = 1.0
    """rows of the buffers, divided by `rows`: those that are no product's"""
    chunks: int = 1
    """number of chunks that are sent and computed one after the other"""

    @property
    def of_chunk(self) -> "RoutedRows":
        """The rows of one chunk."""
        return self._replace(rows=self.rows / self.chunks, chunks=1)

    @property
    def moved(self) -> float:
        """Rows that are sent, held and moved."""
        return self.rows * self.padded

    @property
    def features(self) -> float:
        """Elements of the activations between the products of the experts."""
        return self.moved * self.width


def routed_rows(model: Model, piece: Piece) -> RoutedRows:
    """Return the rows of the busiest rank.

    With ep a rank routes its own part of a sequence and has whole experts; without, tp cuts every expert.
    """
    if piece.ep == 1:
        rows = piece.tokens * model.top_k
        return RoutedRows(piece.tokens, rows, model.experts, model.expert_width / piece.tp)
    tokens = piece.tokens / piece.tp
    rows_of_busiest = tokens * model.top_k * piece.imbalance
    experts = model.experts // piece.ep
    return RoutedRows(tokens, rows_of_busiest, experts, model.expert_width, piece.padded, piece.chunks)


def grouped_seconds(
    routed: RoutedRows, outputs: float, inputs: float, hardware: Hardware, float8: float = 0.0
) -> float:
    """Return the seconds of one product per expert, all of a chunk in one kernel: the roofline of `matmul_seconds`.

    Rows are padded to tiles, and the kernel reads every expert's matrix, however few rows it has.
    float8: `Kernels.float8`.
    """
    chunk = routed.of_chunk
    padded_rows = chunk.rows + chunk.experts * TILE_ROWS / 2
    waves = padded_rows * outputs / (TILE * hardware.multiprocessors)
    operations = MULTIPLY_ADD * padded_rows * outputs * inputs
    computing = tiled_seconds(operations, product_rate(hardware, float8), waves, depth=inputs)
    return routed.chunks * max(computing, _operand_seconds(chunk, outputs, inputs, hardware))


def grouped_gradient_seconds(
    routed: RoutedRows, outputs: float, inputs: float, hardware: Hardware, float8: float = 0.0
) -> float:
    """Return the seconds of the gradients of all experts' matrices: products over the rows of each expert.

    The gradients of each chunk but the first are added to those before.
    """
    chunk = routed.of_chunk
    rows_per_expert = max(1.0, chunk.rows / chunk.experts)
    tiles = chunk.experts * outputs * inputs / TILE
    waves = max(1.0, tiles / hardware.multiprocessors)
    operations = MULTIPLY_ADD * chunk.rows * outputs * inputs
    computing = tiled_seconds(operations, product_rate(hardware, float8), waves, depth=rows_per_expert)
    products = routed.chunks * max(computing, _operand_seconds(chunk, outputs, inputs, hardware))
    added = ADDED_GRADIENT_BYTES * routed.experts * outputs * inputs * (routed.chunks - 1)
    return products + memory_seconds(added, hardware)


def _operand_seconds(routed: RoutedRows, outputs: float, inputs: float, hardware: Hardware) -> float:
    """Return the seconds to read and write rows, results and matrices of a grouped product once."""
    elements = routed.rows * (inputs + outputs)
    elements += routed.experts * outputs * inputs
    return memory_seconds(ELEMENT_BYTES * elements, hardware)


def routed_forward(model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware) -> Seconds:
    """Return the time of router and routed experts in a block's forward, without communication."""
    if not model.experts:
        return NO_TIME
    routed = routed_rows(model, piece)
    width, hidden = routed.width, model.hidden
    gate = grouped_seconds(routed, width, hidden, hardware, kernels.float8)
    down = grouped_seconds(routed, hidden, width, hardware, kernels.float8)
    matmul = 2 * gate + down  # up takes as long as gate
    matmul += _router_seconds(model, routed, hardware)
    moving = _elementwise_seconds(model, piece, kernels, software, hardware, backward=False)
    kernels_of_chunks = (piece.chunks - 1) * CHUNK_KERNELS.forward
    return Seconds(matmul, elementwise=moving, kernels=ROUTED_KERNELS.forward + kernels_of_chunks)


def routed_backward(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware
) -> BackwardSeconds:
    """Return the times of the gradients of router and experts: of their inputs, and of their weights."""
    if not model.experts:
        return BackwardSeconds(NO_TIME, NO_TIME)
    routed = routed_rows(model, piece)
    width, hidden = routed.width, model.hidden
    router = _router_seconds(model, routed, hardware)

    gate = grouped_seconds(routed, hidden, width, hardware, kernels.float8)
    down = grouped_seconds(routed, width, hidden, hardware, kernels.float8)
    matmul = 2 * gate + down
    matmul += router
    moving = _elementwise_seconds(model, piece, kernels, software, hardware, backward=True)
    kernels_of_chunks = (piece.chunks - 1) * CHUNK_KERNELS.backward
    inputs = Seconds(matmul, elementwise=moving, kernels=ROUTED_KERNELS.backward + kernels_of_chunks)

    gate_weights = grouped_gradient_seconds(routed, width, hidden, hardware, kernels.float8)
    down_weights = grouped_gradient_seconds(routed, hidden, width, hardware, kernels.float8)
    matmul = 2 * gate_weights + down_weights
    matmul += router
    added = gradient_traffic(software) * MATRICES * routed.experts * width * hidden
    adding = memory_seconds(added, hardware)
    weights = Seconds(matmul, elementwise=adding, kernels=ROUTED_GRADIENT_KERNELS)
    return BackwardSeconds(inputs, weights)


def _router_seconds(model: Model, routed: RoutedRows, hardware: Hardware) -> float:
    """Return the seconds of the product of tokens and router, in float32."""
    in_16_bits = matmul_seconds(int(routed.tokens), model.experts, model.hidden, hardware)
    return in_16_bits / FLOAT32_RATE


def _elementwise_seconds(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware, backward: bool
) -> float:
    """Return the seconds of the elementwise work around router and experts, by the bytes that it moves."""
    permuted, combined = PERMUTED_BYTES, COMBINED_BYTES
    if software.fuses_permutations:
        permuted, combined = PERMUTED_BYTES_FUSED, COMBINED_BYTES_FUSED
    activation = GATED_BYTES
    if kernels.compiled or software.fused_elementwise:
        activation = GATED_BYTES_FUSED
    permutations = 4 if piece.ep > 1 else 2  # by expert and back; with ep by rank and back too
    bytes_per_element = permutations * permuted.of(backward)
    bytes_per_element += combined.of(backward)
    bytes_per_token = ROUTER_INPUT_BYTES * model.hidden
    bytes_per_token += ROUTER_SCORE_BYTES.of(backward) * model.experts

    routed = routed_rows(model, piece)
    moved = routed.moved * model.hidden * bytes_per_element
    moved += routed.features * activation.of(backward)
    moved += routed.tokens * bytes_per_token
    return memory_seconds(moved * software.constants.traffic, hardware)


def shared_seconds(model: Model, piece: Piece, hardware: Hardware) -> float:
    """Return the seconds of the shared experts' products in a forward, behind which rows may be sent."""
    width = model.shared_experts * model.expert_width // piece.tp
    if not width:
        return 0.0
    gate_and_up = matmul_seconds(piece.tokens, 2 * width, model.hidden, hardware)
    down = matmul_seconds(piece.tokens, model.hidden, width, hardware)
    return gate_and_up + down


def exchange_seconds(
    model: Model, piece: Piece, mesh: Sequence[int], hardware: Hardware, sends_tokens_once: bool = False
) -> float:
    """Return the seconds that the busiest rank takes to send or receive the rows of a chunk once: 0 without ep.

    T x K x D elements of 16 bits (GShard, arXiv 2006.16668, section 3.2), over the innermost ranks. mesh: of all ranks.
    sends_tokens_once: `Software.sends_tokens_once`.
    """
    if not model.experts or piece.ep == 1:
        return 0.0
    routed = routed_rows(model, piece)
    group = expert_group(mesh, piece.ep, hardware)
    row_bytes = ELEMENT_BYTES * routed.of_chunk.moved * model.hidden
    if not sends_tokens_once:
        return group.exchange(row_bytes)
    token_bytes = row_bytes / model.top_k
    nodes = group.size // group.on_node
    over_network = token_bytes * other_places(nodes, model.top_k) / group.card
    within_node = token_bytes * other_places(group.size, model.top_k) / group.bandwidth
    return max(over_network, within_node) + group.latency


def other_places(count: int, top_k: int) -> float:
    """Return at how many of `count` nodes or ranks, without its own, a token has at least one of its K experts.

    The mean over evenly loaded experts; several of a token's experts may be at one place.
    """
    none_there = (1 - 1 / count) ** top_k
    return (count - 1) * (1 - none_there)


def expert_group(mesh: Sequence[int], ep: int, hardware: Hardware) -> comms.Group:
    """Return the ranks that share the experts of a block: the innermost ones."""
    groups = math.prod(mesh) // ep
    return comms.group((groups, ep), [1], hardware)


def expert_shards(mesh: Sequence[int], ep: int, hardware: Hardware, software: Software) -> comms.Group:
    """Return the ranks that FSDP shards a rank's experts over: dp_shard x cp x tp / ep (efsdp)."""
    pp, dp_replicate, *borrowed = mesh
    shards = math.prod(borrowed) // ep
    shape = (pp * dp_replicate, shards, ep)
    return comms.group(shape, [1], hardware, software.constants.fall, software.one_card)


class RoutedActivations(NamedTuple):
    """Bytes that router and routed experts leave of one micro batch for their backward."""

    choices: float
    """of the router: its input in float32, logits, scores, choices, the order of the rows"""
    rows: float
    """rows in the order of the experts, their input"""
    inner: float
    """between the products of an expert"""
    gates: float
    """part of `inner`: results of the products"""
    results: float
    """rows that the experts return, which the weighted sum keeps"""
    products: float
    """results of products and of exchanges: saved by selective recomputation"""
    sent: float
    """part of `products`: of exchanges"""

    @property
    def whole(self) -> float:
        """All activations, kept if nothing is recomputed."""
        return self.choices + self.rows + self.inner + self.results


NO_ACTIVATIONS = RoutedActivations(*[0.0] * len(RoutedActivations._fields))
"""of a block without experts"""
SCORE_BYTES = 8.0
"""bytes per token and expert: logits and scores in float32"""
CHOICE_BYTES = 16.0
"""bytes per token and chosen expert: its index, and its score and its weight in float32"""


def routed_activations(model: Model, piece: Piece, kernels: Kernels) -> RoutedActivations:
    """Return the activations of router and routed experts, evenly loaded and then scaled by `piece.imbalance`."""
    if not model.experts:
        return NO_ACTIVATIONS
    routed = routed_rows(model, piece)
    has_ep = piece.ep > 1
    rows_of_own_tokens = routed.tokens * model.top_k

    bytes_per_token = FLOAT32_BYTES * model.hidden
    bytes_per_token += SCORE_BYTES * model.experts
    bytes_per_token += CHOICE_BYTES * model.top_k
    order = INDEX_BYTES * (2 * rows_of_own_tokens)  # which token a row is of, and where it goes
    if has_ep:
        order += INDEX_BYTES * (2 * routed.moved)  # by expert, and back by rank
    choices = routed.tokens * bytes_per_token + order

    gates = 2 * ELEMENT_BYTES * routed.features
    activated = ELEMENT_BYTES * routed.features  # the input of down
    if not kernels.compiled:
        activated += unfused_gate_bytes(model) * routed.features
    rows = ELEMENT_BYTES * routed.moved * model.hidden
    results = ELEMENT_BYTES * rows_of_own_tokens * model.hidden
    logits = FLOAT32_BYTES * routed.tokens * model.experts
    received = rows if has_ep else 0.0
    returned = results if has_ep else 0.0
    sent = received + returned

    return RoutedActivations(
        choices=choices,
        rows=rows,
        inner=gates + activated,
        gates=gates,
        results=results,
        products=logits + gates + rows + sent,
        sent=sent,
    )
