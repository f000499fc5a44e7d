"""torch.compile of the norms, the blocks or the loss: fewer passes over memory, the same numbers up to rounding.

Nothing is sharded or sent. Blocks are compiled one by one: they are equal, so one compilation serves all of them and
takes the time of one block however deep the model is. FSDP's hooks stay outside the graphs; the collectives of tensor
parallelism are inside, and so is recomputation, except of whole segments and where `must_recompute_outside` says so.
The cores of context parallelism are outside; only the merge of a ring is compiled.

A block with experts is compiled in parts: attention with the norms before and after it, the router, the gating of all
experts, and the weighted sum of their results. Products and dispatch stay outside: FSDP gathers routers and experts as
separate units, and the number of rows on a rank varies.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchllm.config import Compile, Model, Recompute
from torchllm.config.applied_keys import config_in_use
from torchllm.models.decoder import Block, Decoder
from torchllm.models.experts import Experts, RoutedExperts, Router
from torchllm.models.layers import RMSNorm, SwiGLU
from torchllm.parallel.ring import RingAttention

GRAPHS = 8
"""of a block of one kind for one length: with gradients or without, and for numbers of documents"""


def apply_compile(stage: Decoder, config: Compile, recomputes_outside: bool = False) -> None:
    """Compile the parts that the config names, in place. The compilation itself happens in the first step.

    recomputes_outside: a block that is recomputed gets a graph without the recomputation.
    """
    if config.norm:
        for module in stage.modules():
            if isinstance(module, RMSNorm):
                module.kernel = torch.compile(module.kernel)
    if config.block is True:
        # Torch would take a number that differs between kinds, such as the width of heads, or a length that differs
        # between stages, as one that varies at run time: slower kernels, and with tensor parallelism an error of its
        # compiler.
        run = config_in_use()
        dynamic = False if stage.model.pattern or run.data.changes_size else None
        # Torch counts all graphs of a function together, and beyond its limit, eight, runs blocks uncompiled.
        graphs = GRAPHS * len(stage.model.views) * len(run.data.lengths(run.training.sequence_length))
        torch.compiler.config.recompile_limit = max(graphs, torch.compiler.config.recompile_limit)
        for module in stage.modules():
            if isinstance(module, RingAttention):
                module.merge = torch.compile(module.merge)
        for name, block in list(stage.layers.items()):
            (plain,) = (module for module in block.modules() if isinstance(module, Block))
            if any(isinstance(module, RoutedExperts) for module in plain.modules()):
                _compile_parts(plain, dynamic)
            elif recomputes_outside and block is not plain:
                plain.compile(dynamic=dynamic)
            else:
                stage.layers[name] = torch.compile(block, dynamic=dynamic)  # type: ignore[assignment]  # OptimizedModule
    if config.loss is True and stage.lm_head is not None:
        stage.lm_head.cross_entropy = torch.compile(stage.lm_head.cross_entropy)


def _compile_parts(block: Block, dynamic: bool | None) -> None:
    """Compile the compilable parts of a block with experts, in place. dynamic: as of `torch.compile`.

    FOOTGUN: the input of a compiled part must not be the result of a tensor-parallel collective outside of it: its
    gradient would be lost.
    """
    block.attend = torch.compile(block.attend, dynamic=dynamic)  # type: ignore[method-assign]  # a seam
    for module in block.mlp.modules():
        if isinstance(module, Experts | SwiGLU):
            module.gated = torch.compile(module.gated, dynamic=True)  # the number of rows changes with each step
        elif isinstance(module, Router):
            module.choose = torch.compile(module.choose, dynamic=dynamic)  # type: ignore[method-assign]  # a seam
            module.summarize = torch.compile(module.summarize)  # type: ignore[method-assign]  # a seam
        elif isinstance(module, RoutedExperts):
            module.combine = torch.compile(module.combine)


def must_recompute_outside(recompute: Recompute, model: Model, tp: DeviceMesh, graphs: bool) -> bool:
    """Return whether the recomputation of blocks must stay outside their graphs. tp: one dimension, the tp ranks.

    graphs: `compile.graphs`. Where a compiled graph recomputes fused attention it saves the state of a random generator
    (unused here) that torch has made for it, and that a CUDA graph does not know.

    FOOTGUN: on a CPU torch 2.13 (not 2.11 or 2.15) fails at a graph that recomputes fused attention and contains
    tensor-parallel collectives ("expected all tensors_saved_with_vc_check to be Tensors"). It saves the random state of
    the attention (unused here) after the device mesh, and confuses the two. On a GPU the state is no output of the
    graph.
    """
    recomputes_attention = recompute.mode in ("full", "every_k") and "sdpa" in model.attention_kernels
    return recomputes_attention and (graphs or (tp.size() > 1 and tp.device_type == "cpu"))
