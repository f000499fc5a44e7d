"""Attention in the dry run of a GPU: the tensors of its flash kernels, which need no masks of documents and windows."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from torchllm.config import Model
from torchllm.models import sinks, varlen_attention
from torchllm.models.attention_kernels import BlockKernel, CudaKernels, block_kernel
from torchllm.parallel import context


@contextmanager
def gpu_attention() -> Iterator[None]:
    """Have cores call a GPU's kernels on tensors that have no values, within a `with` block."""
    has_flash_attention, kernel = varlen_attention.has_flash_attention, sinks._kernel
    ring_kernel = context.ring_kernel
    varlen_attention.has_flash_attention, sinks._kernel = _has_flash_attention, _kernel
    context.ring_kernel = _ring_kernel
    try:
        yield
    finally:
        varlen_attention.has_flash_attention, sinks._kernel = has_flash_attention, kernel
        context.ring_kernel = ring_kernel


def _has_flash_attention(device: torch.device) -> bool:
    """Return whether a GPU has it; Ampere and later ones do."""
    return True


def _kernel(q: Tensor, k: Tensor, scale: float | None) -> BlockKernel:
    """Return a GPU's kernel, which cannot be compared with the eager one here."""
    return CudaKernels(scale)


@cache
def _ring_kernel(view: Model, device: str, dtype: torch.dtype) -> BlockKernel:
    """Return a GPU's kernel of a ring, unchecked."""
    return block_kernel(view, "cuda")
