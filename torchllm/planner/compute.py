"""Predict the seconds that a GPU computes on one micro batch in a block, the head, the embedding. No torch.

A matrix product takes the longer of two times: its operations at the rate that its shape reaches, its bytes at the rate
of the memory. Elementwise work takes the time of its bytes. Waiting for other GPUs is in `comms` and `predict`.
"""

from typing import NamedTuple

from torchllm.config import Model, Recompute
from torchllm.spec.cluster import Hardware
from torchllm.spec.flops import half_of_products, matrices, product_sizes
from torchllm.spec.software import AttentionKernel, Constants, Software

TILE = 128 * 128
"""elements of a product that one multiprocessor computes at once (the common tile of cuBLAS and CUTLASS)"""
WAVE = 0.68
"""rounds of tiles that are lost at the end of a product, when not all multiprocessors have one"""
DEPTH = 230.0
"""inner size at which a tile takes twice as long as its operations: it is filled and written out too"""
MEMORY_RATE = 0.85
"""share of the memory's bandwidth that elementwise kernels reach"""


class Seconds(NamedTuple):
    """Time of a GPU by what it does."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    kernels: float = 0.0
    """number of kernels, not seconds: `total` adds the time to launch them"""

    def plus(self, other: "Seconds", times: float = 1.0) -> "Seconds":
        """Return self + times x other."""
        return Seconds(*(mine + times * its for mine, its in zip(self, other, strict=True)))

    def total(self, constants: Constants) -> float:
        """Return wall time: what the kernels compute, and `launch` seconds per kernel to start and end."""
        return self.computing / constants.speed + self.kernels * constants.launch

    @property
    def computing(self) -> float:
        """Seconds in which a kernel computes or moves bytes."""
        return self.matmul + self.attention + self.elementwise


class Kernels(NamedTuple):
    """Which kernels the run uses."""

    attention: AttentionKernel = "flash2"
    fused_norm: bool = False
    compiled: bool = False
    """blocks compiled: elementwise work is fused"""
    float8: float = 0.0
    """share of the float8 units' peak over that of bfloat16 that the products of blocks gain; 0: they are in 16 bits"""

    def fuses_qk_norm(self, model: Model, tp: int) -> bool:
        """Return whether norms of q and k are one kernel each: over a width of which a rank has a part, if compiled."""
        return self.compiled or (self.fused_norm and (model.qk_norm == "head" or tp == 1))


def product_rate(hardware: Hardware, float8: float) -> float:
    """Return the FLOP/s of large matrix products. float8: `Kernels.float8`; 0: in 16 bits."""
    if not float8:
        return hardware.achievable
    return hardware.achievable * float8 * hardware.peak.float8 / hardware.peak.bfloat16


def matmul_seconds(m: int, n: int, k: int, hardware: Hardware, float8: float = 0.0) -> float:
    """Return the seconds of a product (m, k) x (k, n) of 16-bit factors: a roofline, lower for few or shallow tiles."""
    rate = product_rate(hardware, float8)
    waves = m * n / (TILE * hardware.multiprocessors)
    operations = 2.0 * m * n * k / rate * (1 + WAVE / waves) * (1 + DEPTH / k)
    moved = 2.0 * (m * k + k * n + m * n) / (hardware.memory_bandwidth * MEMORY_RATE)
    return max(operations, moved)


def dense_width(model: Model) -> int:
    """Return the width of a block's feed-forward layer that every token uses.

    Of a sparse block that is the width of all shared experts together; 0 if it has none.
    """
    return model.shared_experts * model.expert_width if model.experts else model.ffn


def products(model: Model, tp: int) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of a block's matrices on one of `tp` ranks; those that read the same input are one.

    Without routed experts, whose products are in `experts`.
    """
    wide, narrow, ffn = (
        model.heads * model.head_width // tp,
        model.kv * model.head_width // tp,
        dense_width(model) // tp,
    )
    shapes = [(wide + 2 * narrow, model.hidden), (model.hidden, wide)]
    if ffn:
        gates = 2 if model.features.gated_ffn else 1
        shapes += [(gates * ffn, model.hidden), (model.hidden, ffn)]
    return shapes


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
    """rows of the busiest rank's experts over those of an average rank"""


