"""The CUDA kernels of the ring against the eager one. They have not run yet: there was no GPU; nor has this file."""

import itertools

import pytest
import torch
from torch import Tensor

from torchllm.config import Model
from torchllm.models.attention_kernels import (
    BlockKernel,
    CudaKernels,
    EagerKernel,
    Entries,
    KeyMask,
    PartialAttention,
    block_kernel,
)
from torchllm.models.kernel_check import check_kernel
from torchllm.parallel.ring import merge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: CUDA's attention kernels need one")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
ERROR = {FLOAT32: 1e-3, BFLOAT16: 3e-2}
"""of the largest element: products in tf32; 2**-8 and sums of rounded terms"""


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("width", [20, 64, 80, 128])
def test_the_check_that_every_run_makes(groups: int, width: int, dtype: torch.dtype) -> None:
    """For small blocks, with and without documents, and rows that see nothing. 20: no multiple of 8."""
    check_kernel(block_kernel(Model(attention="sdpa"), "cuda"), torch.device("cuda"), groups, width, dtype)


@pytest.mark.parametrize(
    ("dtype", "documents", "causal"), list(itertools.product((FLOAT32, BFLOAT16), (False, True), (False, True)))
)
@pytest.mark.parametrize("length", [256, 1000, 1004])
def test_blocks_as_long_as_real_ones(length: int, dtype: torch.dtype, documents: bool, causal: bool) -> None:
    """1000 and 1004: no multiple of 16 or 32, to which the memory-efficient kernel pads rows and lse."""
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 8, length, 64, generator=generator, device="cuda", dtype=dtype)
    d_out = torch.randn(2, 8, length, 64, generator=generator, device="cuda", dtype=dtype)
    kv = torch.randn(2, 2, 2, length, 64, generator=generator, device="cuda", dtype=dtype)
    mask = KeyMask(causal, entries_of(length, causal) if documents else None)
    results = forward_backward(CudaKernels(), q, kv, d_out, mask)
    expected = forward_backward(EagerKernel(), q.float(), kv.float(), d_out.float(), mask)
    for name, expected_result in expected.items():
        assert results[name].shape == expected_result.shape
        difference = (results[name].float() - expected_result).abs().max()
        assert difference <= ERROR[dtype] * expected_result.abs().max(), name


def entries_of(length: int, causal: bool) -> Entries:
    """Return documents of two sequences: a rank's own; or the one that it shares with another rank, or none."""
    own = torch.tensor([0, 100, length, length, length + 200, 2 * length, 2 * length, 2 * length]).int().cuda()
    if causal:
        return Entries(own, own)
    queries = torch.tensor([0, 0, 77, length, length, length, 2 * length])
    keys = torch.tensor([0, length - 150, length, length, 2 * length - 9, 2 * length, 2 * length])
    return Entries(queries.int().cuda(), keys.int().cuda())


def forward_backward(kernel: BlockKernel, q: Tensor, kv: Tensor, d_out: Tensor, mask: KeyMask) -> dict[str, Tensor]:
    """Return out, lse, dq, dk, dv by name; every row has seen another block too, whose lse is 1."""
    out, lse = kernel.forward(q, kv, mask)
    assert (lse < torch.inf).all()  # a query without keys: -inf
    lse = lse.logaddexp(torch.ones_like(lse))
    gradients = kernel.backward(d_out, q, kv, PartialAttention(out, lse), mask)
    return {"out": out, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_two_blocks_merge_to_attention_over_both(dtype: torch.dtype) -> None:
    q = torch.randn(1, 4, 128, 64, device="cuda", dtype=dtype)
    kv = torch.randn(2, 1, 4, 256, 64, device="cuda", dtype=dtype)
    kernel = CudaKernels()
    out, lse = kernel.forward(q, kv[:, :, :, :128], KeyMask(causal=True))
    attention = PartialAttention(out.float(), lse)
    merge(attention, kernel.forward(q, kv[:, :, :, 128:], KeyMask()))
    visible = torch.ones(128, 256, dtype=torch.bool, device="cuda")
    visible[:, :128] = visible[:, :128].tril()
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), *kv.float(), attn_mask=visible)
    assert (attention.out - expected).abs().max() <= ERROR[dtype] * expected.abs().max()


@pytest.mark.parametrize("width", [64, 128])
def test_a_query_without_keys_has_no_out_and_a_key_without_queries_no_gradient(width: int) -> None:
    """Exact zeros in bfloat16: what the kernel leaves as it was would be anything."""
    q = torch.randn(2, 8, 256, width, device="cuda", dtype=BFLOAT16)
    kv = torch.randn(2, 2, 2, 256, width, device="cuda", dtype=BFLOAT16)
    mask = KeyMask(entries=entries_of(256, causal=False))
    out, lse = CudaKernels().forward(q, kv, mask)
    assert not out[0, :, 77:].any()
    assert not out[1].any()
    seen = torch.logaddexp(lse, torch.ones_like(lse))
    dq, dk, dv = CudaKernels().backward(q, q, kv, PartialAttention(out, seen), mask)
    assert not dq[0, :, 77:].any()
    assert not dq[1].any()
    for gradient in (dk, dv):
        assert not gradient[0, :, :106].any()
        assert not gradient[1].any()
