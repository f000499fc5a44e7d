"""Floating-point operations of a model, for MFU and HFU. No torch.

One multiply-add is two operations. Everything is per input token of a training step, forward and backward, unless it
says otherwise. Shapes: D hidden, H heads, K key-value heads, Q head width, F feed-forward, V vocabulary, L blocks,
S sequence.

- Model FLOPs (`flops_per_token`): PaLM (arXiv 2204.02311, appendix B), 6 N + 12 L H Q S with N = all parameters, and
  the window for S if there is one. N counts only the experts that a token uses (`active_parameter_count`). Model FLOPs
  do not depend on how the step is computed, so two layouts compare by MFU = tokens/s * model FLOPs / peak.
- `flops_per_token(pairs=...)`: the same with the attention that causal mask, window and document mask leave.
- HFU adds `recomputed_flops_per_token`.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from torchllm.config import SCHEDULES, Config, Model, Parallel, Recompute, TrainedParameters, Training
from torchllm.facts.parts.part import WeightProduct, product_of
from torchllm.facts.parts.registry import feed_forward, mixer
from torchllm.facts.shapes import block_shapes, parameter_shapes

ALL_TRAINED = TrainedParameters()
"""all parameters that model.frozen does not match"""


class Matrices(NamedTuple):
    """Numbers of elements in the weight matrices that one token is multiplied with in a block."""

    attention: int
    """of the mixer: q, k, v and output projection; and all matrices of `facts/block_kinds.py`"""
    ffn: int
    """feed-forward layer; with experts the router, the experts that a token uses, and the shared ones"""
    down: int
    """the last product of the feed-forward layer, included in `ffn`; 0 with experts, whose weighted sum needs its
    result for gradients"""


@lru_cache(maxsize=1024)
def matrices(model: Model, layer: int) -> Matrices:
    """Return the sizes of a block's weight matrices that a token is multiplied with. layer: its index."""
    view = model.of_block(layer)
    of_ffn = feed_forward(view).products(view)
    ffn = sum(product.elements for product in of_ffn)
    return Matrices(
        attention=sum(product.elements for product in weight_products(view)) - ffn,
        ffn=ffn,
        down=0 if feed_forward(view).needs_last_product else of_ffn[-1].elements,
    )


def _needs_last_product(view: Model) -> bool:
    """Return whether a gradient needs the result of a block's last product: for a norm after it, or a weighted sum."""
    return view.norm_position != "before" or feed_forward(view).needs_last_product or mixer(view).needs_last_product


def head_size(model: Model) -> int:
    """Return the elements of the output projection; when tied, the embedding is the same matrix."""
    return model.vocab_rows * model.hidden


def weight_products(view: Model) -> list[WeightProduct]:
    """Return the products of a block with weight matrices, in the order of their use.

    A fork's kind of block has its matrices before the mixer's last one.
    """
    of_mixer = mixer(view).products(view)
    if view.block:
        from torchllm.facts.block_kinds import block_kind  # of no use to other models

        of_mixer[-1:-1] = [product_of("", shape) for shape in block_kind(view).matrices(view)]
    return of_mixer + feed_forward(view).products(view)


def added_flops(model: Model, sequence_length: int) -> int:
    """Return the FLOPs of one token's forward pass, beyond matrices, that a fork's kind of block adds to each block."""
    if not model.block:
        return 0
    from torchllm.facts.block_kinds import block_kind

    return block_kind(model).flops(model, sequence_length)


def half_of_products(view: Model, tp: int = 1, is_compiled: bool = False) -> int:
    """Return the elements of a block's matrices whose products recompute.mode selective_half computes again.

    These are the first, third, fifth, ... tp: ranks that share the block. A product whose result they sum, as o and
    down, is not computed again; it counts as one of the products only if the block is compiled
    (`parallel/unkept_sums.py`). Of routed experts a later result is summed.
    """
    products = weight_products(view)[: None if _needs_last_product(view) else -1]
    if tp > 1 and not is_compiled:
        products = [product for product in products if product.cut != "rowwise"]
    return sum(product.elements for product in products[::2] if tp == 1 or product.cut != "rowwise")


