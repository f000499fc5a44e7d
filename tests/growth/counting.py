"""Count the cost of a piece of work: lines of Python, memory, operations of torch. No clocks."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from torchllm.tools.launch.torch_records import allocations


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python `work` executes, including libraries."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(tracing)
    return lines


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that `work` holds in tensors and workspaces of the CPU at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = peak = 0
    for size in allocations(profiler):
        held += size
        peak = max(peak, held)
    return peak


def host_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that `work` holds in objects of Python and numpy at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class OperationCounter(TorchDispatchMode):
    """Counts the operations of torch that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))
