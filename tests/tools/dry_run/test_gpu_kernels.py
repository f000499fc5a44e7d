"""What a GPU computes in another way: attention within documents and windows needs no masks, Muon has 16 bits."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from torchllm.config import Model
from torchllm.models.attention import ScaledDotProductAttention
from torchllm.models.attention_kernels import CpuKernel, CudaKernels
from torchllm.models.document_attention import QUERY_BLOCK
from torchllm.models.sinks import SinkAttention
from torchllm.optim import muon
from torchllm.parallel import context
from torchllm.runtime.torch_compat import FakeTensorMode
from torchllm.tools.dry_run.gpu_kernels import as_on_gpu
from torchllm.tools.dry_run.memory import spans
from torchllm.tools.dry_run.tracker import Tracker

LENGTH, HEADS, WIDTH = 8192, 1, 8


def peaks_of(core_class: type[Any], window: int, gpu: bool) -> tuple[int, int]:
    """Return the most bytes of a core's forward, and of its backward, beyond its inputs."""
    view = Model(heads=HEADS, kv_heads=1, hidden=HEADS * WIDTH, window=window, sinks=core_class is SinkAttention)
    core = core_class(view)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, as_on_gpu() if gpu else nullcontext():
        q = torch.empty(1, LENGTH, HEADS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(1, LENGTH, 1, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
        of_heads = [torch.empty(HEADS, requires_grad=True)] if view.sinks else []
        mask = None if window else core.mask(torch.empty(1, LENGTH, dtype=torch.int64), 1)
        tracker = Tracker(fake, {})
        with tracker:
            tracker.mark("forward")
            out = core(q, k, v, mask, *of_heads)
            tracker.mark("backward")
            out.backward(out)
    forward, backward = (span.peak.total() for span in spans(tracker))
    return forward, backward


@pytest.mark.parametrize("core_class", [ScaledDotProductAttention, SinkAttention])
@pytest.mark.parametrize("window", [0, 4096])
def test_masks_of_a_block_of_queries_count_where_there_are_any(core_class: type[Any], window: int) -> None:
    """On a CPU the mask of a block, a byte each, and what it adds to the scores, in 16 bits."""
    keys = LENGTH if not window else window - 1 + QUERY_BLOCK
    mask = QUERY_BLOCK * keys
    for peak in peaks_of(core_class, window, gpu=False):
        assert 2 * mask < peak < 5 * mask
    for peak in peaks_of(core_class, window, gpu=True):
        assert peak < 20 * LENGTH * HEADS * WIDTH * 2  # queries, and what has their size


def test_a_ring_has_a_kernel_of_the_gpu() -> None:
    """A CPU's computes the entries of a document mask one by one, with copies in float32."""

    def kernel_of_ring() -> type[Any]:
        return type(context.ring_kernel(Model(), "cpu", torch.bfloat16))

    assert kernel_of_ring() is CpuKernel
    with as_on_gpu():
        assert kernel_of_ring() is CudaKernels
    assert kernel_of_ring() is CpuKernel


def test_muon_iterates_in_16_bits_on_a_gpu() -> None:
    """So its messages are half as large as a CPU's."""
    device = torch.device("cpu")
    assert muon.iteration_dtype(device) == torch.float32
    with as_on_gpu():
        assert muon.iteration_dtype(device) == torch.bfloat16
    assert muon.iteration_dtype(device) == torch.float32
