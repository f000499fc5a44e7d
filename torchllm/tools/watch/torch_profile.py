"""Reads torch's profiler; private names as in `torch_compat.py`."""

from typing import Any, NamedTuple

from torch.profiler import profile


class ProfiledEvent(NamedTuple):
    """An operator, kernel or annotation that the profiler recorded; times in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    thread: int
    """id of the thread that started it"""
    annotation: bool
    """a named part of the program (`record_function`), not an operator"""
    backward: bool
    """a node of autograd's graph, which contains its operators"""
    asynchronous: bool
    """runs in the background of the thread that started it, as gloo's collectives do"""
    kernel: bool
    """runs on the GPU"""
    launched: int
    """for a kernel, the time of its launch on the host; else `start`"""


def profiled_events(profiler: profile) -> list[ProfiledEvent]:
    """Return the records of a stopped profiler, unordered.

    Private: the public `profiler.events()` builds a tree of them with their memory, which takes ten times as long as a
    small step.
    """
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    raw_events: list[Any] = list(profiler.profiler.kineto_results.events())
    # The ids of operators are torch's, the ids of cudaLaunchKernel etc. are CUPTI's: both count from 1. A kernel
    # is linked to its operator, which itself is linked to nothing; torch's own parser makes the same distinction.
    launched = {}
    for event in raw_events:
        if not _on_gpu(event) and event.linked_correlation_id() == 0:
            launched[event.correlation_id()] = event.start_ns()
    events = []
    for event in raw_events:
        start, on_gpu = event.start_ns(), _on_gpu(event)
        if on_gpu and event.is_user_annotation():
            continue  # the host's annotation once more, on the GPU's time line
        events.append(
            ProfiledEvent(
                name=event.name(),
                start=start,
                end=start + event.duration_ns(),
                thread=event.start_thread_id(),
                annotation=event.is_user_annotation(),
                backward=event.scope() == BACKWARD_SCOPE,
                asynchronous=event.is_async(),
                kernel=on_gpu,
                launched=launched.get(event.linked_correlation_id(), start) if on_gpu else start,
            )
        )
    return events


def break_profile_cycle(profiler: profile) -> None:
    """Break the reference cycle of a stopped profile, so that it is freed with its last reference; it cannot restart.

    Private: torch does not document `action_map`, which holds methods of the profile and so makes it a reference cycle.
    A run collects cycles rarely, and a profile holds 1.4 KiB per event.
    """
    profiler.action_map.clear()


BACKWARD_SCOPE = 1
"""RecordScope::BACKWARD_FUNCTION in torch's C++"""


def _on_gpu(event: Any) -> bool:
    return event.device_type().name != "CPU"
