"""benchmark.py watch: what profiling a step now and then (`metrics.breakdown_interval`) takes from a run."""

import time
from functools import partial
from statistics import mean, median, stdev
from typing import TYPE_CHECKING

import torch

from torchllm.adapt.trial import build_trial, synthetic_batches
from torchllm.config.errors import UserError
from torchllm.metrics.step_profiler import StepProfiler
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import Runtime

from .tools import Tables, seconds_of, take_turns

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def watch(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """`steps` steps of which the first is profiled, split and gathered, and as many without, in turns."""
    device, settings, mesh = runtime.device, config.benchmark, build_mesh(config.parallel, runtime.device)
    if settings.rounds < 2 or not config.metrics.breakdown_interval:
        raise UserError("benchmark.py watch: needs 2 rounds or more, and metrics.breakdown_interval over 0")
    work = partial(build_trial(config, runtime, mesh).step, 1, synthetic_batches(config, mesh, device))
    profiler = StepProfiler(config.metrics.breakdown_interval, mesh, runtime.host_group, device)
    seconds_of(work, settings.warmup, device)
    between: list[int] = []

    def turn(profiling: bool) -> float:
        runtime.barrier()
        begun = time.perf_counter()
        if profiling:
            n = profiler.next
            with profiler.step(n):
                work()
            between.append(profiler.next - n)
        for _ in range(settings.steps - profiling):
            with profiler.step(0):  # not due
                work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    turn(True)  # the first profile is like no other
    between.clear()
    profiled, plain = take_turns([partial(turn, True), partial(turn, False)], settings.rounds)
    extra = [one - other for one, other in zip(profiled, plain, strict=True)]
    a_step = median(plain) / settings.steps
    run = mean(between) * a_step
    return {
        "a profiled step, over one that is not": [
            {
                "step_s": a_step,
                "extra_s": mean(extra),
                "standard_error_s": stdev(extra) / len(extra) ** 0.5,
                "steps_from_one_to_the_next": mean(between),
                "share_of_the_run": mean(extra) / run,
                "standard_error": stdev(extra) / len(extra) ** 0.5 / run,
            }
        ]
    }
