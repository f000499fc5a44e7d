"""Observes the steps that are profiled: their records, where the time of the first went, and slow ranks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchllm.config import Config
from torchllm.config.stages import of_span, span_of, spans_of
from torchllm.facts.flops import flops_per_token
from torchllm.metrics.observer import ObservedRun, Observer
from torchllm.metrics.sinks import Record

if TYPE_CHECKING:
    from torchllm.tools.watch.step_profiler import ProfiledStep, StepProfiler

log = logging.getLogger("torchllm")


class ProfiledSteps(Observer):
    """Profiles some steps (`metrics.breakdown_interval`, `metrics.profile_steps`); every rank has one.

    logs_first: log where the time of the first of them went.
    """

    def __init__(self, *, logs_first: bool = True) -> None:
        self.logs_first = logs_first
        self.profiler: StepProfiler | None = None

    def begin(self, run: ObservedRun) -> None:
        self.run = run
        self.has_described_a_step = False
        settings, runtime = run.config.metrics, run.runtime
        self.profiler = None
        interval = settings.breakdown_interval
        last = run.config.training.steps // interval * interval if interval else 0
        if last < run.start + 2 and not settings.profile_steps:  # the first step is like no other and is not profiled
            return
        from torchllm.tools.watch.step_profiler import StepProfiler  # its first profile takes a second

        traces = None
        if settings.profile_steps:
            from torchllm.tools.watch.trace import TraceWriter, parse_steps

            traces = TraceWriter(runtime.folder, parse_steps(settings.profile_steps), runtime.rank)
        self.profiler = StepProfiler(interval, run.mesh, runtime.host_group, runtime.device, traces, run.start)

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        if self.profiler is None:
            yield
            return
        with self.profiler.step(n):
            yield
        if self.profiler.latest is not None:
            self.report(self.profiler.latest)

    def report(self, profiled: "ProfiledStep") -> None:
        """Write the record of a profiled step; log the first, and every slow rank."""
        run, seconds = self.run, profiled.seconds
        parts: Record = {f"breakdown/{name}": part / seconds for name, part in profiled.parts.items()}
        run.meter.write(profiled.step, {"step": profiled.step} | parts)
        if self.logs_first and not self.has_described_a_step and run.runtime.is_main:
            config = of_span(run.config, span_of(spans_of(run.config.data, run.config.training), profiled.step))
            log.info("%s", profiled.describe(step_mfu(run, config, seconds)))
        self.has_described_a_step = True
        if profiled.slow is None:
            return
        log.warning("step %d: %s", profiled.step, profiled.slow)


def step_mfu(run: ObservedRun, config: Config, seconds: float) -> float | None:
    """Return the MFU of a step of a config that takes `seconds`; None where `Meter.utilization` is."""
    length = config.training.sequence_length
    flops = flops_per_token(config.model, length, trained=config.trained)
    return run.meter.utilization(config.training.global_batch_size * length / seconds * flops)
