"""Predict the bytes that blocks keep of a micro batch for their backward, and the working memory of it. No torch.

Computation is in 16 bits. With dropout and a fused softmax, the bytes per token follow Korthikanti et al. 2022 (arXiv
2205.05198, table 2), generalized to any heads, key-value heads, feed-forward width, features and fusion; without
them they follow autograd, which `tests/tools/planner/test_memory.py` compares with the dry run.

Shapes: T tokens of a rank in a micro batch, D hidden, H and K query and key-value heads of width Q, F feed-forward.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from torchllm.config import Model, TrainedParameters
from torchllm.facts.block_kinds import block_kind
from torchllm.facts.flops import ALL_TRAINED, matrices
from torchllm.facts.parts.costs import MixerCosts
from torchllm.facts.parts.registry import feed_forward
from torchllm.tools.planner.compute import (
    Kernels,
    Piece,
    added_matrices,
    dense_width,
    mixer_costs,
    mixer_products,
    norms_per_part,
    whole_on_rank,
)
from torchllm.tools.planner.experts import (
    NO_ACTIVATIONS,
    RoutedActivations,
    expert_parameters,
    routed_activations,
    unfused_gate_bytes,
)
from torchllm.tools.planner.software import Software


class Phase(NamedTuple):
    """A moment of a block's backward that may be its peak."""

    working: float
    """bytes of gradients of activations, minus the activations that are already freed"""
    gradients: float
    """parameters whose gradients exist"""
    of_experts: float = 0.0
    """part of `gradients` that is never put off: of routed experts"""
    reduced: float = 0.0
    """parameters whose gradients are being reduced"""
    after_unit: bool = True
    """whether the buffer of the last reduction before this block is still there, which the block's first one frees"""
    freed: float = 0.0
    """parameters of this block that are no longer gathered, if it frees its weights"""
    deferred: float = 0.0
    """bytes kept by then if gradients of weights are put off: inputs and output gradients of the products passed"""
    reduces_experts: bool = False
    """whether those that are reduced are a rank's own experts, which other ranks share than the rest of the block"""


class BlockActivations(NamedTuple):
    """Bytes that one micro batch leaves in one block on one rank."""

    norm: float
    """saved by one norm"""
    entry: float
    """the input, which is all that a recomputed block keeps"""
    attention: float
    """norm, projections and core"""
    core: float
    """part of `attention`: matrices of scores, or a flash kernel's sums"""
    ffn: float
    """between the two products of the feed-forward layer"""
    feeds_ffn: float
    """the input of the products of the feed-forward layer"""
    residual: float
    """the second norm"""
    products: float
    """results of matrix products, of attention and of collectives, the input: saved by selective recomputation"""
    half: float
    """results of every second matrix product and of attention, the input: saved by selective_half"""
    deferred: float
    """inputs and output gradients of the matrices, where their gradients are put off"""
    phases: tuple[Phase, ...]
    """moments of the backward"""

    @property
    def whole(self) -> float:
        """Everything that is kept if nothing is recomputed."""
        return self.attention + self.residual + self.feeds_ffn + self.ffn


class Widths(NamedTuple):
    """Features of a token on one rank."""

    hidden: float
    """D: of hidden states that tp leaves whole"""
    local: float
    """D, over the ranks among which sequence parallelism spreads the tokens"""
    ffn: float
    """F: of the feed-forward layer that every token uses; 0 in a sparse block without shared experts"""

    @classmethod
    def of(cls, model: Model, piece: Piece) -> "Widths":
        """Return the widths of a block. model: a view."""
        local = model.hidden / piece.spread
        return cls(float(model.hidden), local, dense_width(model) / piece.tp)

    @property
    def has_ffn(self) -> float:
        """1 if there is a feed-forward layer that every token uses, else 0."""
        return 1.0 if self.ffn else 0.0


class BlockProduct(NamedTuple):
    """A product of a block with a weight, in the order of the forward pass."""

    result: float
    """features of its result"""
    is_part: bool = False
    """whether tp gives each rank a part of a sum, which selective recomputation does not keep (`unkept_sums.py`)"""


