"""Fully sharded data parallelism (FSDP2), HSDP and DDP as one mechanism, by `zero_stage`.

Sharded: every parameter, its gradient and its optimizer state, over the last axis of the mesh; with two axes they are
replicated over the first (HSDP: shard inside a node, replicate across). zero_stage 0 is a shard axis of one rank.

Sent, per unit (embedding; each block; final norm and head):
  stage 3   gather before the forward and again before the backward of every micro batch, reduce-scatter after it
  stage 2   gather once a step, reduce-scatter after every micro batch
  stage 1   gather once a step, reduce-scatter once a step
  stage 0   all-reduce once a step
and, with a replicate axis, an all-reduce of the scattered gradient once a step: 1 / shard of DDP's bytes cross nodes.
While a unit computes, the next `prefetch` units' gathers are under way. Not gathered before the backward: the
embedding, whose gradient does not need it, nor the head and (`keep_last_block`) the last block, which are still there.

Applied to a single rank as well, where it only casts: mixed precision (bfloat16 computation, float32 weights, gradients
reduced in float32) has one code path. Where nothing is sharded, stages 2 and 3 would only copy more often: they act as
stage 1, and `parallelize` leaves one rank in float32 without FSDP.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchllm.config import Parallel
from torchllm.models.decoder import Decoder


def apply_fsdp(stage: Decoder, mesh: DeviceMesh, parallel: Parallel, dtype: torch.dtype) -> None:
    """Shard a stage in place. `mesh`: one axis (shard) or two (replicate, shard). `dtype`: of the computation."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the only float inputs are hidden states, already cast, and angles, kept in float32
    )
    # With tp what a unit returns is a view, of which torch warns: adding to it in place would go wrong. Nothing does.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    per_use = effective_zero_stage(parallel) == 3
    units: list[FSDPModule] = []  # in the order of the forward pass
    for name, block in stage.layers.items():
        kept = parallel.keep_last_block and name == list(stage.layers)[-1]
        units.append(fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=per_use and not kept))
    if not stage.model.tied_embeddings:  # tied: one unit, the root's, for the ends must gather the same parameter
        if stage.embed_tokens is not None:
            embedding = fully_shard(stage.embed_tokens, mesh=mesh, mp_policy=policy, reshard_after_forward=per_use)
            embedding.set_unshard_in_backward(False)
            units.insert(0, embedding)
        if stage.norm is not None and stage.lm_head is not None:
            # Its backward follows its forward at once: freeing it between them would only cost a second gather.
            ends = fully_shard([stage.norm, stage.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
            units.append(ends[0])
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(stage):
        # FOOTGUN: these two act on one unit, not on those inside it. The step divides by its global token count, so
        # FSDP must sum; gloo can only sum when told to by the second call.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _prefetch(units, parallel.prefetch)


def _prefetch(units: Sequence[FSDPModule], ahead: int) -> None:
    """Issue the gathers of the `ahead` next units before a unit computes, in forward and in backward order."""
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + ahead]))
        # With an empty list FSDP guesses, and gathers what it does not need; itself, already there, costs nothing.
        unit.set_modules_to_backward_prefetch([unit, *reversed(units[max(0, index - ahead) : index])])


def fsdp_modules(stage: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit of a stage."""
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def effective_zero_stage(parallel: Parallel) -> int:
    """`parallel.zero_stage`, 1 at most where each rank holds all of the weights; degrees resolved (no -1)."""
    return parallel.zero_stage if parallel.dp_shard * parallel.cp > 1 else min(parallel.zero_stage, 1)


def begin_micro_batch(stages: Sequence[nn.Module], zero_stage: int, last: bool) -> None:
    """Tell FSDP, where it is applied, what to do after the coming backward; `last`: it is the step's last."""
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.set_is_last_backward(last)
            stage.set_requires_gradient_sync(last or zero_stage >= 2)
            stage.set_requires_all_reduce(last)
            stage.set_reshard_after_backward(last or zero_stage == 3)


def free_after_backward(stage: nn.Module) -> None:
    """Stage 3 in a pipeline: free a unit's weights after each of its backwards.

    torch's pipeline stage tells FSDP before every backward to keep them; each unit is told otherwise just before its
    own.
    """

    def when_its_gradient_comes(module: nn.Module, args: object, output: Tensor) -> None:
        assert isinstance(module, FSDPModule)
        if output.requires_grad:
            output.register_hook(lambda gradient: FSDPModule.set_reshard_after_backward(module, True, recurse=False))

    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(when_its_gradient_comes)
