"""Predict the bytes that blocks keep of a micro batch for their backward, and what the backward needs. No torch.

Computation is in 16 bits. With dropout and a fused softmax, the bytes per token are those of Korthikanti et al. 2022
(arXiv 2205.05198, table 2), generalized to any heads, key-value heads, feed-forward width, features and fusion; without
them they are what autograd keeps, which `tests/planner/test_memory.py` compares with the dry run.

Shapes: T tokens of a rank in a micro batch, D hidden, H and K query and key-value heads of width Q, F feed-forward.
"""

from typing import NamedTuple

from torchllm.config import Model, Parallel, Recompute
from torchllm.planner.compute import Kernels, Piece, dense_width
from torchllm.planner.experts import RoutedActivations, expert_parameters, routed_activations
from torchllm.spec.flops import matrices, recompute_interval
from torchllm.spec.software import Software


class Phase(NamedTuple):
    """A moment at which a block's backward may hold most."""

    more: float
    """bytes of gradients of activations, minus the activations that are already freed"""
    gradients: float
    """parameters whose gradients exist"""
    reduced: float = 0.0
    """parameters whose gradients are being reduced"""
    after_unit: bool = True
    """whether the buffer of the last reduction before this block is still there, which the block's first one frees"""
    freed: float = 0.0
    """parameters of this block that are no longer gathered"""


class BlockActivations(NamedTuple):
    """Bytes that one micro batch leaves in one block on one rank."""

    norm: float
    """what one norm keeps"""
    entry: float
    """the input, which is all that a recomputed block keeps"""
    attention: float
    """norm, projections and core"""
    core: float
    """part of `attention`: matrices of scores, or a flash kernel's sums"""
    ffn: float
    """between the two products of the feed-forward layer"""
    residual: float
    """the second norm, and what feeds the feed-forward layer"""
    products: float
    """results of matrix products, of attention and of collectives, the input: what selective recomputation keeps"""
    shared: float
    """part of `products` that is kept without recomputation too"""
    half: float
    """results of every second matrix product and of attention, the input: what selective_half keeps"""
    half_shared: float
    """part of `half` that is kept without recomputation too"""
    deferred: float
    """inputs and output gradients of the matrices, where their gradients are put off"""
    phases: tuple["Phase", ...]
    """moments of the backward"""

    @property
    def whole(self) -> float:
        """Everything that is kept if nothing is recomputed."""
        return self.attention + self.residual + self.ffn