class StoredParts(NamedTuple):
    """Bytes per token that a block keeps if nothing is recomputed."""

    norm: float
    norms: float
    """norms at attention; the norms at the feed-forward layer keep the same number of bytes"""
    feeds_attention: float
    """inputs of attention's products"""
    feeds_ffn: float
    """input of the first products of the feed-forward layer; 0 in a sparse block without shared experts"""
    qk_norms: float
    gate: float
    """sigmoid of attention's gate, and the gated result"""
    dropped: float
    """masks of dropout"""
    before: float
    """queries, keys and values of the tokens before a window's piece"""
    core: float
    inner: float
    """between the products of the feed-forward layer"""
    low_rank: float
    """results of A in updates B A x"""
    added: float
    """of a fork's kind of block, and of a mixer beyond queries, keys, values and results"""


def stored_per_token(
    model: Model, piece: Piece, kernels: Kernels, software: Software, trained: TrainedParameters, tokens_before: float
) -> StoredParts:
    """Return the bytes that one block keeps, without routed experts."""
    width = Widths.of(model, piece)
    feeds = 2.0 * width.local
    if software.keeps_gathered:
        feeds = 2.0 * width.hidden
    costs = mixer_costs(model, piece)
    norm = _norm_bytes(keeps_input_of_norm(model, kernels), model.features.norm_weights) * width.local
    qk_norms = _norm_bytes(keeps_input_of_qk_norm(model, piece, kernels)) * costs.normed
    qk_norms += _norm_bytes(kernels.fuses_qk_norm(model, piece.tp), has_weight=False) * costs.normed_without_weight
    inner = 4.0 * width.ffn
    if model.features.gated_ffn:
        inner = (6.0 + (0.0 if kernels.compiled else unfused_gate_bytes(model))) * width.ffn
    inner += feed_forward(model).kept(model, piece.tp) + norm * feed_forward(model).norms
    if not needs_input_of(trained, "down_proj"):
        inner -= 2.0 * width.ffn
    reads_attention = needs_input_of(trained, "q_proj", "k_proj", "v_proj")
    reads_ffn = width.ffn > 0 and needs_input_of(trained, "gate_proj", "up_proj")
    dropped = width.local * software.dropout  # a mask of a byte
    low_rank = 2.0 * trained.rank * len(trained.targets)
    scores = core(model, piece, kernels, software)
    return StoredParts(
        norm=norm,
        norms=norm * norms_per_part(model),
        feeds_attention=(2.0 * width.local if costs.latents else feeds) * reads_attention,
        feeds_ffn=feeds * reads_ffn,
        qk_norms=qk_norms,
        gate=gate_of_attention(costs, trained),
        dropped=dropped,
        before=2.0 * tokens_before * costs.inputs,
        core=scores,
        inner=inner,
        low_rank=low_rank,
        added=block_kind(model).stored(model, piece.tp) + costs.kept,
    )


def attention_bytes(costs: MixerCosts, stored: StoredParts) -> float:
    """Return the bytes per token of attention and its norm: q, k, v and the result in 16 bits, and the rest."""
    heads = 2 * (costs.inputs + costs.results)
    norms = stored.norms + stored.dropped + stored.qk_norms + stored.gate
    products = stored.feeds_attention + stored.low_rank
    return heads + norms + products + stored.before + stored.core + stored.added


def rank_of_update(matrix: str, trained: TrainedParameters) -> int:
    """Return the rank of a matrix's low-rank update; 0: it has none."""
    return trained.rank if matrix in trained.targets else 0


def needs_input_of(trained: TrainedParameters, *matrices: str) -> bool:
    """Return whether a gradient is computed from the input of one of these matrices of a block."""
    return not trained.only_updates or any(rank_of_update(matrix, trained) for matrix in matrices)


def gate_of_attention(costs: MixerCosts, trained: TrainedParameters) -> float:
    """Return the bytes per token that the gate of attention's results keeps: its sigmoid, and the input of o_proj."""
    if not costs.gates:
        return 0.0
    return 2.0 * costs.gates + 2.0 * costs.gated * needs_input_of(trained, "o_proj")


