"""Measures two reasons for slow steps, so that every rank has the same figures: a starved loader, uneven stages.

They are asked for at checkpoints. What is done about them is decided elsewhere (`torchllm/tools/adapt`).
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torchllm.tools.launch.records import gather_records

STARVED = 0.05
"""a loader is starved if a rank waits for it for more than this share of the time"""
STARVED_SECONDS = 5.0
"""and for more than this: less is not worth a new start of the loader"""


class DataWait(NamedTuple):
    """How long the rank that waited longest has waited for data."""

    rank: int
    seconds: float
    elapsed: float
    """seconds in which it did so, by that rank's clock"""

    @property
    def share(self) -> float:
        """Fraction of the time."""
        return self.seconds / self.elapsed


class DataWaitClock:
    """Compares the ranks' waits for data from one call of `longest` to the next."""

    def __init__(self, host_group: dist.ProcessGroup) -> None:
        self.host_group = host_group
        self.started = time.perf_counter()
        self.total = 0.0

    def longest(self, total: float) -> DataWait:
        """Return the longest wait since the last call. Call it on all ranks.

        total: seconds that this rank has waited for data since the clock was made.
        """
        called = time.perf_counter()
        waited = total - self.total, called - self.started
        self.total, self.started = total, called
        # FOOTGUN: decide from gathered figures only. A decision by this rank's own clock would differ between ranks,
        # and the run would hang.
        waits = gather_records(np.array(waited), self.host_group)  # (ranks, 2)
        rank = int(np.argmax(waits[:, 0]))
        seconds, elapsed = waits[rank].tolist()
        return DataWait(rank, seconds, elapsed)


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


def gather_stage_times(times: dict[int, ForwardSeconds], stages: int, group: dist.ProcessGroup) -> ForwardTimes:
    """Return the times of all `stages`: medians over the ranks that hold the same stage. times: of this rank's."""
    local = np.full((stages, 2), np.nan)
    for index, forward in times.items():
        local[index] = forward
    first_half, second_half = np.nanmedian(gather_records(local, group), axis=0).T  # of each stage
    return ForwardTimes(((first_half + second_half) / 2).tolist(), float(np.abs(first_half - second_half).max()))


class Bottlenecks(NamedTuple):
    """What has slowed the run down since its last checkpoint; the same on all ranks."""

    data_wait: DataWait | None
    """the longest wait for data, if the loader is starved"""
    stage_times: ForwardTimes | None
    """of the forwards of the pipeline's stages, once they were measured (`parallel.rebalance`)"""
