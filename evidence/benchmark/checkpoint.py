"""benchmark checkpoint: the time that a save takes from training, save and load beside torch's."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
from benchmark.tools import Tables, Work, ratio_row, scratch, seconds_of
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.state import model_tensors, optimizer_tensors
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import Runtime
from torchllm.tools.adapt.trial import build_trial, synthetic_batches

if TYPE_CHECKING:
    from benchmark.settings import BenchmarkConfig


class Round(NamedTuple):
    """One synchronous and one asynchronous save, a load, and both of torch.distributed.checkpoint."""

    synchronous_ms: float
    dcp_save_ms: float
    load_ms: float
    dcp_load_ms: float
    call_ms: float
    """duration of the asynchronous save's call"""
    slower_steps_ms: float
    """extra time of the steps until the checkpoint is there, in total"""
    step_ms: float
    """a step with no save under way"""
    step_beside_ms: float
    """a step while the checkpoint is written; where it was written before one ended, a step with none under way"""
    steps_beside: int
    """steps until the checkpoint is there"""

    @property
    def asynchronous_ms(self) -> float:
        """Time that the asynchronous save takes from training."""
        return self.call_ms + self.slower_steps_ms


def checkpoint(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Measure the time that a save takes from training: synchronous; asynchronous, by its call and slower steps.

    Also a synchronous save and a load beside those of torch.distributed.checkpoint, whose files have no sums.
    """
    device = runtime.device
    settings = config.benchmark
    mesh = build_mesh(config.parallel, device)
    stages, optimizer, take_step = build_trial(config, runtime, mesh)
    batches = synthetic_batches(config, mesh, device)

    def work() -> None:
        float(take_step(1, batches).loss)  # waits for the device

    def checkpointer(folder: Path, asynchronous: bool) -> Checkpointer:
        options = replace(config.checkpoint, keep=1, asynchronous=asynchronous)
        return Checkpointer(options, folder, stages, optimizer, host_group=runtime.host_group)

    seconds_of(work, settings.warmup, device)
    rounds = []
    with scratch(runtime) as folder:
        synchronous = checkpointer(folder / "synchronous", asynchronous=False)
        asynchronous = checkpointer(folder / "asynchronous", asynchronous=True)
        for number in range(1, settings.rounds + 1):
            step_seconds = median(seconds_of(work, settings.steps, device))
            synchronous_seconds = save_seconds(synchronous, number, runtime)
            state = {**model_tensors(stages), **optimizer_tensors(stages, optimizer)}
            dcp_folder = folder / "dcp" / str(number)
            dcp_save_seconds = call_seconds(partial(save, state, checkpoint_id=dcp_folder), runtime)
            load_seconds = call_seconds(checkpointer(folder / "synchronous", asynchronous=False).resume, runtime)
            dcp_load_seconds = call_seconds(partial(load, state, checkpoint_id=dcp_folder), runtime)
            if runtime.is_main:
                shutil.rmtree(dcp_folder)
            asynchronous_seconds = save_seconds(asynchronous, number, runtime)
            written = folder / "asynchronous" / "checkpoints" / f"step-{number:08d}"
            step_times = steps_until_written(work, asynchronous, written, runtime)
            rounds.append(
                Round(
                    synchronous_ms=1e3 * synchronous_seconds,
                    dcp_save_ms=1e3 * dcp_save_seconds,
                    load_ms=1e3 * load_seconds,
                    dcp_load_ms=1e3 * dcp_load_seconds,
                    call_ms=1e3 * asynchronous_seconds,
                    slower_steps_ms=1e3 * (sum(step_times) - len(step_times) * step_seconds),
                    step_ms=1e3 * step_seconds,
                    step_beside_ms=1e3 * (sum(step_times) / len(step_times) if step_times else step_seconds),
                    steps_beside=len(step_times),
                )
            )
        asynchronous.close()
    saves: dict[str, float] = {}
    for name in Round._fields:
        saves[name] = median(getattr(measured, name) for measured in rounds)
    synchronous_ms = [measured.synchronous_ms for measured in rounds]
    asynchronous_ms = [measured.asynchronous_ms for measured in rounds]
    call_ms = [measured.call_ms for measured in rounds]
    load_ms = [measured.load_ms for measured in rounds]
    return {
        "saves": [dict(saves)],
        "time taken from training": [
            ratio_row("asynchronous / synchronous", asynchronous_ms, synchronous_ms),
            ratio_row("its call / synchronous", call_ms, synchronous_ms),
        ],
        "beside torch.distributed.checkpoint": [
            ratio_row("save / dcp.save", synchronous_ms, [measured.dcp_save_ms for measured in rounds]),
            ratio_row("load / dcp.load", load_ms, [measured.dcp_load_ms for measured in rounds]),
        ],
    }


def save_seconds(checkpoints: Checkpointer, number: int, runtime: Runtime) -> float:
    """Return the seconds of the call to save checkpoint `number`."""
    return call_seconds(partial(checkpoints.save, number, {}), runtime)


def call_seconds(call: Callable[[], object], runtime: Runtime) -> float:
    """Return the seconds of a call on the slowest rank, which the others wait for."""

    def on_all_ranks() -> None:
        runtime.barrier()
        call()
        runtime.barrier()

    return seconds_of(on_all_ranks, 1, torch.device("cpu"))[0]


def steps_until_written(work: Work, checkpoints: Checkpointer, written: Path, runtime: Runtime) -> list[float]:
    """Take steps until the checkpoint is there; return the seconds of each.

    All ranks take the same number: they stop when rank 0 sees the checkpoint, or when any rank's save has failed.
    """
    seconds: list[float] = []
    while not runtime.should_stop(checkpoints.failed or (runtime.is_main and written.exists())):
        seconds += seconds_of(work, 1, runtime.device)
    runtime.should_stop()  # forgets that vote
    return seconds
