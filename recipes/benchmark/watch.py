"""benchmark watch: the cost of profiling a step now and then (`metrics.breakdown_interval`) in a run."""

import time
from functools import partial
from statistics import mean, median, stdev
from typing import TYPE_CHECKING

import torch

from torchllm.config.errors import UserError
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import Runtime
from torchllm.tools.adapt.trial import build_trial, synthetic_batches
from torchllm.tools.watch.step_profiler import StepProfiler

from .tools import Tables, seconds_of, take_turns

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def watch(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Time `steps` steps with the first one profiled, and the same number without a profile, in turns."""
    device = runtime.device
    settings = config.benchmark
    mesh = build_mesh(config.parallel, device)
    if settings.rounds < 2 or not config.metrics.breakdown_interval:
        raise UserError("benchmark watch: needs 2 rounds or more, and metrics.breakdown_interval over 0")
    take_step = build_trial(config, runtime, mesh).step
    work = partial(take_step, 1, synthetic_batches(config, mesh, device))
    profiler = StepProfiler(config.metrics.breakdown_interval, mesh, runtime.host_group, device)
    seconds_of(work, settings.warmup, device)
    intervals: list[int] = []
    """steps from each profile to the next one that is due"""

    def plain_steps(count: int) -> None:
        for _ in range(count):
            with profiler.step(0):  # step 0 is never due
                work()

    def profiled_turn() -> float:
        runtime.barrier()
        start = time.perf_counter()
        due = profiler.next
        with profiler.step(due):
            work()
        intervals.append(profiler.next - due)
        plain_steps(settings.steps - 1)
        return finish(start)

    def plain_turn() -> float:
        runtime.barrier()
        start = time.perf_counter()
        plain_steps(settings.steps)
        return finish(start)

    def finish(start: float) -> float:
        """Wait for the device; return the seconds since `start`."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    profiled_turn()  # the first profile sets the profiler up, and takes longer
    intervals.clear()
    profiled, plain = take_turns([profiled_turn, plain_turn], settings.rounds)
    extra = [slow - fast for slow, fast in zip(profiled, plain, strict=True)]
    standard_error = stdev(extra) / len(extra) ** 0.5
    step_seconds = median(plain) / settings.steps
    run_seconds = mean(intervals) * step_seconds
    return {
        "a profiled step, compared with one that is not": [
            {
                "step_s": step_seconds,
                "extra_s": mean(extra),
                "standard_error_s": standard_error,
                "steps_between_profiles": mean(intervals),
                "share_of_the_run": mean(extra) / run_seconds,
                "standard_error": standard_error / run_seconds,
            }
        ]
    }
