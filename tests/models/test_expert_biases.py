"""Experts with biases, and gpt-oss's gate."""

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from torchllm.models.activations import clamped_silu_gated
from torchllm.models.grouped_products import add_bias

pytestmark = pytest.mark.quick
ENDS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
"""of four groups, of which two have no rows"""


def row_by_row(rows: Tensor, bias: Tensor) -> Tensor:
    groups = [1] * 3 + [3] * 4
    return torch.stack([row + bias[group] for row, group in zip(rows, groups, strict=True)])


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_a_row_gets_the_bias_of_its_group(dtype: torch.dtype, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, d_out = (torch.randn(7, 5, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    bias = torch.randn(4, 5, generator=generator).to(dtype).requires_grad_()
    results, expected = (
        [out, *torch.autograd.grad(out, (rows, bias), d_out.detach())]
        for out in (add_bias(rows, bias, ENDS), row_by_row(rows, bias))
    )
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=error)


def test_a_rank_without_rows() -> None:
    rows, bias = torch.zeros(0, 5, requires_grad=True), torch.zeros(4, 5, requires_grad=True)
    out = add_bias(rows, bias, torch.zeros(4, dtype=torch.int32))
    assert out.shape == (0, 5)
    (d_bias,) = torch.autograd.grad(out.sum(), bias)
    assert torch.equal(d_bias, torch.zeros(4, 5))


def test_the_gate_is_that_of_transformers() -> None:
    """Also of values that are cut, and of gradients, which are 0 there."""
    generator = torch.Generator().manual_seed(0)
    gate, up = ((8 * torch.randn(50, 6, generator=generator)).requires_grad_() for _ in range(2))
    assert (gate > 7).any()
    assert (up > 7).any()
    assert (up < -7).any()
    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=6, intermediate_size=6))
    theirs = experts._apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))
    ours = clamped_silu_gated(gate, up)
    upstream = torch.randn(50, 6, generator=generator)
    expected = [theirs, *torch.autograd.grad(theirs, (gate, up), upstream)]
    for result, exact in zip([ours, *torch.autograd.grad(ours, (gate, up), upstream)], expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-6, atol=1e-5)  # values up to 56
