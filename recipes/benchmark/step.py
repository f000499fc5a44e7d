"""benchmark step: the training step against a bare loop."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from torchllm.config.errors import UserError
from torchllm.data.batch import Batch
from torchllm.metrics.meter import peak_flops
from torchllm.parallel.mesh import Mesh, build_mesh
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime
from torchllm.tools.adapt.trial import build_trial, synthetic_batches

from .tools import TableRow, Tables, Work, bare_loop, ratio_row, seconds_of, speed, take_turns, warmed_up

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def step(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Time torchllm's step and the bare loop, in turns."""
    mesh = build_mesh(config.parallel, runtime.device)
    if mesh.data_size != runtime.world_size:
        raise UserError("benchmark step: the bare loop is data parallel only; set the other degrees to 1")
    batches = synthetic_batches(config, mesh, runtime.device)
    bare_name = "bare loop" if runtime.world_size == 1 else "bare FSDP2"
    build_bare_loop = partial(bare_loop, config, runtime, mesh, batches)
    return compare_steps(config, runtime, mesh, batches, bare_name, build_bare_loop)


def compare_steps(
    config: "BenchmarkConfig",
    runtime: Runtime,
    mesh: Mesh,
    batches: Sequence[Batch],
    loop_name: str,
    build_loop: Callable[[], Work],
) -> Tables:
    """Time torchllm's step and another loop of the same model, in turns."""
    device = runtime.device
    settings = config.benchmark

    def build_library() -> Work:
        take_step = build_trial(config, runtime, mesh).step
        return partial(take_step, 1, batches)

    def turn(work: Work) -> float:
        """Return the median seconds of a few steps."""
        runtime.barrier()
        return median(seconds_of(work, settings.steps, device))

    library = warmed_up(build_library, settings.warmup, device)
    loop = warmed_up(build_loop, settings.warmup, device)
    library_seconds, loop_seconds = take_turns([partial(turn, library.work), partial(turn, loop.work)], settings.rounds)

    dtype = compute_dtype(config.training, device)
    peak_of_one = peak_flops(config.metrics, device, dtype, config.float8.is_on)
    peak = None if peak_of_one is None else peak_of_one * runtime.world_size
    rows: list[TableRow] = [
        {"loop": "torchllm", **speed(config, median(library_seconds), peak), "peak_memory_gib": library.peak_gib},
        {"loop": loop_name, **speed(config, median(loop_seconds), peak), "peak_memory_gib": loop.peak_gib},
    ]
    ratio = ratio_row(f"torchllm / {loop_name}", library_seconds, loop_seconds)
    return {"training step": rows, "step time": [ratio]}