def block_activations(
    model: Model, piece: Piece, parallel: Parallel, kernels: Kernels, software: Software
) -> BlockActivations:
    """Return what one block keeps. Bytes per token first, multiplied by the tokens at the end."""
    gated, hidden = model.features.gated_ffn, float(model.hidden)
    wide, narrow = model.heads * model.head_width / piece.tp, model.kv * model.head_width / piece.tp
    ffn, here = dense_width(model) / piece.tp, hidden / piece.spread
    routed = routed_activations(model, piece, kernels)
    has_dense = 1.0 if ffn else 0.0  # a sparse block without shared experts has only routed ones
    fused_norm = model.features.norm == "layer" or kernels.fused_norm or kernels.compiled
    norm = (2.0 if fused_norm else 8.0) * here  # the input; or it and its normalised self in float32
    feeds = 2.0 * (hidden if software.keeps_gathered else here)  # what the products read
    exchanged = 2.0 * wide * (parallel.cp > 1 and parallel.cp_method == "ulysses")  # the result in both arrangements
    dropped = here * software.dropout  # a mask of a byte
    of_core = core(model, piece, kernels, software)
    fused_qk_norm = kernels.fuses_qk_norm(model, piece.tp)
    qk_norms = 0.0
    if model.qk_norm != "none":
        qk_norms = (2.0 if fused_qk_norm else 8.0) * (wide + narrow)  # as `norm`, of q and of k
    attention = norm + feeds + dropped + qk_norms + 2 * (wide + 2 * narrow) + 2 * wide + exchanged + of_core
    inner = (6.0 if kernels.compiled else 8.0) * ffn if gated else 4.0 * ffn
    gates = 4.0 * ffn if gated else 2.0 * ffn
    shared = 2 * narrow + 2 * wide + gates + 4 * model.heads / piece.tp
    if model.qk_norm != "none" and fused_qk_norm:
        shared += qk_norms  # results of products, which the norms keep as their inputs
    results = 2 * (wide + 2 * narrow) + 2 * hidden * (1 + has_dense) + gates
    if software.keeps_every_other:  # of q, k, v, o, gate, up, down the first, third, ...
        results = 2 * (wide + narrow) + 2 * hidden + gates / 2
    half = 2 * narrow + 2 * hidden * (1 + (has_dense if model.experts else 0))  # k, o; down of shared experts
    half_shared = 2 * wide + 4 * model.heads / piece.tp  # attention's result
    if gated:
        half += 2 * ffn  # up
        half_shared += 2 * ffn
    else:
        half += 2 * hidden  # down
    if model.qk_norm != "none" and fused_qk_norm:
        half_shared += 2.0 * narrow  # k, which its norm keeps
    if model.norm_position == "after" and fused_norm:  # results of o and down, which the norms keep as their inputs
        shared += 4 * here
        half_shared += 2 * here if gated else 4 * here
    sent = 0.0  # under tensor parallelism it can make selective recomputation keep more than everything
    if software.saves_collectives and piece.spread > 1:
        sent = 4 * hidden + 4 * here  # gathered before attention and the feed-forward layer, scattered after them
        shared += 4 * hidden * software.keeps_gathered
        half_shared += 4 * hidden * software.keeps_gathered
    elif software.saves_collectives and piece.tp > 1:
        sent = 4 * hidden  # summed over the ranks
    if software.saves_collectives and exchanged:
        sent += 4 * (wide + narrow)  # q, k, v and the result of attention
    read = 2 * hidden * (1 + has_dense) + 2 * wide + 2 * ffn
    given = 2 * (wide + 2 * narrow) + 2 * hidden * (1 + has_dense) + gates
    whole = attention + norm + has_dense * feeds + dropped + inner
    of_norm = (4.0 if fused_norm else 20.0) * here + 2 * hidden
    count = piece.tokens
    weights = block_weights(model, piece)
    after_unit = not model.experts  # the router, a unit of its own, is reduced before
    own_unit = weights.experts if piece.ep > 1 else 0.0  # reduced and freed before the rest of the block
    of_ffn = weights.ffn + weights.experts - own_unit
    through_gates = Phase(
        more=count * (2 * hidden + gates) - routed.whole,
        gradients=weights.down + weights.experts - own_unit,
        after_unit=after_unit,
        freed=own_unit,
    )
    second_norm = Phase(
        more=count * (of_norm - inner - has_dense * feeds) - routed.whole,
        gradients=of_ffn,
        after_unit=after_unit,
        freed=own_unit,
    )
    first_norm = Phase(
        more=count * (of_norm - whole) - routed.whole,
        gradients=weights.attention + of_ffn,
        reduced=weights.attention + of_ffn,
        after_unit=after_unit,
        freed=own_unit,
    )
    phases = [*routed_phases(model, piece, routed, weights.experts), second_norm, first_norm]
    if has_dense:
        phases.append(through_gates)
    if of_core > 4.0 * model.heads / piece.tp:  # matrices of scores have gradients as large
        of_scores = SCORES * model.heads / piece.tp * piece.keys
        more = count * (of_scores - inner - norm - has_dense * feeds) - routed.whole
        phases.append(second_norm._replace(more=more))
    return BlockActivations(
        count * norm,
        count * 2 * here,
        count * attention,
        count * of_core,
        count * inner + routed.whole,
        count * (norm + has_dense * feeds + dropped),
        count * (2 * here + results + 2 * wide + sent + 4 * model.heads / piece.tp) + routed.products,
        count * shared + routed.shared,
        count * (2 * here + half + 2 * wide + sent + 4 * model.heads / piece.tp) + routed.half,
        count * half_shared + routed.half_shared,
        count * (read + given),
        tuple(phases),
    )


