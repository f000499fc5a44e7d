"""Attention block by block: every kernel against attention by its definition, forward and backward."""

import math
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models.attention_kernels import (
    BlockKernel,
    CpuKernel,
    CudaKernels,
    EagerKernel,
    Entries,
    Gradients,
    KeyMask,
    PartialAttention,
    block_kernel,
)
from torchllm.models.kernel_check import check_kernel
from torchllm.runtime.torch_compat import TorchDispatchMode

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
KERNELS = [EagerKernel(), CpuKernel()]
WITH_OPTIONS = [EagerKernel(0.9), CpuKernel(0.9), EagerKernel(0.9, softcap=1.5)]
EXACT = 1e-13  # of the largest element, in float64: sums of 24 terms, in another order


class Block(NamedTuple):
    """Random inputs of one block: 2 sequences, 3 key-value heads of width 8."""

    q: Tensor
    kv: Tensor
    d_out: Tensor


def random_block(groups: int, dtype: torch.dtype = torch.float64, queries: int = 12, keys: int = 24) -> Block:
    generator = torch.Generator().manual_seed(0)
    query_shape = (2, 3 * groups, queries, 8)
    q = torch.randn(query_shape, generator=generator, dtype=dtype)
    d_out = torch.randn(query_shape, generator=generator, dtype=dtype)
    kv = torch.randn(2, 2, 3, keys, 8, generator=generator, dtype=dtype)
    return Block(q, kv, d_out)


def attention_by_definition(q: Tensor, kv: Tensor, hidden: Tensor, kernel: Any) -> PartialAttention:
    """Attention in whole tensors, for autograd; hidden: (..., S, T) bool."""
    k, v = kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
    scores = q @ k.mT * (kernel.scale or 1 / math.sqrt(q.shape[-1]))
    if cap := getattr(kernel, "softcap", 0.0):
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(hidden, -torch.inf)
    return PartialAttention(scores.softmax(-1) @ v, scores.logsumexp(-1))


def close(result: Tensor, expected: Tensor, relative: float) -> bool:
    assert result.shape == expected.shape
    difference = (result.double() - expected).abs().max()
    return bool(difference <= relative * expected.abs().max())


