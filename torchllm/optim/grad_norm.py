"""THE global gradient norm, over every axis at once; nothing else clips.

Each element of each gradient is counted by exactly one rank: where a gradient is replicated (norms over tp, everything
over dp_replicate) only the first of the ranks that hold it counts; of a tied embedding on both ends of a pipeline, only
the first stage's. One sum over all ranks then gives the square of the norm, whatever the layout.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchllm.models.decoder import Decoder


def gradients(stages: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Every parameter's gradient, tied ones once a stage."""
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.grad is not None:
                yield parameter.grad


def grad_norm(stages: Sequence[nn.Module], device: torch.device) -> Tensor:
    """L2 norm of all gradients of the model, float64 (), equal on all ranks.

    float64 because a CPU's float32 norm of a large tensor is off by 1e-4, and because the squares of float32 overflow.
    """
    squares = [torch.zeros((), dtype=torch.float64, device=device)]
    squares += [
        torch.linalg.vector_norm(local, dtype=torch.float64).square()
        for stage in stages
        for gradient in gradients([stage])
        if not _is_copy(stage, gradient) and (local := _counted_here(gradient)) is not None
    ]
    total = torch.stack(squares).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt()


def clip(stages: Sequence[nn.Module], norm: Tensor, largest: float) -> None:
    """Scale the gradients so that their norm is at most `largest`; 0: leave them. Does not wait for the device."""
    if not largest:
        return
    factor = (largest / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
    for gradient in gradients(stages):
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


def _is_copy(stage: nn.Module, gradient: Tensor) -> bool:
    """Whether a gradient is that of the tied embedding on a pipeline's last stage, which the first stage counts."""
    if not isinstance(stage, Decoder) or stage.embeds or stage.embed_tokens is None:
        return False
    return gradient is stage.embed_tokens.weight.grad


def _counted_here(gradient: Tensor) -> Tensor | None:
    """The part of a gradient that this rank adds to the sum; None when another rank does."""
    if not isinstance(gradient, DTensor):
        return gradient
    for axis, placement in enumerate(gradient.placements):
        assert not placement.is_partial(), "an unreduced gradient: FSDP must be applied at every degree"
        if placement.is_replicate() and gradient.device_mesh.get_local_rank(axis):
            return None
    return gradient.to_local()
