"""Loss on held-out sequences."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from torchllm.data.batch import Batch
from torchllm.models.head import IGNORED
from torchllm.parallel.context import shard_sequence
from torchllm.parallel.fsdp import fsdp_modules
from torchllm.parallel.mesh import Mesh
from torchllm.parallel.pipeline import ForwardBackward


def evaluate(
    forward_backward: ForwardBackward, batches: Iterable[Batch], device: torch.device, mesh: Mesh | None = None
) -> float:
    """Mean loss in nats over all target tokens of `batches` on all ranks (mesh None: on this process alone).

    Every rank must bring the same number of batches.
    """
    loss, tokens = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        batch = batch.to(device) if mesh is None else shard_sequence(batch.to(device), mesh)
        loss += forward_backward.loss_sum(batch)
        tokens += (batch.labels != IGNORED).sum()
    for stage in forward_backward.stages:
        for module in fsdp_modules(stage):  # FOOTGUN: what a forward without backward gathers stays: no parameter then
            module.reshard()
    if mesh is not None:
        dist.all_reduce(loss)  # over pp too, of which the last stage alone brings a loss; tp ranks bring the same one
        loss /= mesh.tp.size()
        dist.all_reduce(tokens, group=mesh.loss_group)
    return float(loss / tokens)
