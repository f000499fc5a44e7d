"""The CUDA kernels of the ring against the eager one. They have not run yet: there was no GPU; nor has this file."""

import itertools

import pytest
import torch
from torch import Tensor

from torchllm.parallel.attention_kernels import (
    UNSEEN,
    BlockKernel,
    CudaKernels,
    EagerKernel,
    KeyMask,
    PartialAttention,
    block_kernel,
    document_bias,
)
from torchllm.parallel.kernel_check import check_kernel
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
    check_kernel(block_kernel("sdpa", "cuda"), torch.device("cuda"), groups, width, dtype)


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
    ids = torch.arange(length, device="cuda").expand(2, length) // 300
    bias = document_bias(ids, ids if causal else ids + 1, causal, dtype) if documents else None
    results = forward_backward(CudaKernels(), q, kv, d_out, causal, bias)
    wide_bias = None if bias is None else bias.float()
    expected = forward_backward(EagerKernel(), q.float(), kv.float(), d_out.float(), causal, wide_bias)
    for name, expected_result in expected.items():
        assert results[name].shape == expected_result.shape
        difference = (results[name].float() - expected_result).abs().max()
        assert difference <= ERROR[dtype] * expected_result.abs().max(), name


def forward_backward(
    kernel: BlockKernel, q: Tensor, kv: Tensor, d_out: Tensor, causal: bool, bias: Tensor | None
) -> dict[str, Tensor]:
    """Return out, lse, dq, dk, dv by name; every row has seen another block too, whose lse is 1."""
    mask = KeyMask(causal=causal) if bias is None else KeyMask(bias=bias)
    out, lse = kernel.forward(q, kv, mask)
    sees_nothing = lse < UNSEEN / 2  # its out has no weight: it may be anything
    out = out.masked_fill(sees_nothing.unsqueeze(-1), 0.0)
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
