"""Activation recomputation (Chen et al. 2016): drops what a block's forward saves; the backward computes it again.

Nothing is sharded. Nothing is sent, but collectives inside recomputed modules are sent again (`selective` saves their
results). Every mode is a wrapper around modules (non-reentrant checkpointing), so that a layout can combine it with
anything; `spec.parameters.canonical_name` removes the wrapper's prefix from parameter names.

`segment` is the O(sqrt(L)) memory of Chen et al. 2016, section 4 (also in Stanford CS231n's lecture on large-scale
training): each of L / k segments saves its input, and while one segment is recomputed the activations of its k blocks
live; L / k + k is smallest for k = sqrt(L), the default. FOOTGUN: the activations of a block are about 20 times the
size of its input, so at usual depths `full`, which is k = 1, has the lower peak. A larger k pays where many inputs wait
for their backward, such as those of many micro batches in flight.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchllm.config import Recompute
from torchllm.models.decoder import Decoder, run_blocks
from torchllm.parallel.ring import RingAttention
from torchllm.parallel.saved_results import SavedResults
from torchllm.runtime.torch_compat import VARLEN_ATTENTION, checkpoint_wrapper
from torchllm.spec.flops import recompute_interval

_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.torchllm.document_attention.default,
    VARLEN_ATTENTION,
)
_COLLECTIVES = (
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
)


def apply_recompute(stage: Decoder, config: Recompute, layers: int) -> None:
    """Wrap the modules that `config.mode` recomputes, in place.

    layers: blocks of the whole model, not of this stage; they set the default of `config.k`.
    """
    match config.mode:
        case "full":
            _wrap(stage.layers, stage.layers)
        case "every_k":
            interval = recompute_interval(config, layers)
            _wrap(stage.layers, [name for name in stage.layers if int(name) % interval == 0])
        case "ffn":
            for block in stage.layers.values():
                _wrap(block, ["mlp"])
        case "selective":
            has_ring = any(isinstance(module, RingAttention) for module in stage.modules())
            contexts = save_products_and_rings if has_ring else save_products
            _wrap(stage.layers, stage.layers, context_fn=contexts)
        case "segment":
            stage.run_blocks = Segments(recompute_interval(config, layers))


def _wrap(parent: nn.Module, names: Iterable[str], **arguments: Any) -> None:
    """Make some submodules recompute their forward."""
    # No block draws random numbers, so there is no generator state to restore before recomputing.
    for name in list(names):
        module = checkpoint_wrapper(parent.get_submodule(name), preserve_rng_state=False, **arguments)
        parent.register_module(name, module)


def save_products() -> Any:
    """Return the contexts of a forward that saves matrix products, attention and collectives, and recomputes the rest.

    Also returns that of its recomputation: `context_fn` of `torch.utils.checkpoint.checkpoint`.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _PRODUCTS or operation in _COLLECTIVES:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def save_products_and_rings() -> Any:
    """Return the same contexts, but save a ring's attention as one result, not those of its n blocks."""
    results = SavedResults()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if results.computing:  # inside a ring
            return CheckpointPolicy.PREFER_RECOMPUTE
        return _policy(context, operation)

    forward, recomputation = create_selective_checkpoint_contexts(policy)
    return results.saving(forward), results.replaying(recomputation)


class Segments:
    """Runs blocks in segments of `size`, saving only each segment's input. Replaces `models.decoder.run_blocks`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, blocks: Sequence[nn.Module], x: Tensor, rotary: Any, mask: Any) -> Tensor:
        for first in range(0, len(blocks), self.size):
            segment = blocks[first : first + self.size]
            x = checkpoint(run_blocks, segment, x, rotary, mask, use_reentrant=False, preserve_rng_state=False)
        return x
