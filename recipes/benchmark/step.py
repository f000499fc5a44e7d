"""benchmark step: the training step against a bare loop."""

import sys
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from torchllm.adapt.trial import build_trial, synthetic_batches
from torchllm.config.errors import UserError
from torchllm.metrics.meter import peak_flops
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import Runtime, compute_dtype

from .tools import TableRow, Tables, Work, bare_loop, ratio_row, seconds_of, speed, take_turns, warmed_up

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def step(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Time torchllm's step and the bare loop, in turns."""
    device = runtime.device
    settings = config.benchmark
    mesh = build_mesh(config.parallel, device)
    if mesh.data_size != runtime.world_size:
        raise UserError("benchmark step: the bare loop is data parallel only; set the other degrees to 1")
    batches = synthetic_batches(config, mesh, device)

    def build_build_trial() -> Work:
        take_step = build_trial(config, runtime, mesh).step
        return partial(take_step, 1, batches)

    def build_bare_loop() -> Work:
        return bare_loop(config, runtime, mesh, batches)

    def turn(work: Work) -> float:
        """Return the median seconds of a few steps."""
        runtime.barrier()
        return median(seconds_of(work, settings.steps, device))

    bare_name = "bare loop" if runtime.world_size == 1 else "bare FSDP2"
    library = warmed_up(build_build_trial, settings.warmup, device)
    bare = warmed_up(build_bare_loop, settings.warmup, device)
    library_seconds, bare_seconds = take_turns([partial(turn, library.work), partial(turn, bare.work)], settings.rounds)

    dtype = compute_dtype(config.training, device)
    peak_of_one = peak_flops(device, dtype, runtime.ranks_on_node, config.float8.is_on)
    peak = None if peak_of_one is None else peak_of_one * runtime.world_size
    rows: list[TableRow] = [
        {"loop": "torchllm", **speed(config, median(library_seconds), peak), "peak_memory_gib": library.peak_gib},
        {"loop": bare_name, **speed(config, median(bare_seconds), peak), "peak_memory_gib": bare.peak_gib},
    ]
    if settings.profile:
        list_operators(library.work, runtime, settings.profile)
    return {
        "training step": rows,
        "step time": [ratio_row(f"torchllm / {bare_name}", library_seconds, bare_seconds)],
    }


def list_operators(work: Work, runtime: Runtime, count: int) -> None:
    """Profile three steps and print the `count` operators that take most time, on stderr of rank 0."""
    with torch.profiler.profile() as profiler:
        seconds_of(work, 3, runtime.device)
    order = "self_device_time_total" if runtime.device.type == "cuda" else "self_cpu_time_total"
    if runtime.is_main:
        print(profiler.key_averages().table(order, count, max_name_column_width=70), file=sys.stderr)
