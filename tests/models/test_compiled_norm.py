"""RMSNorm's compiled kernel."""

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.models.test_layers import ROUNDING, inputs
from torchllm.models.layers import rms_norm

COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.exhaustive
@pytest.mark.skipif(not COMPILER, reason="torch.compile needs a C++ compiler")
def test_compiled_rms_norm_is_the_eager_one() -> None:
    compiled = torch.compile(rms_norm)
    x = inputs(2, 5, 24)
    weight = inputs(24)
    upstream = inputs(2, 5, 24).flip(0)

    def forward_and_backward(kernel: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = kernel(*leaves, 1e-2)
        gradients = torch.autograd.grad(out, leaves, upstream)
        return [out, *gradients]

    eager_results = forward_and_backward(rms_norm)
    compiled_results = forward_and_backward(compiled)
    for got, expected in zip(compiled_results, eager_results, strict=True):
        torch.testing.assert_close(got, expected, **ROUNDING)
