"""Observes whether loaders are starved and stages uneven, and lets the run go on with another config if so."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from torchllm.config import Config
from torchllm.metrics.observer import Change, ObservedRun, Observer
from torchllm.tools.watch.bottlenecks import STARVED, STARVED_SECONDS, Bottlenecks, DataWaitClock

if TYPE_CHECKING:
    from torchllm.tools.watch.stage_times import StageClock

log = logging.getLogger("torchllm")

TIMED_STEPS = 5
"""steps that are timed to compare stages (after the first step), and before and after a change of the config"""


class Adaptation(Observer):
    """Measures this rank, and decides at checkpoints, the same on all ranks.

    adapt: returns the change of the config for some bottlenecks; default `adapter.change_config`. starved_seconds: a
    rank that waits less for data between two checkpoints has no starved loader.
    """

    def __init__(
        self,
        adapt: Callable[[Config, Bottlenecks], Change | None] | None = None,
        starved_seconds: float = STARVED_SECONDS,
    ) -> None:
        self.adapt = adapt
        self.starved_seconds = starved_seconds
        self.reason = ""
        """of the latest change"""
        self.seconds_before_change: float | None = None
        """of a step; None once the steps after the change were compared with it"""
        self.stage_clock: StageClock | None = None
        """until the stages are compared, once per config"""

    def begin(self, run: ObservedRun) -> None:
        self.run = run
        parallel, mesh = run.config.parallel, run.mesh
        self.data_wait_clock = DataWaitClock(run.runtime.host_group)
        self.stage_clock = None
        if parallel.rebalance and mesh.pp.size() > 1:
            from torchllm.facts.stages import stage_of_rank  # few runs have a pipeline
            from torchllm.tools.watch.stage_times import StageClock

            indices = stage_of_rank(parallel, mesh.pp.get_local_rank())
            self.stage_clock = StageClock(run.stages, indices, run.runtime.device)
        self.step_seconds: deque[float] = deque(maxlen=TIMED_STEPS + 2)
        self.steps = 0
        self.step_ended = time.perf_counter()

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        yield
        ended = time.perf_counter()
        self.step_seconds.append(ended - self.step_ended)
        self.step_ended = ended
        self.steps += 1
        if self.steps == TIMED_STEPS + 1:
            self._compare_with_before()

    def saved(self, n: int) -> Change | None:
        bottlenecks = self._bottlenecks()
        if self.adapt is None:
            if bottlenecks.data_wait is None and bottlenecks.stage_times is None:
                return None
            from torchllm.tools.adapt.adapter import change_config  # of no use without bottlenecks
            from torchllm.tools.adapt.balance import Rebalancer

            self.adapt = partial(change_config, Rebalancer())
        change = self.adapt(self.run.config, bottlenecks)
        if change is not None:
            self.reason, self.seconds_before_change = change.reason, self._usual_seconds()
        return change

    def _bottlenecks(self) -> Bottlenecks:
        run = self.run
        data_wait = self.data_wait_clock.longest(run.meter.total_data_wait)
        starved = data_wait.share > STARVED and data_wait.seconds > self.starved_seconds
        stage_times = None
        if self.stage_clock is not None and self.steps > TIMED_STEPS:
            stage_times = self.stage_clock.gather(run.config.parallel.stages, run.runtime.host_group)
            self.stage_clock = None
            log.info("forwards of the stages take %s s", ", ".join(f"{seconds:.3g}" for seconds in stage_times.seconds))
        return Bottlenecks(data_wait if starved else None, stage_times)

    def _usual_seconds(self) -> float:
        """Return the median time of the latest steps, without the first of a config: it compiles and allocates."""
        seconds = list(self.step_seconds)
        return median(seconds[1:] or seconds)

    def _compare_with_before(self) -> None:
        """Log how much faster the steps are after a change of the config."""
        old_seconds, seconds = self.seconds_before_change, self._usual_seconds()
        if old_seconds is not None:
            percent = 100 * (seconds / old_seconds - 1)
            log.info("%s: steps took %.3g s, now %.3g s (%+.0f %%)", self.reason, old_seconds, seconds, percent)
        self.seconds_before_change = None
