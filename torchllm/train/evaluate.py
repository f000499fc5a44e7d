"""Loss on held-out sequences."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.config.errors import UserError
from torchllm.data.batch import Batch
from torchllm.data.tokenizer import bits_per_byte
from torchllm.models.head import IGNORED
from torchllm.optim.average import average_in_place_if_due
from torchllm.parallel.forward_backward import ForwardBackward
from torchllm.parallel.fsdp import free_gathered
from torchllm.parallel.mesh import Mesh
from torchllm.runtime.heartbeat import beat, during
from torchllm.runtime.stop import GivenUp, should_give_up


class HeldOutLoss(float):
    """The mean loss over all target tokens, in nats, special tokens included."""

    bits_per_byte: float | None = None
    """the loss of the tokens that stand for text, per byte of it; None: unknown, as of random tokens"""
    by_source: Mapping[str, "HeldOutLoss"] = MappingProxyType({})
    """the same of each source, by its name; empty: there is one"""


def evaluate(
    forward_backward: ForwardBackward, batches: Iterable[Batch], device: torch.device, mesh: Mesh | None = None
) -> HeldOutLoss:
    """Return the mean loss in nats over all target tokens of `batches` on all ranks; mesh None: of this process alone.

    Every rank must have the same number of batches; without any, UserError is raised. The average of the weights is
    evaluated if `evaluate.ema` is true. Inside of `monitor.pause`, which catches it, GivenUp is raised if the
    run is asked to stop.
    """
    with during("evaluation"), average_in_place_if_due(forward_backward.stages):
        return _evaluate(forward_backward, batches, device, mesh)


def _evaluate(
    forward_backward: ForwardBackward, batches: Iterable[Batch], device: torch.device, mesh: Mesh | None
) -> HeldOutLoss:
    # float64, as float32 counts up to 2^24 tokens
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, 2, dtype=torch.float64, device=device))
    """by source: the loss of all targets and of those that stand for text; targets, and bytes that they stand for"""
    is_given_up = False
    for batch in batches:
        beat("batch")
        is_given_up = mesh is not None and should_give_up()
        if is_given_up:
            break
        losses, counts = sums[batch.source]
        losses += _loss_sums(forward_backward, batch)
        counts[0] += (batch.labels != IGNORED).sum()
        if batch.label_bytes is not None:
            counts[1] += batch.label_bytes.sum()
    free_gathered(forward_backward.stages)
    if is_given_up:
        raise GivenUp
    if not sums:
        raise UserError("evaluate(...) was given no batch, so there is no loss: hold texts out, or do not evaluate")
    losses, counts = torch.stack([*sums.values()], dim=1)  # (sources, 2) each; all ranks have the same sources
    if mesh is not None:
        dist.all_reduce(losses)  # over pp too, where only the last stage has a loss; all tp ranks have the same one
        losses /= mesh.tp.size()
        dist.all_reduce(counts, group=mesh.loss_group)
    loss = _mean(losses.sum(0), counts.sum(0))
    if len(sums) > 1:
        loss.by_source = dict(zip(sums, map(_mean, losses, counts), strict=True))
    return loss


def _mean(losses: Tensor, counts: Tensor) -> HeldOutLoss:
    """Return the loss of sums as `_evaluate` makes them, (2) each."""
    loss = HeldOutLoss(losses[0] / counts[0])
    if counts[1]:
        loss.bits_per_byte = bits_per_byte(float(losses[1]), int(counts[1]))
    return loss


def _loss_sums(forward_backward: ForwardBackward, batch: Batch) -> Tensor:
    """Return the sums of the loss over all labels, and over the labels of text (0 if unknown), (2) float64.

    The second takes the output projection again, of the same hidden states.
    """
    heads = [stage.lm_head for stage in forward_backward.stages if stage.lm_head is not None]
    if batch.label_bytes is not None:
        for head in heads:
            head.text_labels = batch.labels.where(batch.label_bytes > 0, IGNORED)
    loss = forward_backward.loss_sum(batch)
    of_text = torch.zeros_like(loss)
    for head in heads:
        if head.text_loss is not None:
            of_text, head.text_loss = head.text_loss, None
    return torch.stack((loss, of_text)).double()
