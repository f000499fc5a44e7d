"""The loss in the dry run of a GPU that compiles it: the tensors of its kernels, which convert logits as they read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchllm.models.decoder import Decoder
from torchllm.parallel import tensor


def use_compiled_loss(model: Decoder) -> None:
    """Make the head of a model hold the tensors of a compiled loss, in place; its results have no values.

    Tensor parallelism replaces it by the loss of a head that is cut: see `compiled_cut_loss`.
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


@contextmanager
def compiled_cut_loss() -> Iterator[None]:
    """Have a head that is cut by vocabulary hold the tensors of a compiled loss, within a `with` block."""
    of_single_operations = tensor.cut_cross_entropy
    tensor.cut_cross_entropy = _CompiledCutLoss.apply
    try:
        yield
    finally:
        tensor.cut_cross_entropy = of_single_operations


class _CompiledCutLoss(torch.autograd.Function):
    """Sends what `cut_cross_entropy` sends, and keeps what `_CompiledLoss` keeps."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup, with_squares: bool
    ) -> Tensor:
        largest, sums = (logits.new_empty((*shape, len(logits)), dtype=torch.float32) for shape in ((), (2,)))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(logits, largest, sums)
        return logits.new_empty((2,) if with_squares else (), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, *_ = ctx.saved_tensors
        return torch.empty_like(logits), None, None, None, None
