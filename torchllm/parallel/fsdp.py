"""Fully sharded data parallelism (FSDP2), HSDP and DDP as one mechanism, by `zero_stage` (Rajbhandari et al. 2020).

Sharded: every parameter, its gradient and its optimizer state, over the last dimension of the mesh; with two dimensions
they are replicated over the first (HSDP: shard inside a node, replicate across nodes). zero_stage 0 is a shard
dimension of one rank.

Stacked matrices of experts are sharded by expert, or by hidden states where ranks could not have equally many experts.
With expert parallelism they are sharded over other ranks than the rest (efsdp), and so are separate units.

Sent, per unit (the embedding; each block; all routers of a stage, if they are float32; experts that are shared by
rank; final norm and head), when:
  stage 3   all-gather before the forward and again before the backward of every micro batch, reduce-scatter after it
  stage 2   all-gather once per step, reduce-scatter after the backward of every micro batch
  stage 1   all-gather once per step, reduce-scatter once per step
  stage 0   all-reduce once per step
and, with a replicate dimension, an all-reduce of the scattered gradient once per step: 1 / shard of DDP's bytes cross
nodes. While a unit computes, the next `prefetch` units are gathered. Not gathered again before the
backward: the embedding, whose gradient does not need its weight, and the routers, the head and (`keep_last_block`) the
last block, which are still gathered. If it is freed, the last block is gathered after the loss's backward, the peak of
memory.

Applied to a single rank as well, where it only casts: mixed precision (bfloat16 computation, float32 weights, gradients
reduced in float32) has one code path. Where nothing is sharded, stages 2 and 3 would only copy more often: they act as
stage 1, and `parallelize` leaves one rank in float32 without FSDP.
"""

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from torchllm.config import Parallel
from torchllm.models.decoder import Decoder
from torchllm.runtime.torch_meshes import free_gather_buffer


class Unit(NamedTuple):
    """A module that is gathered at once, and the modules inside it that are gathered separately."""

    outer: FSDPModule
    inner: Sequence[FSDPModule] = ()
    """its experts if they are sharded over other ranks"""