def block_forward(model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware) -> Seconds:
    """Return the time of one block's forward."""
    shapes = products(model, piece.tp)
    time = sum(matmul_seconds(piece.tokens, outs, ins, hardware, kernels.float8) for outs, ins in shapes)
    core = attention(model, piece, kernels, software, hardware, backward=False)
    return (
        Seconds(time, 0.0, 0.0, len(shapes))
        .plus(core)
        .plus(elementwise(model, piece, kernels, software, hardware, False))
    )


def block_backward(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware
) -> tuple[Seconds, Seconds]:
    """Return the times of the gradient of a block's input and of the gradient of its weights."""
    shapes = products(model, piece.tp)
    inputs = sum(matmul_seconds(piece.tokens, ins, outs, hardware, kernels.float8) for outs, ins in shapes)
    weights = sum(matmul_seconds(ins, outs, piece.tokens, hardware, kernels.float8) for outs, ins in shapes)
    core = attention(model, piece, kernels, software, hardware, backward=True)
    around = elementwise(model, piece, kernels, software, hardware, True)
    added = gradient_traffic(software) * sum(outs * ins for outs, ins in shapes)
    of_weights = Seconds(weights, 0.0, _moving(added, hardware), (2 if added else 1) * len(shapes))
    if software.trained < 1:
        of_weights = Seconds()
    return Seconds(inputs, 0.0, 0.0, len(shapes)).plus(core).plus(around), of_weights


def gradient_traffic(software: Software) -> float:
    """Return the bytes per parameter that a kernel moves to add a micro batch's gradient to the step's.

    0 where the product itself adds to it: then it is not charged a second time.
    """
    return 2.0 + 2.0 * software.gradients if software.temporary_gradients else 0.0


def _moving(bytes: float, hardware: Hardware) -> float:
    return bytes / (hardware.memory_bandwidth * MEMORY_RATE)


def attention(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware, backward: bool
) -> Seconds:
    """Return the time of scores, softmax and their product with the values, of this rank's heads.

    Flash kernels compute the pairs that causal mask and window leave, half of all without a window, and in the backward
    5 products for the forward's 2 (Dao et al., arXiv 2205.14135 and 2307.08691); the others compute all, and move every
    score through memory several times, counted here in bytes.
    """
    if kernels.attention in ("eager", "fused_softmax"):
        pairs = piece.tokens * piece.keys * model.heads / piece.tp
        operations = 4.0 * pairs * model.head_width
        unfused = kernels.attention == "eager"
        moved = {(True, False): 34.0, (True, True): 42.0, (False, False): 4.0, (False, True): 6.0}[unfused, backward]
        moved += 5.0 * software.dropout
        products = operations * (2 if backward else 1) / (hardware.achievable * BATCHED)
        products = max(products, _moving(pairs * (8.0 if backward else 4.0), hardware))
        count = (9 if unfused else 3) + 2 * backward
        return Seconds(0.0, products, _moving(pairs * moved * software.constants.traffic, hardware), count)
    window = model.window_within(piece.keys)
    seen = window * (1.0 - window / (2 * piece.keys))  # by a query on average: the first ones have fewer before them
    operations = 4.0 * piece.tokens * seen * model.heads / piece.tp * model.head_width
    rate = getattr(hardware.attention, kernels.attention) * window / (window + SHORT)
    rate *= min(1.0, NARROW + (1 - NARROW) * model.head_width / 128)
    return Seconds(0.0, operations * (2.5 / BACKWARD_RATE if backward else 1.0) / rate, 0.0, 3 if backward else 1)


NARROW = 0.98
"""rate of a flash kernel on heads of no width over that on heads of 128: linear between"""
BATCHED = 0.45
"""rate of attention's batched products over that of large ones"""
SHORT = 1100.0
"""keys at which a flash kernel has half its rate"""
BACKWARD_RATE = 0.81
"""rate of a flash kernel's backward over its forward's (arXiv 2307.08691, figures 4 to 6)"""


def kernel_count(model: Model, fused: bool, unfused_norm: bool, dropout: bool) -> int:
    """Return the elementwise kernels of a block's forward: norms, residuals, rotary positions, activation, copies."""
    norms, residuals, copies = 2 * (7 if unfused_norm else 1), 2, 2
    if not fused:
        residuals += 2 * dropout
    rotary = 0 if model.features.learned_positions else (1 if fused else 8)
    activation = 2 if model.features.gated_ffn and not fused else 1
    return norms + residuals + copies + rotary + activation


FUSED_NORM = (4.0, 12.0)
"""bytes per element that a norm in one kernel moves, forward and backward"""


