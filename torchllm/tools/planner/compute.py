"""Predict the seconds that a GPU computes on one micro batch in a block, the head, the embedding. No torch.

A matrix product takes the longer of two times: its operations at the rate that its shape reaches, its bytes at the rate
of the memory. Elementwise work takes the time of its bytes. Waiting for other GPUs is in `comms` and `predict`.
"""

from functools import lru_cache
from typing import NamedTuple

from torchllm.config import Model, Recompute
from torchllm.facts.block_kinds import block_kind
from torchllm.facts.flops import MatrixShape, half_of_products, matrices
from torchllm.facts.parts.costs import MixerCosts, PerPass, RankShare
from torchllm.facts.parts.part import found
from torchllm.facts.parts.registry import feed_forward, mixer
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.software import AttentionKernel, Constants, Software

TILE = 128 * 128
"""elements of a product that one multiprocessor computes at once (the common tile of cuBLAS and CUTLASS)"""
WAVE = 0.68
"""rounds of tiles that are lost at the end of a product, when not all multiprocessors have one"""
DEPTH = 230.0
"""inner size at which a tile takes twice the time of its operations, because it is also filled and written out"""
MEMORY_RATE = 0.85
"""share of the memory's bandwidth that elementwise kernels reach"""
ELEMENT_BYTES = 2.0
"""bytes per 16-bit element of activations, weights and the operands of products"""
FLOAT32_BYTES = 4.0
MULTIPLY_ADD = 2.0
"""FLOPs per multiply-add"""


class Seconds(NamedTuple):
    """Time of a GPU by kind of work."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    kernels: float = 0.0
    """number of kernels, not seconds: `total` adds the time to launch them"""

    def plus(self, addend: "Seconds", times: float = 1.0) -> "Seconds":
        """Return self + times x addend."""
        return Seconds(
            self.matmul + times * addend.matmul,
            self.attention + times * addend.attention,
            self.elementwise + times * addend.elementwise,
            self.kernels + times * addend.kernels,
        )

    def total(self, constants: Constants) -> float:
        """Return wall time: the time of the kernels, and `launch` seconds per kernel to start and end."""
        return self.computing / constants.speed + self.kernels * constants.launch

    @property
    def computing(self) -> float:
        """Seconds that kernels spend on computing or moving bytes."""
        return self.matmul + self.attention + self.elementwise


NO_TIME = Seconds()
"""no time at all"""


class BackwardSeconds(NamedTuple):
    """Times of a backward."""

    inputs: Seconds
    """gradient of the input"""
    weights: Seconds
    """gradient of the weights"""


class Kernels(NamedTuple):
    """Which kernels the run uses."""

    attention: AttentionKernel = "flash2"
    fused_norm: bool = False
    compiled: bool = False
    """blocks compiled: elementwise work is fused"""
    compiled_loss: bool = False
    """cross entropy compiled: it never holds logits in float32"""
    float8: float = 0.0
    """gain of the blocks' products, as a share of float8 peak / bfloat16 peak; 0: they are in 16 bits"""
    graphs: bool = False
    """forward and backward of a step are one CUDA graph"""

    def fuses_qk_norm(self, model: Model, tp: int) -> bool:
        """Return whether norms of q and k are one kernel each; with a width split over ranks only if compiled."""
        return self.compiled or (self.fused_norm and (model.qk_norm != "width" or tp == 1))


