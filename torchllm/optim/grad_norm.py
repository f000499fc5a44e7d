"""THE global gradient norm, over every axis at once; nothing else clips.

Each element of each gradient is counted by exactly one rank. If a gradient is replicated (norms over tp, everything
over dp_replicate), only the first of its ranks counts it; if a tied embedding is on both ends of a pipeline, the first
stage counts its copy. One sum over all ranks then gives the square of the norm, whatever the layout.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchllm.models.decoder import Decoder
from torchllm.parallel.local_tensor import local_tensor
from torchllm.runtime.torch_compat import foreach_multiply, foreach_norm


def gradients(stages: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield every parameter's gradient; a tied parameter's once per stage."""
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.grad is not None:
                yield parameter.grad


def grad_norm(stages: Sequence[nn.Module], device: torch.device) -> Tensor:
    """Return the L2 norm of all gradients of the model, float64 (), equal on all ranks."""
    total = squared_norm(stages, device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def squared_norm(stages: Sequence[nn.Module], device: torch.device) -> Tensor:
    """Return this rank's part of the norm's square, float64 (); the number of operations does not grow with the model.

    float64 because a CPU's float32 norm of a large tensor is off by 1e-4, and because squares overflow float32.
    """
    once = [gradient for stage in stages for gradient in gradients([stage]) if not _is_copy(stage, gradient)]
    counted = [local for local in map(_counted_here, once) if local is not None]
    norms = [torch.zeros((), dtype=torch.float64, device=device)]  # a rank may have no gradient to count
    if counted:
        norms += foreach_norm(counted, torch.float64)
    return torch.stack(norms).square().sum()


def clip_grad_norm(stages: Sequence[nn.Module], largest: float, device: torch.device) -> Tensor:
    """`clip` the gradients, and return their norm before it, float64 (), equal on all ranks."""
    norm = grad_norm(stages, device)
    clip(stages, norm, largest)
    return norm


@torch.no_grad()
def clip(stages: Sequence[nn.Module], norm: Tensor, largest: float) -> None:
    """Scale the gradients so that their norm is at most `largest`; 0 means no clipping. Never waits for the device."""
    if not largest:
        return
    # 1e-6 as in torch's clip_grad_norm_: a norm of 0 divides nothing by 0.
    factor = (largest / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
    held_here = [local_tensor(gradient) for gradient in gradients(stages)]
    if held_here:
        foreach_multiply(held_here, factor)


def _is_copy(stage: nn.Module, gradient: Tensor) -> bool:
    """Return whether a gradient is the last stage's copy of a tied embedding's, which the first stage counts."""
    if not isinstance(stage, Decoder) or stage.embeds or stage.embed_tokens is None:
        return False
    return gradient is stage.embed_tokens.weight.grad


def _counted_here(gradient: Tensor) -> Tensor | None:
    """Return the part of a gradient that this rank adds to the sum, or None when another rank adds it."""
    if not isinstance(gradient, DTensor):
        return gradient
    for axis, placement in enumerate(gradient.placements):
        assert not placement.is_partial(), "an unreduced gradient: FSDP must be applied at every degree"
        if placement.is_replicate() and gradient.device_mesh.get_local_rank(axis):
            return None
    return gradient.to_local()
