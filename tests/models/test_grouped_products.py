"""Products of groups of rows, against products of each group by itself in float64."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torchllm.models import grouped_products
from torchllm.models.grouped_products import grouped_linear, grouped_weight_gradient
from torchllm.runtime.torch_compat import FakeTensorMode

SIZES = [3, 0, 4, 1, 0]
"""rows of each group: two are empty, one of them the last"""
ROWS, INPUTS, OUTPUTS = sum(SIZES), 8, 16


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(len(SIZES), OUTPUTS, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), weight.requires_grad_()


def one_by_one(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each row by the matrix of its group, in float64."""
    group = torch.tensor([group for group, size in enumerate(SIZES) for _ in range(size)])
    return torch.einsum("tm,tnm->tn", x.double(), weight.double()[group])


TOLERANCES = [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.float16, 0.01), (torch.bfloat16, 0.1)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_results_and_gradients_are_those_of_one_product_per_group(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = factors(dtype)
    result = grouped_linear(x, weight, ends(SIZES))
    assert result.dtype == dtype
    expected = one_by_one(x, weight)
    torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=tolerance)
    d_out = torch.randn(ROWS, OUTPUTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(result, (x, weight), d_out)
    expected_gradients = torch.autograd.grad(expected, (x, weight), d_out.double())
    for gradient, of_expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), of_expected.double(), rtol=0.0, atol=tolerance)
    assert not gradients[1][1].any()  # of a group without rows: no garbage
    assert not gradients[1][4].any()


@pytest.mark.parametrize(("dtype", "calls"), [(torch.float64, 0), (torch.float32, 3), (torch.bfloat16, 3)])
def test_one_call_of_torch_computes_all_groups_where_it_can(
    dtype: torch.dtype, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in float32 the loop has the same numbers, up to the order of a sum of 16 products."""
    with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as counted:
        x, weight = factors(dtype)
        result = grouped_linear(x, weight, ends(SIZES))
        result.sum().backward()
        assert counted.call_count == calls
        monkeypatch.setattr(grouped_products, "_has_kernel", lambda first, second: False)
        looped_x, looped_weight = factors(dtype)
        looped = grouped_linear(looped_x, looped_weight, ends(SIZES))
        looped.sum().backward()
        assert counted.call_count == calls
    for one, other in ((result, looped), (x.grad, looped_x.grad), (weight.grad, looped_weight.grad)):
        torch.testing.assert_close(one, other, rtol=1e-6 if dtype == torch.float32 else 0.01, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gradient_of_a_sum_is_taken_too(dtype: torch.dtype) -> None:
    x, weight = factors(dtype)
    grouped_linear(x, weight, ends(SIZES)).sum().backward()  # it is one number, expanded
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.autograd.grad(one_by_one(x, weight).sum(), x)[0])


def test_no_rows_and_odd_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.empty(0, INPUTS, requires_grad=True)
    weight = torch.randn(2, OUTPUTS, INPUTS, generator=generator, requires_grad=True)
    result = grouped_linear(x, weight, ends([0, 0]))
    assert result.shape == (0, OUTPUTS)
    result.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
    # sizes that are no multiples of 8
    x, weight = torch.randn(5, 3, generator=generator), torch.randn(2, 7, 3, generator=generator)
    odd = grouped_linear(x, weight, ends([2, 3]))
    torch.testing.assert_close(odd, torch.cat((x[:2] @ weight[0].T, x[2:] @ weight[1].T)))


def test_shapes_are_known_without_numbers() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(ROWS, INPUTS), torch.empty(len(SIZES), OUTPUTS, INPUTS)
        fake_ends = torch.empty(len(SIZES), dtype=torch.int32)
        result = grouped_linear(x, weight, fake_ends)
        assert result.shape == (ROWS, OUTPUTS)
        assert grouped_weight_gradient(result, x, fake_ends).shape == weight.shape


def test_operations_are_counted() -> None:
    x, weight = factors(torch.float32)
    with FlopCounterMode(display=False) as counter:
        grouped_linear(x, weight, ends(SIZES)).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * ROWS * INPUTS * OUTPUTS


def test_a_graph_holds_the_whole_product() -> None:
    x, weight = factors(torch.float32)
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, ends(SIZES)), grouped_linear(x, weight, ends(SIZES)))