def elementwise(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware, backward: bool
) -> Seconds:
    """Return the time of a block's norms, residuals, rotary positions and activation, by the bytes that they move."""
    features, fused = model.features, kernels.compiled or software.fused_elementwise
    unfused = features.norm == "rms" and not (kernels.fused_norm or kernels.compiled)
    norm = software.plain_norm[backward] if unfused else FUSED_NORM[backward]
    residual = 6.0 if fused else 6.0 + 5.0 * software.dropout  # cuBLAS adds a bias as it writes the product
    width = (model.heads + model.kv) * model.head_width / piece.tp
    rotary = 0.0 if features.learned_positions else (6.0 if fused else 22.0)
    ffn = dense_width(model) / piece.tp
    act = (
        ((10.0 if backward else 6.0) if fused else (18.0 if backward else 10.0))
        if features.gated_ffn
        else (4.0 + 2.0 * backward)
    )
    if model.qk_norm != "none":
        rotary += (FUSED_NORM if kernels.fuses_qk_norm(model, piece.tp) else software.plain_norm)[backward]
    copies = 4.0 * 2 * width
    moved = piece.tokens * (2 * (norm + residual) * model.hidden / piece.spread + rotary * width + copies + act * ffn)
    count = float(kernel_count(model, fused, unfused, software.dropout))
    if model.qk_norm != "none" and not kernels.compiled:
        count += 2 if kernels.fuses_qk_norm(model, piece.tp) else 16
    if backward:
        count *= 1.5
    return Seconds(0.0, 0.0, _moving(moved * software.constants.traffic, hardware), count)


def head_seconds(
    model: Model, piece: Piece, kernels: Kernels, software: Software, hardware: Hardware
) -> tuple[Seconds, Seconds, Seconds]:
    """Return the times of last norm, output projection and loss: forward, gradient of the input, of the weights."""
    rows = model.vocab / (piece.tp if software.vocab_parallel else 1)
    loss = (8.0, 8.0) if kernels.compiled else (software.loss_forward, software.loss_backward)
    n = int(rows)
    logits = piece.tokens * (model.vocab if software.whole_logits else rows) * software.constants.traffic
    forward = Seconds(
        matmul_seconds(piece.tokens, n, model.hidden, hardware), 0.0, _moving(loss[0] * logits, hardware), 12
    )
    inputs = Seconds(
        matmul_seconds(piece.tokens, model.hidden, n, hardware), 0.0, _moving(loss[1] * logits, hardware), 8
    )
    added = gradient_traffic(software) * rows * model.hidden
    return (
        forward,
        inputs,
        Seconds(matmul_seconds(model.hidden, n, piece.tokens, hardware), 0.0, _moving(added, hardware), 2),
    )


def embedding_seconds(model: Model, piece: Piece, software: Software, hardware: Hardware) -> tuple[Seconds, Seconds]:
    """Return the times of the look-up and of its gradient.

    The gradient is a whole table of zeros, to which rows are added, and which is then added to the step's sum.
    """
    table = model.vocab * model.hidden / (piece.tp if software.vocab_parallel else 1)
    rows = 6.0 * piece.tokens * model.hidden
    return Seconds(0.0, 0.0, _moving(rows, hardware), 2), Seconds(
        0.0, 0.0, _moving(rows + (4 + 2 * software.gradients) * table, hardware), 4
    )


def recomputed(
    model: Model, recompute: Recompute, forward: Seconds, core: Seconds, around: Seconds, software: Software
) -> Seconds:
    """Return the time of what the backward runs again of a block's forward, on average over the blocks."""
    none = Seconds()
    mode = recompute.mode
    if mode == "selective" and software.keeps_every_other:
        mode = "selective_half"
    match mode:
        case "full" | "segment":
            return forward
        case "every_k":
            return none.plus(forward, 1 / (recompute.k or 2))
        case "ffn":
            sizes = matrices(model, layer=model.layers - 1)
            share = (sizes.ffn - sizes.down) / (sizes.attention + sizes.ffn)
            return Seconds(forward.matmul * share, 0.0, 0.6 * forward.elementwise, 0.6 * forward.kernels)
        case "selective":
            return core if software.recomputes_attention_only else around
        case "selective_half":
            share = half_of_products(model, model.layers - 1) / sum(product_sizes(model, model.layers - 1))
            return around.plus(Seconds(matmul=forward.matmul * share, kernels=3))
    return none