def fuses_norm(model: Model, kernels: Kernels) -> bool:
    """Return whether a norm of the residual stream is one kernel."""
    return model.features.norm == "layer" or kernels.fused_norm or kernels.compiled


def keeps_input_of_norm(model: Model, kernels: Kernels) -> bool:
    """Return whether a norm of the residual stream keeps its input alone."""
    return fuses_norm(model, kernels) or model.offsets_norms


def keeps_input_of_qk_norm(model: Model, piece: Piece, kernels: Kernels) -> bool:
    """Return whether norms of q and k keep their inputs alone."""
    is_cut = model.qk_norm == "width" and piece.tp > 1
    return kernels.fuses_qk_norm(model, piece.tp) or (model.offsets_norms and not is_cut)


def _norm_bytes(keeps_input: bool, has_weight: bool = True) -> float:
    """Return the bytes per feature that a norm keeps: the input; or it in float32, and for a weight its normalized
    self too.
    """
    if keeps_input:
        return 2.0
    return 8.0 if has_weight else 4.0


def block_products(
    model: Model, piece: Piece, trained: TrainedParameters, routed: RoutedActivations = NO_ACTIVATIONS
) -> list[BlockProduct]:
    """Return the products of a block in the order of their use (`facts.flops.weight_products`).

    Results of the router are empty here, and without `routed` so are the results of routed experts. An updated layer is
    three products, W x, A x and B A x.
    """
    width = Widths.of(model, piece)
    added = {f"added {n}": BlockProduct(shape.outputs) for n, shape in enumerate(added_matrices(model, piece.tp))}
    *before, last = mixer_products(model, piece.tp).items()
    layers = {name: BlockProduct(shape.outputs) for name, shape in before}
    to_hidden = BlockProduct(width.hidden, is_part=piece.tp > 1)
    layers |= {**added, last[0]: to_hidden}
    of_gate = BlockProduct(routed.gates / 2 / (2 * piece.tokens))
    of_ffn = dict.fromkeys(("gate_proj", "up_proj"), BlockProduct(width.ffn)) | {"down_proj": to_hidden}
    of_ffn |= dict.fromkeys(("routed gate_proj", "routed up_proj"), of_gate)
    of_ffn["routed down_proj"] = BlockProduct(routed.rows / (2 * piece.tokens))
    for shape in feed_forward(model).products(model):
        layers[shape.layer] = of_ffn.get(shape.layer, BlockProduct(0.0))
    products = []
    for name, product in layers.items():
        products.append(product)
        if rank := rank_of_update(name, trained):
            products += [BlockProduct(rank), BlockProduct(product.result)]
    return products


def bytes_of_results(products: Sequence[BlockProduct]) -> float:
    """Return the bytes per token of the results of some products, in 16 bits."""
    return 2.0 * sum(product.result for product in products)


def saved_collectives(model: Model, piece: Piece, software: Software) -> float:
    """Return the bytes per token of the results of collectives that selective recomputation keeps.

    Without `software.regathers` gathered inputs are among them, as without recomputation.
    """
    width, costs, share = Widths.of(model, piece), mixer_costs(model, piece), piece.share
    sums = feed_forward(model).sums
    if piece.ep > 1 and piece.spread > 1:  # routed experts read a rank's own part of the sequence
        sums = int(dense_width(model) > 0)
    if not software.saves_collectives:
        return 0.0
    saved = 0.0
    if piece.spread > 1:  # gathered before attention and the feed-forward layer, scattered after them
        gathered = 2 * (sums * width.hidden + (costs.latents or width.hidden))
        gathered *= not software.regathers
        saved = gathered + 2 * (1 + sums) * width.local
    elif piece.tp > 1:  # summed over the ranks
        saved = 2 * (1 + sums) * width.hidden
    if share.cp > 1 and not share.ring:  # q, k, v and the result of attention
        saved += 2 * (costs.inputs + costs.results)
    return saved