@pytest.mark.parametrize("kernel", [*KERNELS, *WITH_OPTIONS], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize(("groups", "kind"), [(1, "whole"), (2, "causal"), (4, "entries")])
def test_a_block_is_plain_attention(kernel: BlockKernel, groups: int, kind: str) -> None:
    q, kv, d_out = random_block(groups, queries=24)
    hidden = torch.zeros(24, 24, dtype=torch.bool)
    mask = KeyMask()
    if kind == "causal":
        hidden = torch.ones_like(hidden).triu(1)
        mask = KeyMask(causal=True)
    elif kind == "entries":
        ids = torch.arange(24) // torch.tensor([[8], [12]])
        later = torch.ones_like(hidden).triu(1)
        hidden = (later | (ids.unsqueeze(2) != ids.unsqueeze(1))).unsqueeze(1)
        starts = torch.tensor([0, 8, 16, 24, 36, 48, 48])
        mask = KeyMask(causal=True, entries=Entries(starts, starts))
    q.requires_grad_()
    kv.requires_grad_()
    expected = attention_by_definition(q, kv, hidden, kernel)
    expected_dq, expected_dkv = torch.autograd.grad(expected.out, (q, kv), d_out)
    with torch.no_grad():
        attention = kernel.forward(q, kv, mask)
        gradients = kernel.backward(d_out, q, kv, attention, mask)
    assert close(attention.out, expected.out, EXACT)
    assert close(attention.lse, expected.lse, EXACT)
    assert close(gradients.dq, expected_dq, EXACT)
    assert close(torch.stack((gradients.dk, gradients.dv)), expected_dkv, EXACT)


SHARED = Entries(torch.tensor([0, 0, 4, 12, 12, 16, 24]), torch.tensor([0, 20, 24, 24, 40, 48, 48]))
"""of two sequences with 12 queries and 24 keys the first 4 queries see the last 4 and the last 8 keys"""


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_rows_that_see_nothing_have_no_weight_and_no_gradient(kernel: BlockKernel) -> None:
    """Every row has seen keys of another block too, with an lse of 1."""
    q, kv, d_out = random_block(2)
    mask = KeyMask(entries=SHARED)
    out, lse = kernel.forward(q, kv, mask)
    assert not out[:, :, 4:].any()
    assert (lse[:, :, 4:] == -math.inf).all()
    attention = PartialAttention(out, torch.logaddexp(lse, torch.ones_like(lse)))
    gradients = kernel.backward(d_out, q, kv, attention, mask)
    assert not gradients.dq[:, :, 4:].any()
    for row, keys in enumerate((slice(20, 24), slice(16, 24))):
        inputs = q[row : row + 1, :, :4], kv[:, row : row + 1, :, keys]
        part = kernel.forward(*inputs, KeyMask())
        whole = PartialAttention(*(x[row : row + 1] for x in attention)).rows(slice(0, 4))
        dq, dk, dv = kernel.backward(d_out[row : row + 1, :, :4], *inputs, whole, KeyMask())
        assert close(out[row : row + 1, :, :4], part.out, EXACT)
        assert close(gradients.dq[row : row + 1, :, :4], dq, EXACT)
        for gradient, expected in ((gradients.dk, dk), (gradients.dv, dv)):
            assert close(gradient[row : row + 1, :, keys], expected, EXACT)
            assert not gradient[row, :, : keys.start].any()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_log_sum_exp_is_float32_at_least(kernel: BlockKernel) -> None:
    dtype = torch.bfloat16
    q, kv, d_out = random_block(2, dtype)
    attention = kernel.forward(q, kv, KeyMask())
    assert attention.lse.dtype == torch.float32
    gradients = kernel.backward(d_out, q, kv, attention, KeyMask())
    of_results = torch.float32 if isinstance(kernel, EagerKernel) else dtype
    assert {result.dtype for result in (attention.out, *gradients)} == {of_results}


def test_the_eager_kernel_rounds_nothing_to_16_bits() -> None:
    """Of the same numbers its results in bfloat16 are those in float64 but for what float32 rounds, 2**-24 a time."""
    block = random_block(2, torch.bfloat16)
    rounded_out = torch.randn(block.q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    kernel = EagerKernel()
    results, exact = [], []
    for (q, kv, d_out), into in ((block, results), (Block(*(x.double() for x in block)), exact)):
        attention = kernel.forward(q, kv, KeyMask())
        saved = attention._replace(out=rounded_out.to(q.dtype))  # as the ring saves it
        into += [*attention, *kernel.backward(d_out, q, kv, saved, KeyMask())]
    for result, expected in zip(results, exact, strict=True):
        assert close(result, expected, 1e-6)


def test_the_kernel_of_a_device() -> None:
    assert isinstance(block_kernel(Model(attention="eager"), "cuda"), EagerKernel)
    assert isinstance(block_kernel(Model(attention="sdpa"), "cpu"), CpuKernel)
    assert isinstance(block_kernel(Model(attention="sdpa"), "cuda"), CudaKernels)


DTYPES = [torch.float32, torch.bfloat16]


def test_right_kernels_pass_the_check() -> None:
    for kernel in (*KERNELS, CpuKernel(0.9)):
        check_kernel(kernel, CPU, 1, 8, torch.float32)
        check_kernel(kernel, CPU, 3, 80, torch.bfloat16)


class Wrong(CpuKernel):
    """A kernel of which one result is 5 % too large in one kind of block: causal or not, with documents or without."""

    def __init__(self, result: str, causal: bool, documents: bool) -> None:
        super().__init__()
        self.result = result
        self.kind = (causal, documents)

    def _spoil(self, mask: KeyMask, results: Any) -> Any:
        if (mask.causal, mask.entries is not None) != self.kind or self.result not in results._fields:
            return results
        return results._replace(**{self.result: getattr(results, self.result) * 1.05})

    def forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        return self._spoil(mask, super().forward(q, kv, mask))

    def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: Any, mask: KeyMask) -> Gradients:
        return self._spoil(mask, super().backward(d_out, q, kv, attention, mask))


def test_the_check_finds_a_wrong_result() -> None:
    both = (False, True)
    for result, causal, documents, dtype in product(("out", "lse", "dq", "dk", "dv"), both, both, DTYPES):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(UserError, match=rf"{name} \({result} is off by .*model.attention = \"eager\""):
            check_kernel(Wrong(result, causal, documents), CPU, 2, 16, dtype)
    with pytest.raises(UserError, match="is not usable for the ring in float32"):
        check_kernel(CudaKernels(), CPU, 2, 16, torch.float32)  # they fail


def test_the_check_finds_a_kernel_that_ignores_strides() -> None:
    class Contiguous(CpuKernel):
        def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: Any, mask: KeyMask) -> Gradients:
            misread = attention._replace(lse=as_if_contiguous(attention.lse))
            return super().backward(d_out, q, kv, misread, mask)

    with pytest.raises(UserError, match="is off by"):
        check_kernel(Contiguous(), CPU, 2, 16, torch.float32)


