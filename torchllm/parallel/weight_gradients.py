"""Weight gradients put off: what lets a zero-bubble schedule fill its bubble (Qi et al. 2024, arXiv 2401.10241).

The backward pass of a linear layer is two products: the input's gradient, which the stage before waits for (I), and the
weight's (W), which nobody does. Here the backward pass computes the first and keeps the operands of the second; the
schedule runs them later. Nothing is sharded or sent. A micro batch's inputs and output gradients of every linear layer
and of the head stay in memory from its I to its W. Norms, embeddings and biases, which cost little, are in I.

FOOTGUN: torch's own way to split a backward searches the graph for parameters, after the fact. With FSDP resharding
after the forward it finds none, and gradients are missing or wrong without an error; with recomputation it recomputes
once for every parameter (torch 2.13). This way, the weight is looked up while it is gathered, and what is recomputed is
recomputed once.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchllm.models.decoder import Decoder
from torchllm.models.head import Head
from torchllm.parallel.fsdp import fsdp_modules
from torchllm.runtime.phase import phase
from torchllm.runtime.torch_compat import accumulate_in_reduce_dtype

Product = tuple[Tensor, Tensor, Tensor]
"""a weight (N, M), the inputs (..., M) and output gradients (..., N) of which its gradient is the product"""


class WeightGradients:
    """The products that one stage has put off. Makes its linear layers put them off, in place."""

    def __init__(self, stage: Decoder) -> None:
        self.stage = stage
        self.waiting: list[Product] = []
        for module in stage.modules():
            if isinstance(module, nn.Linear):
                module.forward = self._linear(module)  # type: ignore[method-assign, assignment]
            elif isinstance(module, Head):
                module.project = self._linear(module)  # type: ignore[method-assign, assignment]

    def _linear(self, module: nn.Linear | Head) -> Callable[[Tensor], Tensor]:
        return lambda x: _Linear.apply(x, getattr(module, "bias", None), module, self)

    def take(self) -> Callable[[], None]:
        """All products put off so far, those of one micro batch, as a call that does them. `PipelineStage` asks."""
        products, self.waiting = self.waiting, []

        def run() -> None:
            with phase("backward"):
                while products:
                    weight, x, gradient = products.pop()
                    add_product(weight, x, gradient)
                for unit in fsdp_modules(self.stage):
                    accumulate_in_reduce_dtype(unit)

        return run


@torch.no_grad()  # FOOTGUN: else the sum remembers how it was made, and with it every micro batch's operands
def add_product(weight: Tensor, x: Tensor, gradient: Tensor) -> None:
    """weight.grad += gradientᵀ x, summed over all leading dimensions."""
    product = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
    if isinstance(product, DTensor) and isinstance(weight, DTensor):
        product = product.redistribute(placements=weight.placements)
    weight.grad = product if weight.grad is None else weight.grad + product


class _Linear(torch.autograd.Function):
    """x Wᵀ + b. FSDP swaps `module.weight` as it gathers and frees, so it is asked for at each use, not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, module: nn.Linear | Head, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module, ctx.store, ctx.has_bias = module, store, bias is not None
        return F.linear(x, module.weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.module.weight
        ctx.store.waiting.append((weight, x, gradient))
        bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return gradient @ weight, bias, None, None
