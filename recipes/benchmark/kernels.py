"""benchmark kernels: how exact this device's attention kernels are, and which kernels they are.

Blocks: ring attention's kernels per block, forward and backward, against the eager kernel in float64 on a CPU with
the same numbers, for each width of a head and number of query heads per key-value head. The error is the largest
difference, relative to the largest element; `limit` is the check of a run with context parallelism before it starts.

Kernels: of a forward and backward of `model.attention` on this device, with and without documents. A kernel
whose name has "math" or "softmax" holds S x S scores in memory.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchllm.models.attention import CORES
from torchllm.parallel.attention_kernels import block_kernel
from torchllm.parallel.kernel_check import TOLERANCES, kernel_errors
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime

from .tools import TableRow, Tables

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

WIDTHS = (20, 64, 80, 128)
"""of a head; 20 is not a multiple of 8, which flash attention needs"""
GROUPS = (1, 4, 8)
"""query heads per key-value head"""


def kernels(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Compare the ring's blocks with float64, and list the kernels of `model.attention`."""
    blocks = list(block_rows(runtime.device))
    by_documents = [kernel_row(config, runtime, documents) for documents in (False, True)]
    return {"blocks of the ring": blocks, "kernels": by_documents}


def block_rows(device: torch.device) -> Iterator[TableRow]:
    """Yield a row per type, width and group: the error of the result that is furthest off."""
    for dtype, limit in TOLERANCES.items():
        for width in WIDTHS:
            for groups in GROUPS:
                row: TableRow = {"dtype": str(dtype).removeprefix("torch."), "width": width, "groups": groups}
                try:
                    kernel = block_kernel("sdpa", device.type)
                    errors = kernel_errors(kernel, device, groups, width, dtype, reference=torch.device("cpu"))
                    worst = max(errors, key=lambda result: math.inf if math.isnan(result.error) else result.error)
                    yield row | {"worst": worst.name, "error": worst.error, "limit": limit}
                except RuntimeError as error:
                    yield row | {"worst": str(error).splitlines()[0], "error": None, "limit": limit}


def kernel_row(config: "BenchmarkConfig", runtime: Runtime, documents: bool) -> TableRow:
    """Return the kernels (on a CPU: operators) that attention of this config's sizes runs, longest first."""
    model, length = config.model, config.training.sequence_length
    dtype = compute_dtype(config.training, runtime.device)
    core: Any = CORES[model.attention](model.window)
    ids = torch.arange(length, device=runtime.device).expand(1, length) // max(1, length // 3)
    heads = (1, length, model.heads, model.head_width)
    key_heads = (1, length, model.kv, model.head_width)
    q, k, v = (
        torch.randn(shape, device=runtime.device, dtype=dtype, requires_grad=True)
        for shape in (heads, key_heads, key_heads)
    )
    with torch.profiler.profile() as profiler:
        core(q, k, v, core.mask(ids if documents else None)).sum().backward()
    place = runtime.device.type.upper()
    events = [event for event in profiler.key_averages() if event.device_type.name == place]
    events.sort(key=lambda event: event.self_device_time_total or event.self_cpu_time_total, reverse=True)
    names = [event.key for event in events if "attention" in event.key or "fmha" in event.key or "flash" in event.key]
    return {
        "attention": model.attention,
        "documents": "yes" if documents else "no",
        "kernels": ", ".join(names) or ", ".join(event.key for event in events[:5]),
    }
