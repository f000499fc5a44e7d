"""Count the cost of a piece of work: lines of Python, memory. No clocks."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


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


def allocations(profiler: profile) -> list[int]:
    """Return the bytes of torch's allocations of host memory, and of its frees as negative numbers, in order.

    profiler: stopped, with `profile_memory=True`. Private: the public `profiler.events()` sums the memory of each
    operator, which hides a peak inside it.
    """
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]" and event.device_type() == DeviceType.CPU]
    return [event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]


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
