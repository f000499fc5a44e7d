"""Deferred weight gradients: zero-bubble schedules fill the pipeline's bubble with them (Qi et al. 2024, DualPipe).

The backward pass of a linear layer is two products: the gradient of its input (I), needed by the previous stage, and
the gradient of its weight (W), needed by no stage. Here the backward pass computes I and stores the operands of W; the
schedule runs W later. References: Qi et al. 2024, arXiv 2401.10241; DualPipe: DeepSeek-AI 2024, arXiv 2412.19437.

Nothing is sharded or sent. A micro batch's inputs and output gradients of every linear layer and of the head stay in
memory from its I to its W. Norms, embeddings, biases and routers, which cost little, are computed in I; so are routed
experts, which cost more.

FOOTGUN: torch's own split of the backward searches the graph for parameters afterwards. If FSDP reshards after the
forward it finds none, and gradients are missing or wrong without an error; with recomputation it recomputes once for
every parameter (torch 2.13). Here the weight is looked up while it is gathered, and nothing is recomputed twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchllm.models.decoder import Decoder
from torchllm.models.head import Head
from torchllm.models.layers import widened
from torchllm.runtime.heartbeat import phase


class DeferredProduct(NamedTuple):
    """The operands of one weight's gradient."""

    weight: Tensor
    """(N, M)"""
    x: Tensor
    """input of the layer, (..., M)"""
    gradient: Tensor
    """gradient of its output, (..., N)"""


class WeightGradients:
    """Makes the linear layers of a stage, in place, defer the gradients of their weights, and stores the operands."""

    def __init__(self, stage: Decoder) -> None:
        self.deferred: list[DeferredProduct] = []
        for module in stage.modules():
            if isinstance(module, nn.Linear | Head) and not module.weight.requires_grad:
                continue  # frozen: there is no product to defer, and the product of a low-rank update is small
            if isinstance(module, nn.Linear):
                # Only the method is replaced, so that parameters, hooks and names stay.
                module.forward = self._linear(module)  # type: ignore[method-assign, assignment]
            elif isinstance(module, Head):
                module.project = self._linear(module)  # type: ignore[method-assign, assignment]

    def _linear(self, module: nn.Linear | Head) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            bias = getattr(module, "bias", None)
            if not x.requires_grad:  # all before is frozen: autograd would not call the backward pass
                return F.linear(x, module.weight, bias)
            return _Linear.apply(x, bias, module, self)

        return forward

    def take(self) -> Callable[[], None]:
        """Remove the products deferred so far (one micro batch); returns a function that computes them.

        `PipelineStage` calls this after an I, and the returned function when the schedule reaches the W.
        """
        products, self.deferred = self.deferred, []

        def run() -> None:
            with phase("backward"):
                while products:
                    add_product(products.pop())

        return run


def compute_product(product: DeferredProduct) -> Tensor:
    """Return gradientᵀ x, summed over all leading dimensions: (N, M)."""
    return product.gradient.flatten(0, -2).t() @ product.x.flatten(0, -2)


@torch.no_grad()  # FOOTGUN: otherwise the sum keeps its autograd graph, and with it the operands of every micro batch
def add_product(product: DeferredProduct) -> None:
    """Add the product to the weight's gradient, in float32.

    FSDP sums the gradients of gathered bfloat16 weights in float32, its reduce dtype, but does so within a backward
    pass only, and torch 2.11 to 2.14 accept a float32 gradient of a bfloat16 weight only if told to.
    """
    weight = product.weight
    weight_gradient = compute_product(product)
    if isinstance(weight_gradient, DTensor) and isinstance(weight, DTensor):
        weight_gradient = weight_gradient.redistribute(placements=weight.placements)
    if weight.grad is None:
        weight_gradient = widened(weight_gradient)
        weight.grad_dtype = weight_gradient.dtype
        weight.grad = weight_gradient
    else:
        weight.grad += weight_gradient


class _Linear(torch.autograd.Function):
    """x Wᵀ + b. FSDP replaces `module.weight` as it gathers and frees, so it is looked up at each use, never stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, module: nn.Linear | Head, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        ctx.store = store
        ctx.has_bias = bias is not None
        return F.linear(x, module.weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.module.weight
        ctx.store.deferred.append(DeferredProduct(weight, x, gradient))
        d_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return gradient @ weight, d_bias, None, None