UNUSED = torch.empty(0)
"""what a kernel returns and nobody reads"""


def as_if_contiguous(x: Tensor) -> Tensor:
    """Return what a kernel reads that believes x to be contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


class CudaStandIn(TorchDispatchMode):
    """Does what torch's CUDA kernels do, by the eager kernel, with what they ask for and what they misread.

    tests/gpu compares the real ones, and tests/hollow runs their own checks. Rows that varlen attention skips are
    nan here.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        name = function.name().partition("::")[2]
        stand_in = getattr(self, name, None)
        return stand_in(*arguments, **(keywords or {})) if stand_in else function(*arguments, **(keywords or {}))

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *, scale: float
    ) -> Any:
        assert q.dtype == torch.bfloat16
        self.refuse(q)
        out, lse = eager(q, k, v, KeyMask(causal=causal), scale)
        return out, lse, UNUSED, UNUSED, q.shape[2], k.shape[2], UNUSED, UNUSED, UNUSED

    def _scaled_dot_product_flash_attention_backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> Any:
        query_starts, key_starts, queries, keys, dropout, causal, _, _ = rest
        assert (query_starts, key_starts, queries, keys, dropout) == (None, None, q.shape[2], k.shape[2], 0.0)
        self.refuse(q)
        return eager_backward(d_out, q, k, v, out, as_if_contiguous(lse), KeyMask(causal=causal), scale)

    def _flash_attention_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        *entries, longest_query, longest_key, dropout, causal, _ = rest
        scale = options["scale"]
        assert (dropout, options.keys()) == (0.0, {"scale"})
        self.refuse(q)
        out, lse = torch.full_like(q, math.nan), q.new_full(q.shape[1::-1], math.nan, dtype=wide(q))
        for queries, keys in all_ranges(entries, longest_query, longest_key):
            out[queries], lse[:, queries] = 0.0, math.inf
            if not is_empty(queries) and not is_empty(keys):
                part = eager(*(as_block(x) for x in (q[queries], k[keys], v[keys])), KeyMask(causal), scale)
                out[queries], lse[:, queries] = part.out[0].transpose(0, 1), part.lse[0]
        return out, lse, UNUSED, UNUSED, UNUSED

    def _flash_attention_backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **options: Any
    ) -> Any:
        *entries, longest_query, longest_key, dropout, causal, _, _ = rest
        scale = options["scale"]
        assert (dropout, options.keys()) == (0.0, {"scale"})
        self.refuse(q)
        lse = as_if_contiguous(lse)
        gradients = [torch.full_like(x, math.nan) for x in (q, k, v)]
        for queries, keys in all_ranges(entries, longest_query, longest_key):
            parts = [gradient[part] for gradient, part in zip(gradients, (queries, keys, keys), strict=True)]
            for part in parts:
                part.zero_()
            if not is_empty(queries) and not is_empty(keys):
                inputs = [as_block(x) for x in (d_out[queries], q[queries], k[keys], v[keys], out[queries])]
                results = eager_backward(*inputs, lse[:, queries].unsqueeze(0), KeyMask(causal), scale)
                for part, result in zip(parts, results, strict=True):
                    part.copy_(result[0].transpose(0, 1))
        return gradients

    def _scaled_dot_product_efficient_attention(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> Any:
        bias, with_lse, *_, causal = rest if len(rest) == 4 else (*rest, False)  # torch drops what is its default
        assert (bias, with_lse) == (None, True)
        self.refuse(q)
        assert k.shape[1] == q.shape[1]
        out, lse = eager(q, k, v, KeyMask(causal), scale)
        return out, F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf), UNUSED, UNUSED

    def _scaled_dot_product_efficient_attention_backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float
    ) -> Any:
        bias, out, lse, _, _, _, outputs, *causal = rest
        self.refuse(q)
        assert (bias, outputs) == (None, [True, True, True, False])
        assert lse.shape[-1] % 32 == 0
        if q.dtype == torch.bfloat16:
            by_token = out.transpose(1, 2)
            out = as_if_contiguous(by_token).transpose(1, 2)
        gradients = eager_backward(d_out, q, k, v, out, lse[..., : q.shape[2]], KeyMask(any(causal)), scale)
        return *gradients, UNUSED

    def refuse(self, q: Tensor) -> None:
        if q.shape[-1] % 8:
            raise RuntimeError("head_size must be a multiple of 8")


