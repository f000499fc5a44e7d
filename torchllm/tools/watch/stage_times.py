"""Times the forwards of pipeline stages, so that every rank has the same figures (`parallel.rebalance`)."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torchllm.tools.launch.records import gather_records


class ForwardSeconds(NamedTuple):
    """Times of a stage's forward: the median of the first half of those measured, and of the second."""

    first_half: float
    second_half: float


class ForwardTimes(NamedTuple):
    """Times of all pipeline stages, the same on all ranks."""

    seconds: list[float]
    """of a forward of each stage, first to last"""
    noise: float
    """seconds by which the time of a stage has changed most from the first half of its measurement to the second"""


class StageClock:
    """Times the forwards of this rank's pipeline stages, from its making to `close`."""

    def __init__(self, stages: Sequence[nn.Module], indices: Sequence[int], device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.starts: dict[int, Any] = {}
        self.forwards: dict[int, list[tuple[Any, Any]]] = {index: [] for index in indices}
        self.hooks = []
        for index, stage in zip(indices, stages, strict=True):
            self.hooks.append(stage.register_forward_pre_hook(lambda *_, index=index: self._start(index)))
            self.hooks.append(stage.register_forward_hook(lambda *_, index=index: self._stop(index)))

    def _now(self) -> Any:
        """Return seconds on a CPU, an event of the current stream on a GPU."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start(self, index: int) -> None:
        self.starts[index] = self._now()

    def _stop(self, index: int) -> None:
        self.forwards[index].append((self.starts[index], self._now()))

    def seconds(self) -> dict[int, ForwardSeconds]:
        """Return the times of each stage that had two forwards or more, by global index of the stage."""
        if self.on_gpu:
            torch.cuda.synchronize()
        times = {}
        for index, forwards in self.forwards.items():
            seconds = [self._elapsed(start, stop) for start, stop in forwards]
            middle = len(seconds) // 2
            if middle:
                times[index] = ForwardSeconds(median(seconds[:middle]), median(seconds[middle:]))
        return times

    def _elapsed(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop) / 1000 if self.on_gpu else stop - start)

    def close(self) -> None:
        """Stop timing: remove the hooks from the stages."""
        for hook in self.hooks:
            hook.remove()

    def gather(self, stages: int, group: dist.ProcessGroup) -> ForwardTimes:
        """Stop timing, and return the times of all `stages`. Call it on all ranks."""
        self.close()
        return gather_stage_times(self.seconds(), stages, group)


def gather_stage_times(times: dict[int, ForwardSeconds], stages: int, group: dist.ProcessGroup) -> ForwardTimes:
    """Return the times of all `stages`: medians over the ranks that hold the same stage. times: of this rank's."""
    local = np.full((stages, 2), np.nan)
    for index, forward in times.items():
        local[index] = forward
    first_half, second_half = np.nanmedian(gather_records(local, group), axis=0).T  # of each stage
    return ForwardTimes(((first_half + second_half) / 2).tolist(), float(np.abs(first_half - second_half).max()))
