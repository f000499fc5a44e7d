"""The loss in the dry run of a GPU that compiles it: the tensors of its kernels, which convert logits as they read."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchllm.models.decoder import Decoder


def use_compiled_loss(model: Decoder) -> None:
    """Make the head of a model hold the tensors of a compiled loss, in place; its results have no values.

    Only of a head that is whole on each rank: `parallel/tensor.py` exchanges the loss of one that is cut.
    """
    head = model.lm_head
    if head is None:
        return
    sums = (2,) if head.z_loss else ()

    def compiled(logits: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = _CompiledLoss.apply(logits, sums)
        return result

    head.cross_entropy = compiled


class _CompiledLoss(torch.autograd.Function):
    """Keeps the logits in their own dtype and a float32 per token; on a CPU torch keeps a float32 copy of the logits.

    `tools/planner/rank.py`, COMPILED_LOSS, has the same bytes; the hollow GPU's true peaks hold them.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, sums: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(logits, logits.new_empty(logits.shape[:-1], dtype=torch.float32))
        return logits.new_empty(sums, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, _ = ctx.saved_tensors
        return torch.empty_like(logits), None