class Piece(NamedTuple):
    """One micro batch on one rank."""

    sequences: int
    tokens: int
    """tokens of this rank: sequences x length / cp"""
    keys: int
    """keys that a query can see: the whole length"""
    tp: int
    spread: int
    """ranks that share the tokens between the matrices: tp with sequence parallelism, else 1"""
    ep: int = 1
    """ranks that share the experts of a sparse block"""
    imbalance: float = 1.0
    """rows of the busiest rank's experts, divided by the average over ranks"""
    ring: bool = False
    """whether the ranks of cp share each sequence as a ring"""
    padded: float = 1.0
    """rows of the buffers of a sparse block, divided by those in them"""
    chunks: int = 1
    """`parallel.expert_chunks`"""

    @property
    def share(self) -> RankShare:
        """Arguments of a mixer's costs."""
        length = self.tokens // self.sequences
        return RankShare(self.tp, self.spread, length, self.keys // length, self.ring)


@lru_cache(maxsize=1024)
def mixer_costs(model: Model, piece: Piece) -> MixerCosts:
    """Return the costs of the mixer of a view on a rank. ValueError if unknown: `parameters.why_not_costed`."""
    costs = mixer(model).costs
    if costs is None:
        raise ValueError(f"the costs of {model.mixer} are not known")
    of_mixer: MixerCosts = found(costs)(model, piece.share)
    return of_mixer


def kernel_of_attention(model: Model, software: Software) -> AttentionKernel:
    """Return the kernel of the attention of a model, or of a view."""
    return "eager" if model.attention == "eager" else software.attention


def memory_seconds(bytes: float, hardware: Hardware) -> float:
    """Return the seconds that elementwise kernels take to move `bytes` through the GPU's memory."""
    return bytes / (hardware.memory_bandwidth * MEMORY_RATE)


def product_rate(hardware: Hardware, float8: float) -> float:
    """Return the FLOP/s of large matrix products. float8: `Kernels.float8`; 0: in 16 bits."""
    if not float8:
        return hardware.achievable
    return hardware.achievable * float8 * hardware.peak.float8 / hardware.peak.bfloat16


def tiled_seconds(operations: float, rate: float, waves: float, depth: float) -> float:
    """Return the seconds of a product's operations: longer if its tiles are few or shallow.

    rate: FLOP/s of a large product. waves: tiles per multiprocessor. depth: inner size.
    """
    seconds = operations / rate
    seconds *= 1 + WAVE / waves
    seconds *= 1 + DEPTH / depth
    return seconds


def matmul_seconds(m: int, n: int, k: int, hardware: Hardware, float8: float = 0.0) -> float:
    """Return the seconds of a product (m, k) x (k, n) of 16-bit factors: a roofline, lower for few or shallow tiles."""
    rate = product_rate(hardware, float8)
    operations = MULTIPLY_ADD * m * n * k
    waves = m * n / (TILE * hardware.multiprocessors)
    computing = tiled_seconds(operations, rate, waves, depth=k)
    elements = m * k + k * n + m * n
    return max(computing, memory_seconds(ELEMENT_BYTES * elements, hardware))


def dense_width(model: Model) -> int:
    """Return the width of a block's feed-forward layer that every token uses.

    Of a sparse block: the width of all shared experts together, or of a dense layer next to them; 0 if neither.
    """
    of_all = (shape.outputs for shape in feed_forward(model).products(model) if shape.layer == "up_proj")
    return next(of_all, 0)


def added_matrices(model: Model, tp: int) -> list[MatrixShape]:
    """Return the matrices that a fork's kind of block adds, on one of `tp` ranks."""
    matrices_of_fork = []
    shapes = block_kind(model).shapes(model)
    for added in block_kind(model).parameters:
        if added.role == "matrix":
            outputs, inputs = shapes[added.name]
            columns = outputs // tp if added.cut == "colwise" else outputs
            matrices_of_fork.append(MatrixShape(columns, inputs // tp if added.cut == "rowwise" else inputs))
    return matrices_of_fork


def mixer_products(model: Model, tp: int) -> dict[str, MatrixShape]:
    """Return the matrices of a block's mixer on one of `tp` ranks, by layer."""
    shapes = {}
    for product in mixer(model).products(model):
        outputs = product.outputs // tp if product.cut == "colwise" else product.outputs
        inputs = product.inputs // tp if product.cut == "rowwise" else product.inputs
        shapes[product.layer] = MatrixShape(outputs, inputs)
    return shapes


def whole_on_rank(model: Model, tp: int) -> float:
    """Return the elements of a mixer's matrices that one of `tp` ranks has beyond an equal part of all of them."""
    whole = whole_matrices(model)
    return whole - whole / tp


def whole_matrices(model: Model) -> int:
    """Return the elements of a mixer's matrices that every rank of tp has whole."""
    return sum(product.elements for product in mixer(model).products(model) if product.cut == "whole")


def products(model: Model, tp: int) -> list[MatrixShape]:
    """Return a block's matrices on one of `tp` ranks; those that read the same input are one.

    Without routed experts, whose products are in `experts`.
    """
    ffn_width = dense_width(model) // tp
    *before, output = mixer_products(model, tp).values()
    of_mixer = before[:1]
    for shape in before[1:]:
        if shape.inputs == of_mixer[-1].inputs:
            of_mixer[-1] = MatrixShape(of_mixer[-1].outputs + shape.outputs, shape.inputs)
        else:
            of_mixer.append(shape)
    attention = [*of_mixer, *added_matrices(model, tp), output]
    if not ffn_width:
        return attention
    factors = 2 if model.features.gated_ffn else 1
    up = MatrixShape(factors * ffn_width, model.hidden)
    down = MatrixShape(model.hidden, ffn_width)
    return [*attention, up, down]


def block_forward(model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware) -> Seconds:
    """Return the time of one block's forward."""
    matmul = 0.0
    shapes = products(model, piece.tp)
    for outputs, inputs in shapes:
        matmul += matmul_seconds(piece.tokens, outputs, inputs, hardware, kernels.float8)
    core = attention(model, piece, kernels, software, hardware, backward=False)
    elementwise_work = elementwise(model, piece, kernels, software, hardware, backward=False)
    return Seconds(matmul=matmul, kernels=len(shapes)).plus(core).plus(elementwise_work)


def block_backward(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware
) -> BackwardSeconds:
    """Return the times of the gradient of a block's input and of the gradient of its weights.

    Frozen weights have no gradient.
    """
    of_inputs = of_weights = 0.0
    elements = 0
    shapes = products(model, piece.tp)
    for outputs, inputs in shapes:
        of_inputs += matmul_seconds(piece.tokens, inputs, outputs, hardware, kernels.float8)
        of_weights += matmul_seconds(inputs, outputs, piece.tokens, hardware, kernels.float8)
        elements += outputs * inputs
    core = attention(model, piece, kernels, software, hardware, backward=True)
    elementwise_work = elementwise(model, piece, kernels, software, hardware, backward=True)
    inputs_time = Seconds(matmul=of_inputs, kernels=len(shapes)).plus(core).plus(elementwise_work)
    if software.trained < 1:
        return BackwardSeconds(inputs_time, NO_TIME)
    added = gradient_traffic(software) * elements
    kernels_per_product = 2 if added else 1
    weights_time = Seconds(
        matmul=of_weights,
        elementwise=memory_seconds(added, hardware),
        kernels=kernels_per_product * len(shapes),
    )
    return BackwardSeconds(inputs_time, weights_time)


def gradient_traffic(software: Software) -> float:
    """Return the bytes per parameter that a kernel moves to add a micro batch's gradient to the step's.

    It reads the one, in 16 bits, and reads and writes the other. 0 where the product itself adds to it: then it is not
    charged a second time.
    """
    if not software.temporary_gradients:
        return 0.0
    return ELEMENT_BYTES + 2.0 * software.gradients


NARROW = 0.98
"""rate of a flash kernel on heads of no width over that on heads of `WIDE_HEAD`: linear between"""
WIDE_HEAD = 128
"""head width used to measure `Hardware.attention`"""
SHORT = 1100.0
"""number of keys with half the rate of a flash kernel"""
FLASH_BACKWARD_OPERATIONS = 2.5
"""operations of a flash kernel's backward over its forward's: 5 products for 2 (arXiv 2307.08691, section 4.1)"""
BACKWARD_RATE = 0.81
"""rate of a flash kernel's backward over its forward's (arXiv 2307.08691, figures 4 to 6)"""
FLASH_KERNELS = PerPass(1, 3)
"""kernels of a flash attention; the backward prepares sums, computes, and casts"""
ATTENTION_PRODUCTS = 2
"""products of attention: of queries and keys, of scores and values"""

BATCHED = 0.45
"""rate of attention's batched products, relative to large products"""
SCORE_BYTES = PerPass(4.0, 8.0)
"""bytes per score that the batched products themselves write and read, in 16 bits"""
EAGER_BYTES = PerPass(34.0, 42.0)
"""bytes per score that scale, mask, softmax and casts move, each of them a kernel"""
EAGER_KERNELS = PerPass(9, 11)
"""kernels of the same, and of the products"""
FUSED_SOFTMAX_BYTES = PerPass(4.0, 6.0)
"""bytes per score that one kernel of scale, mask and softmax moves, in 16 bits: it reads and writes them, and its
backward reads two matrices and writes one"""
FUSED_SOFTMAX_KERNELS = PerPass(3, 5)
"""kernels of the same, and of the products"""
DROPOUT_BYTES = 5.0
"""bytes per element that a separate dropout kernel moves: 16 bits read and written, a mask of a byte"""


def attention(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware, backward: bool
) -> Seconds:
    """Return the time of a mixer's core: scores, softmax and their product with the values, of this rank's heads.

    Flash kernels compute the pairs that causal mask and window leave, half of all without a window, and in the backward
    5 products for the forward's 2 (Dao et al., arXiv 2205.14135 and 2307.08691); the others compute all, and move every
    score through memory several times, counted here in bytes. The rest of a core is counted in bytes too.
    """
    costs = mixer_costs(model, piece)
    moved = piece.tokens * costs.moved.of(backward) * software.constants.traffic
    besides = Seconds(elementwise=memory_seconds(moved, hardware), kernels=costs.kernels.of(backward))
    if not costs.heads:
        return besides
    if kernels.attention in ("eager", "fused_softmax"):
        return _attention_in_memory(model, piece, kernels, software, hardware, backward).plus(besides)
    window = model.window_within(piece.keys)
    keys_seen = window * (1.0 - window / (2 * piece.keys))  # on average: the first queries have fewer before them
    operations = ATTENTION_PRODUCTS * MULTIPLY_ADD * piece.tokens * keys_seen * costs.heads
    operations *= model.head_width
    rate = getattr(hardware.attention, kernels.attention) * window / (window + SHORT)
    rate *= min(1.0, NARROW + (1 - NARROW) * model.head_width / WIDE_HEAD)
    if backward:
        operations *= FLASH_BACKWARD_OPERATIONS / BACKWARD_RATE
    return Seconds(attention=operations / rate, kernels=FLASH_KERNELS.of(backward)).plus(besides)


def _attention_in_memory(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware, backward: bool
) -> Seconds:
    """Return the time of an attention that stores the matrix of scores of all pairs of tokens."""
    if kernels.attention == "eager":
        bytes_per_score, count = EAGER_BYTES.of(backward), EAGER_KERNELS.of(backward)
    else:
        bytes_per_score, count = FUSED_SOFTMAX_BYTES.of(backward), FUSED_SOFTMAX_KERNELS.of(backward)
    bytes_per_score += DROPOUT_BYTES * software.dropout
    scores = piece.tokens * piece.keys * mixer_costs(model, piece).heads
    operations = ATTENTION_PRODUCTS * MULTIPLY_ADD * scores * model.head_width
    if backward:
        operations *= 2  # the gradients of both factors
    computing = operations / (hardware.achievable * BATCHED)
    moving = memory_seconds(scores * SCORE_BYTES.of(backward), hardware)
    moved = scores * bytes_per_score * software.constants.traffic
    return Seconds(
        attention=max(computing, moving),
        elementwise=memory_seconds(moved, hardware),
        kernels=count,
    )


FUSED_NORM = PerPass(4.0, 12.0)
"""bytes per element that a norm in one kernel moves"""
PLAIN_NORM_KERNELS = 7
"""kernels of an RMSNorm of single operations: cast, square, mean, reciprocal root, product, cast, weight"""
PLAIN_QK_NORM_KERNELS = 16
"""kernels of such norms of q and of k, 8 each"""
RESIDUAL_BYTES = 6.0
"""bytes per element of a sum with the residual: two numbers of 16 bits read, one written"""
ROTARY_BYTES, ROTARY_BYTES_FUSED = 22.0, 6.0
"""bytes per element of q and k that rotary positions move, in single kernels and in one"""
ROTARY_KERNELS = 8
"""kernels of rotary positions of q and k that are not fused"""
COPY_BYTES = 8.0
"""bytes per element of two copies that are as wide as q and k, each read and written in 16 bits"""
GATED_BYTES, GATED_BYTES_FUSED = PerPass(10.0, 18.0), PerPass(6.0, 10.0)
"""bytes per feature that SwiGLU moves between the products, in single kernels and in one"""
UNGATED_BYTES, SQUARED_RELU_BYTES = PerPass(4.0, 6.0), PerPass(8.0, 10.0)
"""bytes per feature that an activation without a gate moves, in one kernel: it reads one number, its gradient two; and
that ReLU and its square move in single kernels, two forward and two backward"""
BACKWARD_KERNELS = 1.5
"""number of elementwise kernels of a backward, relative to its forward"""


def norms_per_part(view: Model) -> int:
    """Return the number of norms of the residual stream at attention; the feed-forward layer has the same number."""
    return 2 if view.norm_position == "both" else 1


def elementwise(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware, backward: bool
) -> Seconds:
    """Return the time of a block's norms, residuals, rotary positions and activation, by the bytes that they move."""
    is_fused = kernels.compiled or software.fused_elementwise
    is_norm_plain = model.features.norm == "rms" and not (kernels.fused_norm or kernels.compiled)
    plain_norm = PerPass(*software.plain_norm)
    norm = (plain_norm if is_norm_plain else FUSED_NORM).of(backward)
    residual = RESIDUAL_BYTES
    if not is_fused:  # cuBLAS adds a bias as it writes the product
        residual += DROPOUT_BYTES * software.dropout
    norms = 2 * norms_per_part(model) + feed_forward(model).norms
    between_products = (norms * norm + 2 * residual) * model.hidden / piece.spread

    costs = mixer_costs(model, piece)
    rotary = ROTARY_BYTES_FUSED if is_fused else ROTARY_BYTES
    is_inner_norm_fused = kernels.fuses_qk_norm(model, piece.tp)
    inner_norm = (FUSED_NORM if is_inner_norm_fused else plain_norm).of(backward)
    gating = (GATED_BYTES_FUSED if is_fused else GATED_BYTES).of(backward)
    normed = costs.normed + costs.normed_without_weight
    of_mixer = rotary * costs.turned + inner_norm * normed + COPY_BYTES * costs.copied + gating * costs.gated

    activation = _activation_bytes(model, is_fused).of(backward)
    ffn_width = dense_width(model) / piece.tp
    bytes_per_token = between_products + of_mixer + activation * ffn_width
    moved = piece.tokens * bytes_per_token * software.constants.traffic

    count = float(kernel_count(model, costs, is_fused, is_norm_plain, software.dropout))
    if normed and not kernels.compiled:
        count += 2 if is_inner_norm_fused else PLAIN_QK_NORM_KERNELS
    if backward:
        count *= BACKWARD_KERNELS
    return Seconds(elementwise=memory_seconds(moved, hardware), kernels=count)


def _activation_bytes(model: Model, is_fused: bool) -> PerPass:
    """Return the bytes per feature that the feed-forward layer moves between its products."""
    if model.features.gated_ffn:
        return GATED_BYTES_FUSED if is_fused else GATED_BYTES
    has_single_kernels = model.features.feed_forward == "relu2" and not is_fused
    return SQUARED_RELU_BYTES if has_single_kernels else UNGATED_BYTES


def kernel_count(model: Model, costs: MixerCosts, fused: bool, unfused_norm: bool, dropout: bool) -> int:
    """Return the elementwise kernels of a block's forward: norms, residuals, rotary positions, activation, copies."""
    norms = 2 * norms_per_part(model) + feed_forward(model).norms
    norms *= PLAIN_NORM_KERNELS if unfused_norm else 1
    gate = 0
    if costs.gated:
        gate = 1 if fused else 2
    residuals = 2
    copies = 2 if costs.copied else 0
    if dropout and not fused:
        residuals += 2
    rotary = 1 if fused else ROTARY_KERNELS
    if not costs.turned:
        rotary = 0
    activation = 1
    if model.features.feed_forward != "gelu" and not fused:
        activation = 2
    return norms + residuals + copies + rotary + activation + gate


class HeadSeconds(NamedTuple):
    """Times of last norm, output projection and loss."""

    forward: Seconds
    inputs: Seconds
    """gradient of their input"""
    weights: Seconds
    """gradient of their weights"""


COMPILED_LOSS = PerPass(8.0, 8.0)
"""bytes per logit that a compiled loss moves"""
HEAD_KERNELS = PerPass(12, 8)
"""kernels of last norm, output projection and loss; the kernels of the weights' gradient come on top"""
WEIGHT_GRADIENT_KERNELS = 2
"""kernels of a gradient of weights: the product, and the sum with the step's gradient"""


def head_seconds(model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware) -> HeadSeconds:
    """Return the times of last norm, output projection and loss: forward, gradient of the input, of the weights."""
    rows = model.vocab / piece.tp
    whole_rows = int(rows)
    loss = PerPass(software.loss_forward, software.loss_backward)
    if kernels.compiled or kernels.compiled_loss:
        loss = COMPILED_LOSS
    logits_per_token = model.vocab if software.whole_logits else rows
    logits = piece.tokens * logits_per_token * software.constants.traffic
    forward = Seconds(
        matmul=matmul_seconds(piece.tokens, whole_rows, model.hidden, hardware),
        elementwise=memory_seconds(loss.forward * logits, hardware),
        kernels=HEAD_KERNELS.forward,
    )
    inputs = Seconds(
        matmul=matmul_seconds(piece.tokens, model.hidden, whole_rows, hardware),
        elementwise=memory_seconds(loss.backward * logits, hardware),
        kernels=HEAD_KERNELS.backward,
    )
    added = gradient_traffic(software) * rows * model.hidden
    weights = Seconds(
        matmul=matmul_seconds(model.hidden, whole_rows, piece.tokens, hardware),
        elementwise=memory_seconds(added, hardware),
        kernels=WEIGHT_GRADIENT_KERNELS,
    )
    return HeadSeconds(forward, inputs, weights)


class EmbeddingSeconds(NamedTuple):
    """Times of the embedding."""

    look_up: Seconds
    gradient: Seconds


EMBEDDING_BYTES = 6.0
"""bytes per element of the tokens' rows that the look-up moves, and the sum of their gradients"""
ZEROED_TABLE_BYTES = 4
"""bytes per element of the gradient's table of 16 bits: it is filled with zeros, and read for the step's sum"""
EMBEDDING_KERNELS = PerPass(2, 4)
"""kernels of the look-up, and of its gradient"""


def embedding_seconds(model: Model, piece: Piece, software: Software, hardware: Hardware) -> EmbeddingSeconds:
    """Return the times of the look-up and of its gradient, with a norm of the embeddings if there is one.

    The gradient is a whole table of zeros; rows are added to it, and then it is added to the step's sum.
    """
    elements = model.vocab * model.hidden / piece.tp
    numbers = piece.tokens * model.hidden
    normed = numbers / piece.spread * model.features.normed_embeddings
    rows = EMBEDDING_BYTES * numbers + FUSED_NORM.forward * normed
    scattered = EMBEDDING_BYTES * numbers + FUSED_NORM.backward * normed
    scattered += (ZEROED_TABLE_BYTES + 2 * software.gradients) * elements
    return EmbeddingSeconds(
        look_up=Seconds(elementwise=memory_seconds(rows, hardware), kernels=EMBEDDING_KERNELS.forward),
        gradient=Seconds(elementwise=memory_seconds(scattered, hardware), kernels=EMBEDDING_KERNELS.backward),
    )


DEFAULT_INTERVAL = 2
"""recompute.mode every_k recomputes one block in this number, if recompute.k is 0"""
FFN_SHARE = 0.6
"""share of a block's elementwise work, and of its kernels, that recompute.mode ffn computes again"""
SELECTIVE_HALF_KERNELS = 3
"""products that recompute.mode selective_half computes again, a kernel each"""


def recomputed(
    model: Model,
    recompute: Recompute,
    forward: Seconds,
    core: Seconds,
    elementwise_work: Seconds,
    software: Software,
    tp: int = 1,
) -> Seconds:
    """Return the time of the forward operations that the backward recomputes, on average over like blocks.

    model: a view. core, elementwise_work: the parts of `forward` that are attention's core and elementwise kernels.
    tp: ranks that share the block.
    """
    sizes = matrices(model, layer=0)
    mode = recompute.mode
    if mode == "selective" and software.keeps_every_other:
        mode = "selective_half"
    match mode:
        case "full" | "segment":
            return forward
        case "every_k":
            return NO_TIME.plus(forward, times=1 / (recompute.k or DEFAULT_INTERVAL))
        case "ffn":
            share = (sizes.ffn - sizes.down) / (sizes.attention + sizes.ffn)
            return Seconds(
                matmul=forward.matmul * share,
                elementwise=FFN_SHARE * forward.elementwise,
                kernels=FFN_SHARE * forward.kernels,
            )
        case "selective":
            return core if software.recomputes_attention_only else elementwise_work
        case "selective_half":
            half = half_of_products(model, tp if software.saves_collectives else 1)
            share = half / (sizes.attention + sizes.ffn)
            products_time = Seconds(matmul=forward.matmul * share, kernels=SELECTIVE_HALF_KERNELS)
            return elementwise_work.plus(products_time)
    return NO_TIME
