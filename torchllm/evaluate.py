"""Loss on held-out sequences."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchllm.data.batch import Batch
from torchllm.models.head import IGNORED
from torchllm.parallel.fsdp import fsdp_modules


@torch.no_grad()
def evaluate(
    stages: Sequence[nn.Module], batches: Iterable[Batch], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Mean loss in nats over all target tokens of `batches` on all ranks of `group` (None: this process alone).

    Every rank must bring the same number of batches.
    """
    (model,) = stages
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        tokens, labels, positions, document_ids = batch.to(device)
        loss = model(tokens, positions, document_ids, labels)
        sums += torch.stack((loss.double(), (labels != IGNORED).sum()))
    for module in fsdp_modules(model):  # FOOTGUN: what a forward without backward gathers stays, and is no parameter
        module.reshard()
    if group is not None:
        dist.all_reduce(sums, group=group)
    return float(sums[0] / sums[1])
