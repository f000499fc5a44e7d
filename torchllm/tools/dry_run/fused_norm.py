"""RMS norms in the dry run of a GPU: the tensors of its fused kernel instead of those from single CPU operations."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchllm.models.decoder import Decoder
from torchllm.models.layers import RMSNorm


def use_fused_norms(model: Decoder) -> None:
    """Make every RMS norm of a model hold the tensors of a GPU's, in place; its results have no values.

    There is none for weights that are added to 1.
    """
    for module in model.modules():
        if isinstance(module, RMSNorm) and not module.has_offset:
            module.kernel = _fused_rms_norm


def _fused_rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Return a tensor like x (..., width); weight: (width), or None."""
    return _FusedRMSNorm.apply(x, weight)


class _FusedRMSNorm(torch.autograd.Function):
    """Has the shapes of torch.ops.aten._fused_rms_norm and its backward, one kernel each on a GPU.

    It keeps its input and a float32 per row. On a CPU torch takes it apart into operations that also keep the input
    and the normalized input in float32: five times the bytes.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor | None) -> Tensor:
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scales)  # type: ignore[arg-type]  # a tensor may be None
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)
