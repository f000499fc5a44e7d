"""Loss on held-out sequences."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from torchllm.data.batch import Batch
from torchllm.models.head import IGNORED
from torchllm.optim.average import average_in_place_if_due
from torchllm.parallel.forward_backward import ForwardBackward
from torchllm.parallel.fsdp import fsdp_modules
from torchllm.parallel.mesh import Mesh
from torchllm.runtime.heartbeat import beat, during
from torchllm.runtime.stop import GivenUp, should_give_up


def evaluate(
    forward_backward: ForwardBackward, batches: Iterable[Batch], device: torch.device, mesh: Mesh | None = None
) -> float:
    """Return the mean loss in nats over all target tokens of `batches` on all ranks; mesh None: of this process alone.

    Every rank must have the same number of batches. The average of the weights is evaluated if `evaluate.ema` is true.
    Inside of `monitor.pause`, which catches it, GivenUp is raised if the run is asked to stop.
    """
    with during("evaluation"), average_in_place_if_due(forward_backward.stages):
        return _evaluate(forward_backward, batches, device, mesh)


def _evaluate(
    forward_backward: ForwardBackward, batches: Iterable[Batch], device: torch.device, mesh: Mesh | None
) -> float:
    loss, tokens = torch.zeros(2, dtype=torch.float64, device=device)  # float32 counts up to 2^24 tokens
    is_given_up = False
    for batch in batches:
        beat("batch")
        is_given_up = mesh is not None and should_give_up()
        if is_given_up:
            break
        loss += forward_backward.loss_sum(batch)
        tokens += (batch.labels != IGNORED).sum()
    for stage in forward_backward.stages:
        for module in fsdp_modules(stage):
            # FOOTGUN: a forward without a backward leaves its last units gathered, and their gathered weights are not
            # the parameters that the optimizer and checkpoints know.
            module.reshard()
    if is_given_up:
        raise GivenUp
    if mesh is not None:
        dist.all_reduce(loss)  # over pp too, where only the last stage has a loss; all tp ranks have the same one
        loss /= mesh.tp.size()
        dist.all_reduce(tokens, group=mesh.loss_group)
    return float(loss / tokens)
