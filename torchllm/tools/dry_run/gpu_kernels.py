"""Computations that differ between a GPU and a CPU, in the dry run of a GPU.

Attention: the tensors of its flash kernels, which need no masks of documents and windows. Muon: iterations in 16 bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torchllm.config import Model
from torchllm.models import sinks, varlen_attention
from torchllm.models.attention_kernels import BlockKernel, CudaKernels, block_kernel
from torchllm.optim import muon
from torchllm.optim.muon import iteration_dtype
from torchllm.parallel import context


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Have functions choose as on a GPU for tensors that have no values, within a `with` block."""
    usual = [(module, name, getattr(module, name)) for module, name, _ in CHOICES]
    for module, name, of_gpu in CHOICES:
        setattr(module, name, of_gpu)
    try:
        yield
    finally:
        for module, name, function in usual:
            setattr(module, name, function)


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


def _iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of Muon's iterations and messages on a GPU."""
    return iteration_dtype(torch.device("cuda"))


CHOICES: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = (
    (varlen_attention, "has_flash_attention", _has_flash_attention),
    (sinks, "_kernel", _kernel),
    (context, "ring_kernel", _ring_kernel),
    (muon, "iteration_dtype", _iteration_dtype),
)
"""module, name of a function, and its replacement"""
