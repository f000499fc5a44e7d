"""Ranks that have parts of the same sequences: what a router counts within a sequence is added up over them."""

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from torchllm.models.experts import Router


def sum_over_sequence(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make the routers inside a module add up over a group what they count of each sequence, in place."""
    for router in module.modules():
        if isinstance(router, Router):
            router.sequence_sums.append(partial(_sum, group))


def _sum(group: dist.ProcessGroup, counts: Tensor) -> Tensor:
    """Return the sum of the tensors of all ranks."""
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total
