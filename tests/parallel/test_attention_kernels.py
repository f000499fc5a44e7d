"""Attention block by block: every kernel against torch's plain attention, forward and backward, and merged parts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torchllm.config.errors import UserError
from torchllm.parallel.attention_kernels import (
    UNSEEN,
    BlockKernel,
    CpuKernel,
    CudaKernels,
    EagerKernel,
    block_kernel,
    check_kernel,
    document_bias,
)

CPU = torch.device("cpu")
KERNELS = [EagerKernel(), CpuKernel()]
EXACT = 1e-13  # of the largest element, in float64: sums of 24 terms, in another order


def blocks(groups: int, dtype: torch.dtype = torch.float64, queries: int = 12, keys: int = 24) -> list[Tensor]:
    """q, kv, gradient of out; 2 sequences, 3 key-value heads of width 8."""
    generator = torch.Generator().manual_seed(0)
    q, gradient = (torch.randn(2, 3 * groups, queries, 8, generator=generator, dtype=dtype) for _ in range(2))
    return [q, torch.randn(2, 2, 3, keys, 8, generator=generator, dtype=dtype), gradient]


def plain(q: Tensor, kv: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse by the definition, in whole tensors, for autograd; hidden: (..., S, T) bool."""
    k, v = kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def close(got: Tensor, want: Tensor, relative: float) -> bool:
    assert got.shape == want.shape
    return bool((got.double() - want).abs().max() <= relative * want.abs().max())


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("kind", ["whole", "causal", "bias"])
def test_a_block_is_plain_attention(kernel: BlockKernel, groups: int, kind: str) -> None:
    q, kv, gradient = blocks(groups, queries=24)
    hidden = torch.zeros(24, 24, dtype=torch.bool)
    bias = None
    if kind == "causal":
        hidden = torch.ones_like(hidden).triu(1)
    elif kind == "bias":
        ids = (torch.arange(24) // torch.tensor([[5], [9]])).double()
        bias = document_bias(ids, ids, True, torch.float64)
        hidden = bias == UNSEEN
        assert 0 < hidden.sum() < hidden.numel()
    q.requires_grad_()
    kv.requires_grad_()
    want_out, want_lse = plain(q, kv, hidden)
    want_dq, want_dkv = torch.autograd.grad(want_out, (q, kv), gradient)
    with torch.no_grad():
        out, lse = kernel.forward(q, kv, kind == "causal", bias)
        dq, dk, dv = kernel.backward(gradient, q, kv, out, lse, kind == "causal", bias)
    assert close(out, want_out, EXACT)
    assert close(lse, want_lse, EXACT)
    assert close(dq, want_dq, EXACT)
    assert close(torch.stack((dk, dv)), want_dkv, EXACT)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_rows_that_see_nothing_have_no_weight_and_no_gradient(kernel: BlockKernel) -> None:
    """Rows 0 to 3 see no key of this block, but some of another one, whose lse is 1."""
    q, kv, gradient = blocks(2)
    bias = document_bias(torch.arange(12).expand(2, 12) // 4, torch.ones(2, 24), False, torch.float64)
    out, lse = kernel.forward(q, kv, False, bias)
    assert (lse[:, :, [0, 1, 2, 3, 8, 9, 10, 11]] < UNSEEN / 2).all()
    assert (lse[:, :, 4:8].abs() < 10).all()
    both = torch.logaddexp(lse, torch.ones_like(lse))
    dq, dk, dv = kernel.backward(gradient, q, kv, out, both, False, bias)
    assert not dq[:, :, :4].any()
    assert dq[:, :, 4:8].all()
    without = [x[:, :, 4:8] for x in (gradient, q)]
    same = kernel.backward(*without, kv, out[:, :, 4:8], both[:, :, 4:8], False, bias[:, :, 4:8])
    assert close(dk, same[1], EXACT)
    assert close(dv, same[2], EXACT)


def test_minus_infinity_would_poison_the_merge() -> None:
    """Why what is not seen has a score of -1e30: torch's kernel answers lse 0 for a row of -inf."""
    q, kv, _ = blocks(1)
    bias = torch.full((2, 1, 12, 24), -torch.inf, dtype=torch.float64)
    assert not CpuKernel().forward(q, kv, False, bias)[1].any()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_sum_exp_is_float32_at_least(kernel: BlockKernel, dtype: torch.dtype) -> None:
    q, kv, gradient = blocks(2, dtype)
    bias = document_bias(torch.zeros(2, 12), torch.zeros(2, 24), False, dtype)
    out, lse = kernel.forward(q, kv, False, bias)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert {x.dtype for x in kernel.backward(gradient, q, kv, out, lse, False, bias)} == {dtype}


def test_document_bias() -> None:
    bias = document_bias(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 2]]), False, torch.float32)
    assert (bias == 0).tolist() == [[[[True, False, False], [False, True, False], [False, True, False]]]]
    assert bias.unique().tolist() == [pytest.approx(UNSEEN), 0.0]
    causal = document_bias(torch.zeros(1, 3), torch.zeros(1, 3), True, torch.bfloat16)
    assert causal.dtype == torch.bfloat16
    assert (causal == 0).squeeze().tolist() == torch.ones(3, 3).tril().bool().tolist()


def test_the_kernel_of_a_device() -> None:
    assert isinstance(block_kernel("eager", "cuda"), EagerKernel)
    assert isinstance(block_kernel("sdpa", "cpu"), CpuKernel)
    assert isinstance(block_kernel("sdpa", "cuda"), CudaKernels)


@pytest.mark.parametrize(("groups", "width"), [(1, 8), (4, 64), (3, 80)])
def test_right_kernels_pass_the_check(groups: int, width: int) -> None:
    check_kernel(CpuKernel(), CPU, groups, width)
    check_kernel(EagerKernel(), CPU, groups, width)


class Wrong(CpuKernel):
    """One of its results is off, by a twentieth, where there is a bias."""

    def __init__(self, which: str) -> None:
        self.which = which

    def _spoiled(self, bias: Tensor | None, **results: Tensor) -> Any:
        return tuple(x * 1.05 if name == self.which and bias is not None else x for name, x in results.items())

    def forward(self, q: Tensor, kv: Tensor, causal: bool, bias: Tensor | None) -> Any:
        out, lse = super().forward(q, kv, causal, bias)
        return self._spoiled(bias, out=out, lse=lse)

    def backward(self, gradient: Tensor, q: Tensor, kv: Tensor, *rest: Any) -> Any:
        dq, dk, dv = super().backward(gradient, q, kv, *rest)
        return self._spoiled(rest[-1], dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize("which", ["out", "lse", "dq", "dk", "dv"])
def test_the_check_finds_a_wrong_result(which: str) -> None:
    with pytest.raises(UserError, match=rf"float32 \({which} is off by .*model.attention = \"eager\""):
        check_kernel(Wrong(which), CPU, 2, 16)


def test_the_check_finds_a_kernel_that_ignores_strides() -> None:
    class Contiguous(CpuKernel):
        def backward(self, gradient: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
            packed = torch.empty(lse.shape).stride()
            return super().backward(gradient, q, kv, out, lse.as_strided(lse.shape, packed), *rest)

    with pytest.raises(UserError, match="is off by"):
        check_kernel(Contiguous(), CPU, 2, 16)


def test_the_check_finds_a_kernel_that_fails() -> None:
    """As the CUDA kernels do without a GPU; on one, tests/gpu compares them."""
    with pytest.raises(UserError, match="does not do what the ring needs in float32"):
        check_kernel(CudaKernels(), CPU, 2, 16)