@lru_cache(maxsize=1024)
def block_activations(
    model: Model,
    piece: Piece,
    kernels: Kernels,
    software: Software,
    trained: TrainedParameters = ALL_TRAINED,
    tokens_before: float = 0.0,
) -> BlockActivations:
    """Return the activations of one block. Cached: many layouts share it.

    model: a view. tokens_before: of `Case`.
    """
    width, costs = Widths.of(model, piece), mixer_costs(model, piece)
    stored = stored_per_token(model, piece, kernels, software, trained, tokens_before)
    routed = routed_activations(model, piece, kernels)
    attention = attention_bytes(costs, stored)

    products = block_products(model, piece, trained)
    with_routed = block_products(model, piece, trained, routed)
    if software.saves_collectives:  # and with them the sums, whose parts are not kept
        products = [product for product in products if not product.is_part]
        with_routed = [product for product in with_routed if not product.is_part]
    if software.keeps_every_other:
        products = products[::2]
    # the input; attention's own result, and the float32 sums of its kernel
    always = 2 * width.local + 2 * costs.results + 4 * costs.heads + saved_collectives(model, piece, software)

    deferred = 0.0  # gradients of low-rank updates are computed at once
    if not trained.only_updates:
        added = sum(shape.outputs for shape in added_matrices(model, piece.tp))
        deferred = deferred_bytes(model, piece) + 2 * added
    tokens = piece.tokens
    again = 2.0 * width.hidden * (software.regathers and not software.keeps_gathered)
    phases = backward_phases(model, piece, kernels, stored, routed, tokens * deferred, again)
    return BlockActivations(
        norm=tokens * stored.norm,
        entry=tokens * 2 * width.local,
        attention=tokens * attention,
        core=tokens * stored.core,
        ffn=tokens * stored.inner + routed.whole,
        feeds_ffn=tokens * stored.feeds_ffn,
        residual=tokens * (stored.norms + stored.dropped),
        products=tokens * (always + bytes_of_results(products)) + routed.products,
        half=tokens * (always + bytes_of_results(with_routed[1::2])) + routed.sent,
        deferred=tokens * deferred,
        phases=tuple(phases),
    )


def gate_bytes(model: Model, width: Widths) -> float:
    """Return the bytes per token of the results of the first products of the feed-forward layer."""
    products = 2 if model.features.gated_ffn else 1
    return 2.0 * products * width.ffn


def deferred_bytes(model: Model, piece: Piece) -> float:
    """Return the bytes per token of the inputs of a block's products, and of the gradients of their results."""
    width = Widths.of(model, piece)
    shapes = list(mixer_products(model, piece.tp).values())
    of_mixer = shapes[0].inputs + sum(shape.outputs for shape in shapes)
    of_mixer += sum(shape.inputs for before, shape in pairwise(shapes[:-1]) if shape.inputs != before.inputs)
    of_mixer += shapes[-1].inputs
    return 2.0 * of_mixer + deferred_by_ffn(model, width)


def deferred_by_ffn(model: Model, width: Widths) -> float:
    """Return the part of `deferred_bytes` of the feed-forward layer."""
    return 4 * width.hidden * width.has_ffn + 2 * width.ffn + gate_bytes(model, width)


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
    """Return the parameters of a block's matrices on one rank. model: a view."""
    sizes = matrices(model, layer=0)
    attention = sizes.attention / piece.tp + whole_on_rank(model, piece.tp)
    if not model.experts:
        return BlockWeights(attention, sizes.ffn / piece.tp, sizes.down / piece.tp, 0.0)
    down = model.hidden * dense_width(model) / piece.tp
    sharing = piece.ep if piece.ep > 1 else piece.tp
    experts = expert_parameters(model, sharing)
    return BlockWeights(attention, 3 * down, down, experts)