@lru_cache(maxsize=1024)
def parameter_count(model: Model) -> int:
    """Return the number of parameters (N): both embedding matrices, a tied one once; norms, biases, positions."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def active_parameter_count(model: Model) -> int:
    """Return the number of parameters that one token uses: all, except that it uses top_k experts of a block."""
    unused = 0
    for view in model.views:
        for parameter in feed_forward(view).parameters:
            if parameter.of_experts and (shape := parameter.shape(view)):
                unused += math.prod(shape) // view.experts * (view.experts - view.top_k)
    return parameter_count(model) - unused


class MatrixShape(NamedTuple):
    """Sizes of a weight matrix."""

    outputs: int
    inputs: int


def target_shapes(model: Model) -> dict[str, MatrixShape]:
    """Return the shapes of the matrices of a block that may have an update, by name; experts have none."""
    shapes = {}
    for name, shape in block_shapes(model, layer=0).items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") and len(shape) == 2:
            shapes[layer.rpartition(".")[2]] = MatrixShape(*shape)
    return shapes


def updated_shapes(model: Model, trained: TrainedParameters) -> dict[str, MatrixShape]:
    """Return the shapes of the matrices of a block that have an update, by name. model: a view, without experts.

    Its kind of blocks may lack some of the targets, as one whose keys are its values does.
    """
    return {name: shape for name, shape in target_shapes(model).items() if name in trained.targets}


def trained_parameter_count(model: Model, trained: TrainedParameters) -> int:
    """Return the number of parameters that are trained."""
    if not trained.only_updates:
        return sum(math.prod(shape) for name, shape in parameter_shapes(model).items() if not model.freezes(name))
    return trained.rank * sum(sum(shape) for view in model.views for shape in updated_shapes(view, trained).values())


def flops_per_token(
    model: Model, sequence_length: int, pairs: float | None = None, trained: TrainedParameters = ALL_TRAINED
) -> float:
    """Return the model FLOPs of one token (PaLM, appendix B), N being the parameters that it uses, each as often.

    pairs: keys that a query sees, on average over queries, and over blocks by their `flops_per_key`; None: all S, as
    PaLM counts, or a whole window.
    Frozen weights have no gradient, which is a third of their operations: 4 N + 6 n with n parameters of updates. The
    same for weights that model.frozen freezes (`flops_without_gradients`).
    """
    of_blocks = [core_flops(view, sequence_length, pairs) for view in model.views]
    attention = 3 * sum(of_blocks)
    parameters = active_parameter_count(model) + (model.predictions - 1) * head_size(model)  # which each uses again
    if trained.only_updates:
        return 4 * parameters + 6 * trained_parameter_count(model, trained) + attention
    flops = 6 * parameters + attention
    if model.frozen:
        from torchllm.facts.frozen import flops_without_gradients  # of no use to other runs

        flops -= flops_without_gradients(model, of_blocks)
    return flops


def block_flops(model: Model, layer: int, sequence_length: int) -> int:
    """Return the FLOPs of one token's forward pass in a block, by its index; attention is unmasked but for a window."""
    sizes = matrices(model, layer)
    products = 2 * (sizes.attention + sizes.ffn)
    return products + int(core_flops(model.of_block(layer), sequence_length))


def core_flops(view: Model, sequence_length: int, pairs: float | None = None) -> float:
    """Return the FLOPs of one token's forward in a block, beyond its products with weights.

    pairs: keys that a query sees; None: all S, or a whole window.
    """
    keys = view.window_within(sequence_length) if pairs is None else pairs
    return mixer(view).core_flops(view, keys) + added_flops(view, sequence_length)


def flops_per_key(view: Model) -> int:
    """Return the FLOPs of one token's forward in a block per key that it sees; 0: it has no attention."""
    core = mixer(view).core_flops
    return int(core(view, 1.0) - core(view, 0.0))


def recomputes_logits(training: Training, parallel: Parallel) -> bool:
    """Return whether the backward pass computes the logits again, instead of the forward pass all their gradients.

    It does with training.loss_chunk under pipeline schedules that split the backward pass, or run the forward passes of
    all micro batches first.
    """
    if not training.loss_chunk or parallel.pp == 1:
        return False
    return SCHEDULES[parallel.schedule].splits_backward or parallel.schedule in ("GPipe", "LoopedBFS")


def recomputed_flops_per_token(
    model: Model,
    recompute: Recompute,
    sequence_length: int,
    has_logits_again: bool = False,
    tp: int = 1,
    is_compiled: bool = False,
) -> int:
    """Return the FLOPs of the matrix products that the backward pass runs a second time.

    has_logits_again: the output projection too (`recomputes_logits`). tp, is_compiled: of `half_of_products`. torch
    ends a recomputation at the last tensor that it needs, so the last product of each recomputed part (always a down
    projection) is not among them, unless a norm after it or the weighted sum of experts needs its result. The
    recomputation inside the backward of fused attention kernels is never counted (no published HFU counts it).
    """
    interval = recompute_interval(recompute, model.layers)
    first = 0
    if model.frozen:
        from torchllm.facts.frozen import first_recomputed_block

        first = first_recomputed_block(model, recompute.mode, interval)
    layers = range(first, model.blocks)
    sizes = [matrices(model, layer) for layer in layers]
    blocks = [block_flops(model, layer, sequence_length) for layer in layers]
    views = model.views[first:]
    last = [0 if _needs_last_product(view) else 2 * size.down for view, size in zip(views, sizes, strict=True)]
    match recompute.mode:
        case "none" | "selective":
            recomputed = 0
        case "full":
            recomputed = sum(blocks) - sum(last)
        case "segment":
            ends = [min(start + interval, model.layers) - 1 for start in range(first, model.layers, interval)]
            recomputed = sum(blocks) - sum(last[end - first] for end in ends)
        case "every_k":
            recomputed = sum(blocks[::interval]) - sum(last[::interval])
        case "ffn":
            recomputed = sum(2 * (size.ffn - size.down) for size in sizes)
        case "selective_half":
            recomputed = sum(2 * half_of_products(view, tp, is_compiled) for view in views)
    return recomputed + (2 * model.predictions * head_size(model) if has_logits_again else 0)


def recomputed_flops(config: Config, sequence_length: int) -> int:
    """Return `recomputed_flops_per_token` of a config."""
    layout = recomputes_logits(config.training, config.parallel), config.parallel.tp, config.compile.block is True
    return recomputed_flops_per_token(config.model, config.recompute, sequence_length, *layout)


def recompute_interval(recompute: Recompute, layers: int) -> int:
    """Return `recompute.k` with its default filled in."""
    if recompute.k:
        return recompute.k
    return 2 if recompute.mode == "every_k" else round(math.sqrt(layers))
