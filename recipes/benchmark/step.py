"""benchmark.py step: the training step against a bare loop."""

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from torchllm.adapt.trial import build_trial, synthetic_batches
from torchllm.config.errors import UserError
from torchllm.metrics.meter import peak_flops
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import Runtime, compute_dtype

from .tools import (
    Tables,
    Work,
    bare_loop,
    ratio_row,
    seconds_of,
    speed,
    take_turns,
    warmed_up,
)

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def step(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Our step and the bare loop, in turns."""
    device, settings, mesh = runtime.device, config.benchmark, build_mesh(config.parallel, runtime.device)
    if mesh.data_size != runtime.world_size:
        raise UserError("benchmark.py step: the bare loop is data parallel only; set the other degrees to 1")
    batches = synthetic_batches(config, mesh, device)
    builders: dict[str, Callable[[], Work]] = {
        "torchllm": lambda: partial(build_trial(config, runtime, mesh).step, 1, batches),
        "bare loop" if runtime.world_size == 1 else "bare FSDP2": lambda: bare_loop(config, runtime, mesh, batches),
    }
    loops = [warmed_up(build, settings.warmup, device) for build in builders.values()]

    def turn(work: Work) -> float:
        runtime.barrier()
        return median(seconds_of(work, settings.steps, device))

    times = take_turns([partial(turn, work) for work, _ in loops], settings.rounds)
    peak = peak_flops(device, compute_dtype(config.training, device), runtime.ranks_on_node)
    rows = [
        {"loop": name, **speed(config, median(seconds), peak and peak * runtime.world_size), "peak_memory_gib": gib}
        for name, seconds, (_, gib) in zip(builders, times, loops, strict=True)
    ]
    if settings.profile:
        with torch.profiler.profile() as profiler:
            seconds_of(loops[0][0], 3, device)
        order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        if runtime.is_main:
            print(profiler.key_averages().table(order, settings.profile, max_name_column_width=70), file=sys.stderr)
    return {"training step": rows, "step time": [ratio_row(" / ".join(builders), *times)]}
