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


class ForwardTimes(NamedTuple):
    """Times of all pipeline stages, the same on all ranks."""

    seconds: list[float]
    """of a forward of each stage, first to last"""
    noise: float
    """largest change of a stage's time from the first half of its measurement to the second, in seconds"""


class StageClock:
    """Times the forwards of this rank's pipeline stages, from its making to `gather`."""

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

    def gather(self, stages: int, group: dist.ProcessGroup) -> ForwardTimes:
        """Stop timing, and return the times of all `stages`: medians over the ranks of a stage. Call it on all ranks.

        The time of a stage on a rank is the median of its forwards, if it had two or more.
        """
        for hook in self.hooks:
            hook.remove()
        if self.on_gpu:
            torch.cuda.synchronize()
        local = np.full((stages, 2), np.nan)  # of the first half of the forwards, and of the second
        for index, forwards in self.forwards.items():
            seconds = [start.elapsed_time(stop) / 1000 if self.on_gpu else stop - start for start, stop in forwards]
            middle = len(seconds) // 2
            if middle:
                local[index] = median(seconds[:middle]), median(seconds[middle:])
        first_half, second_half = np.nanmedian(gather_records(local, group), axis=0).T  # of each stage
        return ForwardTimes(((first_half + second_half) / 2).tolist(), float(np.abs(first_half - second_half).max()))
