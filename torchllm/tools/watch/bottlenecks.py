"""Two reasons for slow steps: a starved loader, which is measured here, and uneven stages (`stage_times.py`).

Every rank has the same figures. They are read at checkpoints, by `torchllm/tools/adapt`, which decides how to react.
"""

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch.distributed as dist

from torchllm.tools.launch.records import gather_records

if TYPE_CHECKING:  # few runs compare their stages
    from torchllm.tools.watch.stage_times import ForwardTimes

STARVED = 0.05
"""a loader is starved if a rank waits for it for more than this share of the time"""
STARVED_SECONDS = 5.0
"""and for more than this: less is not worth a new start of the loader"""


class DataWait(NamedTuple):
    """How long the rank that waited longest has waited for data."""

    rank: int
    seconds: float
    elapsed: float
    """seconds of the period, by that rank's clock"""

    @property
    def share(self) -> float:
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


class Bottlenecks(NamedTuple):
    """The causes of slow steps since the last checkpoint; the same on all ranks."""

    data_wait: DataWait | None
    """the longest wait for data, if the loader is starved"""
    stage_times: "ForwardTimes | None"
    """of the forwards of the pipeline's stages, once they were measured (`parallel.rebalance`)"""