class BlockWeights(NamedTuple):
    """Parameters of a block's matrices on one rank, gathered."""

    attention: float
    ffn: float
    """of the feed-forward layer that every token uses"""
    down: float
    """part of `ffn`: its last product"""
    experts: float
    """of the routed experts"""


def block_weights(model: Model, piece: Piece) -> BlockWeights:
    """Return the parameters of a block on one rank; of a sparse block in a model with experts."""
    sizes = matrices(model, layer=model.layers - 1)
    attention = sizes.attention / piece.tp
    if not model.experts:
        return BlockWeights(attention, sizes.ffn / piece.tp, sizes.down / piece.tp, 0.0)
    down = model.hidden * dense_width(model) / piece.tp
    return BlockWeights(attention, 3 * down, down, expert_parameters(model, piece.ep if piece.ep > 1 else piece.tp))


def routed_phases(model: Model, piece: Piece, routed: RoutedActivations, experts: float) -> list[Phase]:
    """Return the moments of a backward through router and routed experts; experts: parameters on this rank.

    The results' gradients come in float32 from the weighted sum; then those of rows and gates in 16 bits.
    """
    if not model.experts:
        return []
    out = 2.0 * piece.tokens * model.hidden
    through_gates = out + 2 * routed.rows + routed.gates - routed.results - routed.inner
    phases = [
        Phase(out + 4 * routed.results, 0.0),  # the weighted sum
        Phase(out + routed.rows - routed.results + routed.gates / 2, experts / 3),  # down
        Phase(through_gates, experts),
    ]
    if piece.ep > 1:
        phases.append(Phase(out - routed.whole, experts, experts, after_unit=False, freed=experts))
    return phases


SCORES = 10.0
"""bytes per score while its gradient is computed: the weights' gradient in 16 bits and float32, its own in float32"""


def core(model: Model, piece: Piece, kernels: Kernels, software: Software) -> float:
    """Return the bytes per token that attention's core keeps besides q, k, v and its result.

    Matrices of scores: a fused softmax keeps its result in 16 bits, and with dropout a mask of a byte and the dropped
    result (Korthikanti et al., 5 a s / h); a plain one keeps it in float32 and in 16 bits. A flash kernel keeps a
    float32 per head and token.
    """
    if kernels.attention in ("eager", "fused_softmax"):
        each = software.fused_scores if kernels.attention == "fused_softmax" else software.eager_scores
        each += 3.0 * software.dropout
        return each * model.heads / piece.tp * piece.keys
    return 4.0 * model.heads / piece.tp


class StageActivations(NamedTuple):
    """What the blocks of a stage keep of one micro batch."""

    held: float
    """bytes that are kept until the backward"""
    again: float
    """bytes that the backward recomputes, for one block (or segment) at a time"""


def stage_activations(
    model: Model, blocks: int, recompute: Recompute, one: BlockActivations, software: Software
) -> StageActivations:
    """Return what `blocks` blocks keep."""
    if not blocks:
        return StageActivations(0.0, 0.0)
    match recompute.mode:
        case "full":
            return StageActivations(blocks * one.entry, one.whole)
        case "segment":
            size = min(blocks, recompute_interval(recompute, model.layers))
            return StageActivations(-(-blocks // size) * one.entry, size * one.whole)
        case "every_k":
            again = -(-blocks // recompute_interval(recompute, model.layers))
            return StageActivations(again * one.entry + (blocks - again) * one.whole, one.whole)
        case "ffn":
            return StageActivations(blocks * (one.whole - one.ffn), one.ffn)
        case "selective" if software.recomputes_attention_only:
            return StageActivations(blocks * (one.whole - one.core), one.core)
        case "selective":
            products = one.products if software.saves_collectives else min(one.products, one.whole)
            return StageActivations(blocks * products, max(0.0, one.whole - one.shared))
        case "selective_half":
            half = one.half if software.saves_collectives else min(one.half, one.whole)
            return StageActivations(blocks * half, max(0.0, one.whole - one.half_shared))
    return StageActivations(blocks * one.whole, 0.0)
