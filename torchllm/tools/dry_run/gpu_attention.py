"""Attention in the dry run of a GPU: the tensors of its flash kernels, which need no masks of documents and windows."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchllm.models import sinks, varlen_attention
from torchllm.models.attention_kernels import BlockKernel, CudaKernels


@contextmanager
def gpu_attention() -> Iterator[None]:
    """Have cores call a GPU's kernels on tensors that have no values, within a `with` block."""
    has_flash_attention, kernel = varlen_attention.has_flash_attention, sinks._kernel
    varlen_attention.has_flash_attention, sinks._kernel = _has_flash_attention, _kernel
    try:
        yield
    finally:
        varlen_attention.has_flash_attention, sinks._kernel = has_flash_attention, kernel


def _has_flash_attention(device: torch.device) -> bool:
    """Return whether a GPU has it; Ampere and later ones do."""
    return True


def _kernel(q: Tensor, k: Tensor, scale: float | None) -> BlockKernel:
    """Return a GPU's kernel, which cannot be compared with the eager one here."""
    return CudaKernels(scale)
