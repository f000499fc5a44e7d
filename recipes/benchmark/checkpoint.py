"""benchmark.py checkpoint: what a save takes from training."""

from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from torchllm.adapt.trial import build_trial, synthetic_batches
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import Runtime

from .tools import Tables, ratio_row, scratch, seconds_of

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def checkpoint(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """What a save takes from training: all of a synchronous one; of an asynchronous one its call and slower steps."""
    device, settings, mesh = runtime.device, config.benchmark, build_mesh(config.parallel, runtime.device)
    stages, optimizer, take_step = build_trial(config, runtime, mesh)
    batches = synthetic_batches(config, mesh, device)

    def work() -> None:
        float(take_step(1, batches).loss)  # waits for the device

    def save(checkpoints: Checkpointer, number: int) -> None:
        runtime.barrier()
        checkpoints.save(number, {})
        runtime.barrier()  # the slowest rank's: the others would wait for it in the next step

    seconds_of(work, settings.warmup, device)
    names = ("synchronous_ms", "call_ms", "slower_steps_ms", "step_ms", "step_beside_ms", "steps_beside")
    found: dict[str, list[float]] = {name: [] for name in names}
    with scratch(runtime) as folder:
        synchronous, background = (
            Checkpointer(
                replace(config.checkpoint, keep=1, asynchronous=asynchronous),
                folder / str(asynchronous),
                stages,
                optimizer,
                host_group=runtime.host_group,
            )
            for asynchronous in (False, True)
        )
        for number in range(1, settings.rounds + 1):
            saves, beside = [], list[float]()
            free = seconds_of(work, settings.steps, device)
            for kind in (synchronous, background):
                saves += [1e3 * seconds for seconds in seconds_of(partial(save, kind, number), 1, torch.device("cpu"))]
            written = folder / "True" / "checkpoints" / f"step-{number:08d}"
            # All ranks take as many steps: they stop when rank 0 sees the checkpoint, or any that it will not come.
            while not runtime.should_stop(background.failed or (runtime.is_main and written.exists())):
                beside += seconds_of(work, 1, device)
            runtime.should_stop()  # forgets that vote
            free_ms, beside_ms = median(free) * 1e3, sum(beside) * 1e3
            row = (*saves, beside_ms - len(beside) * free_ms, free_ms, beside_ms / len(beside), len(beside))
            for name, value in zip(names, row, strict=True):
                found[name].append(value)
        background.close()
    added = [call + slower for call, slower in zip(found["call_ms"], found["slower_steps_ms"], strict=True)]
    return {
        "saves": [{name: median(values) for name, values in found.items()}],
        "time taken from training": [
            ratio_row("asynchronous / synchronous", added, found["synchronous_ms"]),
            ratio_row("its call / synchronous", found["call_ms"], found["synchronous_ms"]),
        ],
    }