def all_ranges(entries: list[Tensor], longest_query: int, longest_key: int) -> list[tuple[slice, slice]]:
    """Return the ranges of queries and keys of all entries, of those without queries or keys too."""
    assert all(starts.dtype == torch.int32 for starts in entries)
    of_queries, of_keys = ([slice(*part) for part in pairwise(starts.tolist())] for starts in entries)
    ranges = list(zip(of_queries, of_keys, strict=True))
    for queries, keys in ranges:
        assert queries.stop - queries.start <= longest_query
        assert keys.stop - keys.start <= longest_key
    return ranges


def is_empty(tokens: slice) -> bool:
    return bool(tokens.start == tokens.stop)


def as_block(x: Tensor) -> Tensor:
    """Map (S, H, Q) -> (1, H, S, Q)."""
    return x.transpose(0, 1).unsqueeze(0)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask, scale: float) -> PartialAttention:
    """Eager attention with another scale than that of q's width."""
    rescaled = q.double() * (scale * q.shape[-1] ** 0.5)
    out, lse = EagerKernel().forward(rescaled, torch.stack((k, v)).double(), mask)
    return PartialAttention(out.to(q.dtype), lse.to(wide(q)))


def eager_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KeyMask, scale: float
) -> Gradients:
    factor = scale * q.shape[-1] ** 0.5
    attention = PartialAttention(out.double(), lse.double())
    kv = torch.stack((k, v)).double()
    dq, dk, dv = EagerKernel().backward(d_out.double(), q.double() * factor, kv, attention, mask)
    return Gradients((dq * factor).to(q.dtype), dk.to(q.dtype), dv.to(q.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_kernels_get_what_they_ask_for(dtype: torch.dtype) -> None:
    with CudaStandIn():
        for groups, width in ((1, 64), (2, 20), (3, 80)):
            check_kernel(CudaKernels(), CPU, groups, width, dtype)
