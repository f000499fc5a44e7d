"""Activation recomputation: what a block's forward saves is dropped and computed again in the backward pass.

Nothing is sharded or sent. Every mode is a wrapper around modules (non-reentrant checkpointing), so that a layout can
mix it with anything; parameter names lose the wrapper's prefix in `layout.canonical_name`.

`segment` is the lecture's O(sqrt(L)) memory: L / k segments keep one input each, and while one of them is recomputed k
blocks' activations live; k = round(sqrt(L)) is the least L / k + k. FOOTGUN: a block's activations are some 20 times
the size of its input, so at usual depths `full`, which is k = 1, has the lower peak. k over 1 pays where many inputs
wait for their backward, as those of many micro batches in flight do.
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
from torchllm.runtime.torch_compat import checkpoint_wrapper
from torchllm.spec.flops import recompute_interval

_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
)
_COLLECTIVES = (
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
)


def apply_recompute(stage: Decoder, config: Recompute, layers: int) -> None:
    """Wrap what `config.mode` recomputes. `layers`: blocks of the whole model, which sets the default segment."""
    match config.mode:
        case "full":
            _wrap(stage.layers, stage.layers)
        case "every_k":
            every = recompute_interval(config, layers)
            _wrap(stage.layers, [name for name in stage.layers if int(name) % every == 0])
        case "ffn":
            for block in stage.layers.values():
                _wrap(block, ["mlp"])
        case "selective":
            ring = any(isinstance(module, RingAttention) for module in stage.modules())
            _wrap(stage.layers, stage.layers, context_fn=_keep_products_and_rings if ring else _keep_products)
        case "segment":
            stage.run_blocks = Segments(recompute_interval(config, layers))


def _wrap(parent: nn.Module, names: Iterable[str], **arguments: Any) -> None:
    # No block draws random numbers, so there is no generator state to put back before recomputing.
    for name in list(names):
        module = checkpoint_wrapper(parent.get_submodule(name), preserve_rng_state=False, **arguments)
        parent.register_module(name, module)


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in _PRODUCTS or operation in _COLLECTIVES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_products_and_rings() -> Any:
    """The attention of a ring as one result: not that of its blocks, of which there are as many as ranks."""
    results = SavedResults()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if results.computing:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return _policy(context, operation)

    caching, cached = create_selective_checkpoint_contexts(policy)
    return results.saving(caching), results.replaying(cached)


class Segments:
    """Runs blocks in segments of `size`, keeping only each segment's input. Replaces `models.decoder.run_blocks`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, blocks: Sequence[nn.Module], x: Tensor, rotary: Any, mask: Any) -> Tensor:
        for first in range(0, len(blocks), self.size):
            segment = blocks[first : first + self.size]
            x = checkpoint(run_blocks, segment, x, rotary, mask, use_reentrant=False, preserve_rng_state=False)
        return x
