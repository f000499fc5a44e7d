"""Activation recomputation (Chen et al. 2016): frees the activations of a block; the backward computes them again.

Nothing is sharded. Nothing is sent, but collectives inside recomputed modules run again (the selective modes save their
results). Every mode is a wrapper around modules (non-reentrant checkpointing), so that a layout can combine it with
anything; `facts.parameters.canonical_name` removes the wrapper's prefix from parameter names.

`segment` is the O(sqrt(L)) memory of Chen et al. 2016, section 4 (also in Stanford CS231n's lecture on large-scale
training): each of L / k segments saves its input, and while one segment is recomputed the activations of its k blocks
live; L / k + k is smallest for k = sqrt(L), the default. FOOTGUN: the activations of a block are about 20 times the
size of its input, so at usual depths `full`, which is k = 1, has the lower peak. A larger k pays off if many inputs
wait for their backward, e.g. with many micro batches in flight.

`selective_half` saves every second of a block's products with weights, beginning with the second: of q, k, v, o, gate,
up, down it computes q, v and gate again. torchtitan's selective recomputation begins with the first. For two products
of the same input the choice does not matter. But no gradient depends on the result of down: it would be saved although
unused.

Under tensor parallelism o and down are sums over the ranks, and the selective modes save the sums. A rank's part is
neither saved nor computed again, and selective_half does not count it (`unkept_sums.py`). In a compiled block torch
itself drops results that no gradient depends on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchllm.config import Recompute
from torchllm.facts.flops import recompute_interval
from torchllm.models.decoder import Block, Decoder, run_blocks
from torchllm.models.document_attention import ATTENTION_OPERATIONS
from torchllm.models.experts import Router
from torchllm.parallel.saved_results import SavedResults
from torchllm.runtime.torch_compat import PROFILER_MARKS, checkpoint_wrapper
from torchllm.runtime.torch_operations import VARLEN_ATTENTION, VARLEN_FLASH

Operations = tuple[Any, ...]
_WEIGHT_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.torchllm.grouped_linear.default,
)
_ATTENTION = (
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    VARLEN_ATTENTION,
    VARLEN_FLASH.default,
)
_COLLECTIVES = (  # the gather first, which `gathers_again` leaves out
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
)


def apply_recompute(
    stage: Decoder,
    config: Recompute,
    layers: int,
    compiles_blocks: bool = False,
    sums_over_tp: bool = False,
    gathers_again: bool = False,
) -> None:
    """Wrap the modules that `config.mode` recomputes, in place.

    layers: blocks of the whole model, not of this stage; they set the default of `config.k`. compiles_blocks: blocks
    will be compiled, those with experts in parts. sums_over_tp: tensor parallelism sums products. gathers_again: the
    selective modes gather again, too (`regather.py`).
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
        case "selective" | "selective_half":
            has_ring = any(getattr(module, "computes_once", False) for module in stage.modules())
            collectives = _COLLECTIVES[1:] if gathers_again else _COLLECTIVES
            saver = partial(_SAVERS[config.mode, has_ring], collectives)
            if sums_over_tp and not compiles_blocks:
                from torchllm.parallel.unkept_sums import without_sums  # of no use without tp

                saver = partial(without_sums, saver, _WEIGHT_PRODUCTS)
            for name, block in list(stage.layers.items()):
                assert isinstance(block, Block)
                if not any(isinstance(module, Router) for module in block.modules()):
                    _wrap(stage.layers, [name], context_fn=saver)
                elif not compiles_blocks:
                    _wrap(stage.layers, [name], context_fn=partial(_with_units_inside, saver, block))
                else:
                    # Separate: attention is recomputed in its graph, and saves products. Their number is even, so that
                    # every second one of the others is the same as in a whole block.
                    block.attend = _recomputed(block.attend, saver)  # type: ignore[method-assign]  # a seam
                    _wrap(block, ["mlp"], context_fn=partial(_with_units_inside, saver, block.mlp))
        case "segment":
            stage.run_blocks = Segments(recompute_interval(config, layers))
    if config.offload:
        from torchllm.parallel.input_offload import OffloadedInputs  # of no use to most runs

        size = stage.run_blocks.size if isinstance(stage.run_blocks, Segments) else 1
        stage.run_blocks = OffloadedInputs(stage.run_blocks, size)