def apply_fsdp(
    stage: Decoder, mesh: DeviceMesh, parallel: Parallel, dtype: torch.dtype, expert_mesh: DeviceMesh | None
) -> None:
    """Shard a stage in place, its root last.

    mesh: one dimension (shard) or two (replicate, shard). dtype: of the computation; reductions stay float32, and the
    gradients become the weights' dtype. expert_mesh: the same, of experts that are shared by rank; None without expert
    parallelism.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
        cast_forward_inputs=False,  # float inputs are hidden states, cast already, and angles, which stay float32
    )
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    # With tp a unit returns a view, and torch warns that adding to it in place would go wrong. Nothing here does that.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")

    reshard_after_forward = effective_zero_stage(parallel) == 3
    units: list[Unit] = []  # in the order of the forward pass
    routers: list[FSDPModule] = []
    if stage.model.experts:
        from torchllm.parallel.expert_units import experts_of, placements_of_experts, shard_routers

        if stage.model.router_dtype == "float32":
            routers = shard_routers(stage, shard, policy)
    last_block = list(stage.layers)[-1]
    for name, block in stage.layers.items():
        # The last block's backward comes first: freed after the forward, it would be gathered again at once.
        is_kept = parallel.keep_last_block and name == last_block
        frees = reshard_after_forward and not is_kept
        inner: list[FSDPModule] = []
        placements: dict[nn.Parameter, Shard] = {}
        if stage.model.experts:
            placements = placements_of_experts(block, ranks=(expert_mesh or mesh).size(-1))
            if expert_mesh is not None:
                unit = partial(shard, mesh=expert_mesh, reshard_after_forward=frees)
                inner = [unit(experts, shard_placement_fn=placements.get) for experts in experts_of(block)]
                for experts in inner:  # FSDP would keep it from their recomputation to the next one of any experts
                    free_gather_buffer(experts)
        outer = shard(block, reshard_after_forward=frees, shard_placement_fn=placements.get)
        units.append(Unit(outer, inner))

    # Tied: both ends gather the same parameter, so it must be in one unit, which is the root's.
    if not stage.model.tied_embeddings:
        if stage.embed_tokens is not None:
            embedding = shard(stage.embed_tokens, reshard_after_forward=reshard_after_forward)
            embedding.set_unshard_in_backward(False)
            units.insert(0, Unit(embedding))
        if stage.norm is not None and stage.lm_head is not None:
            # Their backward follows their forward at once: freeing them in between would only cost a second gather.
            ends = [stage.norm, stage.lm_head]
            last_unit = fully_shard(ends, mesh=mesh, mp_policy=policy, reshard_after_forward=False)[0]
            if stage.lm_head.chunk:  # the peak may be in the forward pass: of whole logits it is in the backward pass
                free_gather_buffer(last_unit)
            units.append(Unit(last_unit))
    # The root has the rest, e.g. tied embeddings: last in the forward pass, first in the backward pass.
    shard(stage, reshard_after_forward=False)

    for module in fsdp_modules(stage):
        # FOOTGUN: both act on one unit, not on the units inside it; called on the root alone, the blocks' gradients are
        # silently averaged. FSDP must sum, since the step divides by its global token count. Without the second call a
        # divide factor is an error on gloo.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _prefetch(units, parallel.prefetch, routers)
    if not parallel.keep_last_block and reshard_after_forward and parallel.prefetch:
        _gather_last_block_after_loss(stage, units)


def _gather_last_block_after_loss(stage: Decoder, units: Sequence[Unit]) -> None:
    """Gather the freed last block while the head computes its gradients, not while the gradients of all logits exist.

    FSDP would gather it at the start of the backward pass, at the loss, which is the peak of memory.
    """
    head = stage.lm_head
    if head is None or head.chunk or stage.model.tied_embeddings:
        return  # no loss; its gradients are computed in the forward pass; the ends are no unit
    *_, last_block, ends = (unit.outer for unit in units)
    ends.set_modules_to_backward_prefetch([ends])
    cross_entropy = head.cross_entropy

    def gather(gradient: Tensor) -> None:
        last_block.unshard(async_op=True)

    def gathering_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        if logits.requires_grad:
            logits.register_hook(gather)
        return cross_entropy(logits, labels)

    head.cross_entropy = gathering_cross_entropy


def _prefetch(units: Sequence[Unit], ahead: int, routers: Sequence[FSDPModule]) -> None:
    """Start the gathers of the next `ahead` units before a unit computes, in forward and in backward order.

    routers: gathered with the first of the units, and freed after the first router's backward.
    """
    for index, unit in enumerate(units):
        following = units[index + 1 : index + 1 + ahead]
        previous = units[max(0, index - ahead) : index]
        with_unit = [*unit.inner, *routers] if index == 0 else unit.inner
        unit.outer.set_modules_to_forward_prefetch([*with_unit, *_modules(following)])
        # With an empty list FSDP guesses, and gathers units that are not needed. The unit itself is gathered already,
        # so naming it costs nothing.
        unit.outer.set_modules_to_backward_prefetch([unit.outer, *unit.inner, *_modules(reversed(previous))])
        for inner in unit.inner:
            inner.set_modules_to_backward_prefetch([inner])


def _modules(units: Iterable[Unit]) -> list[FSDPModule]:
    return [module for unit in units for module in (unit.outer, *unit.inner)]


def fsdp_modules(stage: nn.Module) -> list[FSDPModule]:
    """Return every FSDP unit of a stage."""
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def free_gathered(stages: Iterable[nn.Module]) -> None:
    """Free the units that a forward without a backward leaves gathered.

    FOOTGUN: their gathered weights are not the parameters that the optimizer and checkpoints know.
    """
    for unit in (unit for stage in stages for unit in fsdp_modules(stage)):
        unit.reshard()


def effective_zero_stage(parallel: Parallel) -> int:
    """Return `parallel.zero`, but at most 1 if weights are not sharded.

    The degrees must be resolved (no -1).
    """
    if parallel.dp_shard * parallel.cp > 1:
        return parallel.zero
    return min(parallel.zero, 1)


def begin_micro_batch(stages: Sequence[nn.Module], zero_stage: int, last: bool) -> None:
    """Set FSDP's resharding and reduction after the next backward, if FSDP is applied. last: the last of the step."""
    for stage in stages:
        if isinstance(stage, FSDPModule):
            stage.set_is_last_backward(last)
            stage.set_requires_gradient_sync(last or zero_stage >= 2)
            stage.set_requires_all_reduce(last)
            stage.set_reshard_after_backward(last or zero_stage == 3)


def free_after_backward(stage: nn.Module) -> None:
    """Make every unit of a pipeline stage free its weights after each of its backwards, as ZeRO 3 does.

    Before every backward torch's pipeline stage tells FSDP not to. A hook contradicts it for each unit, just before the
    unit's own backward.
    """
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(_reshard_after_next_backward)


def _reshard_after_next_backward(unit: nn.Module, args: object, output: object) -> None:
    """Forward hook: when the gradient of the output arrives, tell `unit` to free its weights after this backward."""
    assert isinstance(unit, FSDPModule)
    if isinstance(output, tuple | list):  # of routers a tuple of tensors, of experts a list of tuples
        for part in output:
            _reshard_after_next_backward(unit, args, part)
    elif isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: FSDPModule.set_reshard_after_backward(unit, True, recurse=False))
