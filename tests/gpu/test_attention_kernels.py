"""The CUDA kernels of the ring against the eager one. They have not run yet: there was no GPU; nor has this file."""

import itertools

import pytest
import torch

from torchllm.parallel.attention_kernels import (
    UNSEEN,
    CudaKernels,
    EagerKernel,
    block_kernel,
    check_kernel,
    document_bias,
)
from torchllm.parallel.ring import merge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: CUDA's attention kernels need one")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
ERROR = {FLOAT32: 1e-3, BFLOAT16: 3e-2}
"""of the largest element: products in tf32; 2**-8 and sums of rounded terms"""


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("width", [64, 80, 128])
def test_the_check_that_every_run_makes(groups: int, width: int) -> None:
    """For small blocks of both types, with and without documents, and rows that see nothing."""
    check_kernel(block_kernel("sdpa", "cuda"), torch.device("cuda"), groups, width)


@pytest.mark.parametrize(
    ("dtype", "documents", "causal"), list(itertools.product((FLOAT32, BFLOAT16), (False, True), (False, True)))
)
@pytest.mark.parametrize("length", [256, 1000, 1004])
def test_blocks_as_long_as_real_ones(length: int, dtype: torch.dtype, documents: bool, causal: bool) -> None:
    """1000 and 1004: no multiple of 16 or 32, to which the memory-efficient kernel pads rows and lse."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, gradient = (torch.randn(2, 8, length, 64, generator=generator, device="cuda", dtype=dtype) for _ in range(2))
    kv = torch.randn(2, 2, 2, length, 64, generator=generator, device="cuda", dtype=dtype)
    ids = torch.arange(length, device="cuda").expand(2, length) // 300
    bias = document_bias(ids, ids if causal else ids + 1, causal, dtype) if documents else None
    found = []
    for kernel, cast in ((CudaKernels(), dtype), (EagerKernel(), FLOAT32)):
        blocks = [x.to(cast) for x in (q, kv, gradient)]
        wide = None if bias is None else bias.to(cast)
        out, lse = kernel.forward(*blocks[:2], causal and not documents, wide)
        nothing = lse < UNSEEN / 2
        out, lse = out.masked_fill(nothing.unsqueeze(-1), 0.0), lse.logaddexp(torch.ones_like(lse))
        found.append([out, lse, *kernel.backward(blocks[2], *blocks[:2], out, lse, causal and not documents, wide)])
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True):
        assert got.shape == want.shape
        assert (got.float() - want).abs().max() <= ERROR[dtype] * want.abs().max(), name


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_two_blocks_merge_to_attention_over_both(dtype: torch.dtype) -> None:
    q = torch.randn(1, 4, 128, 64, device="cuda", dtype=dtype)
    kv = torch.randn(2, 1, 4, 256, 64, device="cuda", dtype=dtype)
    kernel = CudaKernels()
    out, lse = kernel.forward(q, kv[:, :, :, :128], True, None)
    out = out.float()
    merge(out, lse, *kernel.forward(q, kv[:, :, :, 128:], False, None))
    seen = torch.ones(128, 256, dtype=torch.bool, device="cuda")
    seen[:, :128] = seen[:, :128].tril()
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), *kv.float(), attn_mask=seen)
    assert (out - want).abs().max() <= ERROR[dtype] * want.abs().max()