def _wrap(parent: nn.Module, names: Iterable[str], **arguments: Any) -> None:
    """Make some submodules recompute their forward."""
    # No block draws random numbers, so there is no generator state to restore before recomputing.
    for name in list(names):
        module = checkpoint_wrapper(parent.get_submodule(name), preserve_rng_state=False, **arguments)
        parent.register_module(name, module)


def _recomputed(function: Callable[..., Any], saver: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function whose backward recomputes everything except the results that `saver` saves."""

    def recomputing(*arguments: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=saver)

    return recomputing


Policy = Callable[..., CheckpointPolicy]
"""decides for each operation whether its result is saved"""


def save_products(collectives: Operations = _COLLECTIVES) -> Any:
    """Return contexts that save matrix products, attention and `collectives`, and recompute the rest.

    One is for the forward, one for the recomputation: `context_fn` of `torch.utils.checkpoint.checkpoint`.
    """
    return create_selective_checkpoint_contexts(partial(_save_results, collectives))


def save_half_of_products(collectives: Operations = _COLLECTIVES) -> Any:
    """Return the same contexts, but save only every second product with a weight."""
    return create_selective_checkpoint_contexts(_EverySecondProduct(collectives))


def save_products_and_rings(collectives: Operations = _COLLECTIVES) -> Any:
    """Return the contexts of `save_products`, but save a ring's attention as one result instead of n blocks."""
    return _save_rings(partial(_save_results, collectives))


def save_half_of_products_and_rings(collectives: Operations = _COLLECTIVES) -> Any:
    """Return the contexts of `save_half_of_products`, but save a ring's attention as one result."""
    return _save_rings(_EverySecondProduct(collectives))


_SAVERS = {
    ("selective", False): save_products,
    ("selective", True): save_products_and_rings,
    ("selective_half", False): save_half_of_products,
    ("selective_half", True): save_half_of_products_and_rings,
}
"""makes the contexts, by mode and by whether a core marks a result with `computed_once`, as ring attention does"""


def _save_results(collectives: Operations, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in _WEIGHT_PRODUCTS or operation in _ATTENTION or operation in ATTENTION_OPERATIONS
    if is_product or operation in collectives:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _EverySecondProduct:
    """The policy of one forward, and of its recomputation, that does not save the first, third, ... product."""

    def __init__(self, collectives: Operations) -> None:
        self.collectives = collectives
        self.products: Counter[bool] = Counter()
        """number of products so far in the forward (False) and, before torch 2.13, in the recomputation (True)"""

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _WEIGHT_PRODUCTS:
            self.products[context.is_recompute] += 1
            if self.products[context.is_recompute] % 2 == 1:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _save_results(self.collectives, context, operation)


def _save_rings(outside: Policy) -> Any:
    """Return contexts that save a ring's result. outside: the policy of operations outside of a ring."""
    results = SavedResults()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if results.computing:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return outside(context, operation)

    forward, recomputation = create_selective_checkpoint_contexts(policy)
    return results.saving(forward), results.replaying(recomputation)


def _with_units_inside(
    saver: Callable[[], Any], module: nn.Module
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of `saver` if the module contains separate FSDP units, such as its experts.

    FSDP gathers a unit unless it is gathered already, which may differ between a forward and its recomputation, and
    selective checkpointing requires the same operations in both. So the units are gathered before either starts, and
    FSDP's profiler annotations are ignored. So are views, which are never saved: a router that is recomputed outside of
    a step's forward has one view of its input more, by FSDP's hook for the first module of a forward.
    """
    forward, recomputation = saver()
    return _with_gathered_units(module, forward), _with_gathered_units(module, recomputation)


@contextmanager
def _with_gathered_units(parent: nn.Module, mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Gather the units inside a module, and enter `mode`. No selective checkpoint of this process sees marks in it."""
    for module in parent.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    added = {*PROFILER_MARKS, torch.ops.aten.view.default} - SAC_IGNORED_OPS
    SAC_IGNORED_OPS.update(added)
    try:
        with mode:
            yield
    finally:
        SAC_IGNORED_OPS.difference_update(added)


class Segments:
    """Runs blocks in segments of `size`, saving only each segment's input. Replaces `models.decoder.run_blocks`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, blocks: Sequence[tuple[nn.Module, Sequence[Any]]], x: Tensor) -> Tensor:
        for first in range(0, len(blocks), self.size):
            segment = blocks[first : first + self.size]
            x = checkpoint(run_blocks, segment, x, use_reentrant=False, preserve_rng_state=False)
        return x
