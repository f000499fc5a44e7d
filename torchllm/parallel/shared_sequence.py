"""Sums the routers' counts per sequence over ranks with parts of the same sequences.

Called by every technique that splits the sequence before the routers (e.g. context parallelism), with its group. If
several do, the sums run over all of their groups.

Sent, only with `model.balance_loss = "sequence"`: in the backward pass of each router, B x E counts.
"""

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from torchllm.models.experts import Router


def sum_over_sequence(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make the routers inside a module sum their counts per sequence over a group, in place."""
    for router in module.modules():
        if isinstance(router, Router):
            router.sequence_sums.append(partial(_sum, group))


def _sum(group: dist.ProcessGroup, counts: Tensor) -> Tensor:
    """Return the sum of the tensors of all ranks."""
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total
