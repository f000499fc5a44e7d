"""The units of FSDP inside blocks with experts: the routers of a stage, and experts that are shared by rank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from torchllm.models.experts import Experts, Router
from torchllm.runtime.torch_compat import local_region


def shard_routers(stage: nn.Module, shard: Callable[..., Any], policy: MixedPrecisionPolicy) -> list[FSDPModule]:
    """Make all routers of a stage one unit, and return it: each is too small for a collective. shard: `fully_shard`.

    They are gathered in float32: last digits decide which experts a token uses.

    FOOTGUN: the last router is recomputed before the unit's backward begins. Before torch 2.13 FSDP then takes the
    routers for the root of all later steps, whose gathers no longer wait for the optimizer: there each is a unit.
    """
    routers = [module for module in stage.modules() if isinstance(module, Router)]
    if not routers:
        return []  # the first blocks may be dense
    in_float32 = replace(policy, param_dtype=None)
    parts = [routers] if torch.__version__ >= "2.13" else [[router] for router in routers]
    units = [shard(part, mp_policy=in_float32, reshard_after_forward=False)[0] for part in parts]
    for unit in units:
        unit.set_modules_to_backward_prefetch([unit])
    return units


def placements_of_experts(block: nn.Module, ranks: int) -> dict[nn.Parameter, Shard]:
    """Return the sharding of a block's stacked experts, for parameters not sharded by expert (dimension 0).

    If the ranks do not divide the experts, the dimension of the hidden states is sharded, which tensor parallelism does
    not shard.
    """
    placements: dict[nn.Parameter, Shard] = {}
    for experts in experts_of(block):
        (count, hidden, _), _ = local_region(experts.down_proj)
        if count % ranks and hidden % ranks == 0:
            placements |= {experts.gate_proj: Shard(2), experts.up_proj: Shard(2), experts.down_proj: Shard(1)}
    return placements


def experts_of(block: nn.Module) -> list[Experts]:
    """Return the stacked experts of a block."""
    return [module for module in block.modules() if isinstance(module, Experts)]