def backward_phases(
    model: Model,
    piece: Piece,
    kernels: Kernels,
    stored: StoredParts,
    routed: RoutedActivations,
    deferred: float,
    again: float = 0.0,
) -> list[Phase]:
    """Return the moments of a block's backward; the reduction of its gradients is the last.

    deferred: bytes that the whole block keeps if gradients of weights are put off; 0 if it keeps none. again: bytes per
    token of an input that is gathered again.
    """
    width, costs = Widths.of(model, piece), mixer_costs(model, piece)
    weights = block_weights(model, piece)
    own_unit = weights.experts if piece.ep > 1 else 0.0  # reduced and freed before the rest of the block
    of_experts = weights.experts - own_unit
    of_ffn = weights.ffn + of_experts
    unit = weights.attention + of_ffn
    per_feature = 4.0 if fuses_norm(model, kernels) else 20.0
    of_norm = per_feature * width.local + 2 * width.hidden
    freed_by_ffn = stored.inner + stored.feeds_ffn
    whole = attention_bytes(costs, stored) + stored.norms + stored.dropped + freed_by_ffn
    second_norm = Phase(
        working=piece.tokens * (of_norm - freed_by_ffn) - routed.whole,
        gradients=of_ffn,
        of_experts=of_experts,
        after_unit=not model.experts,  # the router is a separate unit, reduced before
        freed=own_unit,
        deferred=min(deferred, piece.tokens * deferred_by_ffn(model, width)),
    )
    at_first_norm = piece.tokens * (of_norm - whole) - routed.whole
    first_norm = second_norm._replace(working=at_first_norm, gradients=unit, deferred=deferred)
    reduction = first_norm._replace(reduced=unit, after_unit=False, freed=own_unit + unit)
    phases = [*routed_phases(model, piece, routed, weights.experts), second_norm]
    if width.ffn:
        at_gates = 2 * width.hidden + gate_bytes(model, width) + again
        working = piece.tokens * at_gates - routed.whole
        of_down = weights.down + of_experts
        phases.append(second_norm._replace(working=working, gradients=of_down, deferred=0.0))
    if again:  # with the gradients of queries, keys and values
        at_inputs = 2 * width.hidden + 2 * costs.inputs + again - freed_by_ffn - stored.norms
        phases.append(second_norm._replace(working=piece.tokens * at_inputs - routed.whole))
    of_core = costs.working
    if stored.core > 4.0 * costs.heads:  # matrices of scores have gradients as large
        of_core += SCORES * costs.heads * piece.keys
    if of_core:
        freed = freed_by_ffn + stored.norms
        working = piece.tokens * (of_core - freed) - routed.whole
        phases.append(second_norm._replace(working=working))
    return [*phases, first_norm, reduction]


def routed_phases(model: Model, piece: Piece, routed: RoutedActivations, experts: float) -> list[Phase]:
    """Return the moments of a backward through router and routed experts; experts: parameters on this rank.

    The results' gradients come in float32 from the weighted sum; then the gradients of rows and gates in 16 bits.
    """
    if not model.experts:
        return []
    out = 2.0 * piece.tokens * model.hidden
    weighted_sum = out + 4 * routed.results
    through_down = out + routed.rows - routed.results + routed.gates / 2
    through_gates = out + 2 * routed.rows + routed.gates - routed.results - routed.inner
    phases = [
        Phase(weighted_sum, 0.0),
        Phase(through_down, experts / 3, experts / 3),
        Phase(through_gates, experts, experts),
    ]
    if piece.ep > 1:
        reduction = Phase(
            out - routed.whole, experts, experts, experts, after_unit=False, freed=experts, reduces_experts=True
        )
        phases.append(reduction)
    return phases


SCORES = 10.0
"""bytes per score while its gradient is computed: the weights' gradient in 16 bits and float32, its own in float32"""


def core(model: Model, piece: Piece, kernels: Kernels, software: Software) -> float:
    """Return the bytes per token that attention's core keeps besides q, k, v and its result.

    Matrices of scores: a fused softmax keeps its result in 16 bits, and with dropout a mask of a byte and the dropped
    result (Korthikanti et al., 5 a s / h); a plain one keeps it in float32 and in 16 bits. A flash kernel keeps a
    float32 per head and token.
    """
    heads = mixer_costs(model, piece).heads
    if kernels.attention not in ("eager", "fused_softmax"):
        return 4.0 * heads
    per_score = software.fused_scores if kernels.attention == "fused_softmax" else software.eager_scores
    if model.score_softcap:  # the tanh, in float32
        per_score += 4.0
    return (per_score + 3.0 * software.dropout) * heads * piece.keys
