"""Ranks that have parts of the same sequences: what a router counts within a sequence is added up over them.

Each technique that leaves the routers of a rank a part of a sequence calls it with its group: context parallelism, and
whatever else cuts the sequence before the routers. Those of one rank add up.

Sent, with `model.balance_loss = "sequence"` alone: in the backward pass of each router, B x E counts.
"""

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
