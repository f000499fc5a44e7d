"""What selective recomputation keeps whole: computed once, given back in order, and freed with its graph."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchllm.parallel.recompute import save_products_and_rings
from torchllm.parallel.saved_results import computed_once

results: list[Any] = []
"""references to the storages of what was computed"""


class Twice(torch.autograd.Function):
    """Two products, x @ w @ w, as one result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        def compute() -> tuple[Tensor]:
            out = x @ weight @ weight
            results.append(weakref.ref(out.untyped_storage()))
            return (out,)

        (out,) = computed_once(compute)
        ctx.save_for_backward(weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight, _ = ctx.saved_tensors
        return gradient @ weight.T @ weight.T, None


def run(x: Tensor, weight: Tensor) -> Tensor:
    return Twice.apply(Twice.apply(x, weight).sin(), 2 * weight).cos().sum()


@pytest.fixture(autouse=True)
def _only_references_count() -> Iterator[None]:
    results.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_graph_that_has_no_backward_is_freed() -> None:
    x, weight = torch.ones(3, 4, requires_grad=True), torch.ones(4, 4)
    loss = checkpoint(run, x, weight, use_reentrant=False, context_fn=save_products_and_rings)
    assert all(reference() is not None for reference in results)
    del loss
    assert [reference() for reference in results] == [None, None]
