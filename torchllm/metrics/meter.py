"""Turns what a step returns into a record, at logged steps only; between them nothing waits for the device.

Keys of a record, one object a line in metrics.jsonl. "Interval": the steps since the last logged one. null: not known,
or not finite. A profiled step has a line of its own: breakdown/PART, the part's share of it (`metrics/breakdown.py`).

    step               the step, from 1
    loss               nats a target token, the mean over all target tokens of this step on all ranks
    validation_loss    the same over the held-out sequences; only on steps that were evaluated
    grad_norm          global norm of this step's gradient, before clipping
    learning_rate      of this step
    tokens             input tokens consumed since step 1 of the run, resumed or not
    tokens_per_second  input tokens of all ranks a second, over the interval
    step_seconds       mean over the interval, evaluation and checkpoints not counted
    data_seconds       mean wait of this rank for a batch, over the interval; part of step_seconds
    mfu                model FLOPs utilization, a fraction: tokens/s * (6 N + 12 L H Q S) / peak of all devices (PaLM)
    mfu_unmasked       the same, with only the attention that the causal and document masks leave
    hfu                mfu plus what is recomputed in the backward pass
    memory_gib         GPU: highest memory in live tensors since the start, on this rank; CPU: this process's resident
                       set (macOS: its highest so far)
    gpu/...            rank 0's GPU, with the package nvidia-ml-py (`metrics/device.py`)
    skipped_steps      steps of this process so far that were not applied: their loss or gradient was not finite

The first step of a process is always logged, alone: it has the initial loss, and its times hold what happens once
(compilation, allocation, kernel selection), so that no later record does.
"""

import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from torchllm.config import Metrics, Model, Recompute, Training
from torchllm.metrics.device import device_meter
from torchllm.metrics.goodput import Goodput
from torchllm.metrics.sinks import Record, Sink
from torchllm.metrics.step_profiler import ProfiledStep
from torchllm.runtime.phase import phase
from torchllm.spec.flops import device_peak_flops, flops_per_token, recomputed_flops_per_token

if TYPE_CHECKING:
    from torchllm.train.step import StepResult

log = logging.getLogger("torchllm")


class Meter:
    """Times the loop and writes records to the sinks. Every rank has one; only rank 0's has sinks.

    Make it right before the loop: its clock starts. `peak_flops`: FLOP/s of this rank's device (`peak_flops()` below),
    `world_size` of them are the peak. `sequences`: consumed before this process (a resumed run).
    """

    def __init__(
        self,
        config: Metrics,
        model: Model,
        recompute: Recompute,
        training: Training,
        *,
        device: torch.device,
        world_size: int,
        peak_flops: float | None,
        sinks: Sequence[Sink],
        goodput: Goodput | None = None,
        planned_mfu: float | None = None,
        sequences: int = 0,
    ) -> None:
        self.config, self.model, self.training, self.device = config, model, training, device
        self.peak = None if peak_flops is None else peak_flops * world_size
        self.sinks, self.goodput, self.sequences = sinks, goodput, sequences
        length = training.sequence_length
        self.gpu = device_meter(device) if sinks else None
        self.recomputed = recomputed_flops_per_token(model, recompute, length, training.loss_chunk)
        self.planned_mfu, self.profiled, self.first = planned_mfu, False, True
        self.lost: dict[str, float] = {}  # since the goodput was told
        self.pairs = torch.zeros((), dtype=torch.float64, device=device)
        self.step, self.total_data_wait = 0, 0.0
        self._start_interval()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Around the call that waits for the next batch."""
        start = time.perf_counter()
        try:
            with phase("data"):
                yield
        finally:
            seconds = time.perf_counter() - start
            self.waited += seconds
            self.total_data_wait += seconds
            self._lose("data", seconds)

    @contextmanager
    def pause(self, what: Literal["evaluate", "checkpoint"]) -> Iterator[None]:
        """Around an evaluation or a checkpoint: its time is no step's. Waits for the device at both ends."""
        self._synchronize()
        start = time.perf_counter()
        try:
            with phase(what):
                yield
        finally:
            self._synchronize()
            seconds = time.perf_counter() - start
            self.paused += seconds
            self._lose(what, seconds)

    def log(
        self,
        step: int,
        result: "StepResult",
        *,
        validation_loss: float | None = None,
        force: bool = False,
    ) -> Record | None:
        """Count a step; write and return its record if it is logged (the same steps on all ranks), else None.

        Logged are the first step of the process, every `log_interval`-th, the last, evaluated ones and forced ones.
        """
        self.steps += 1
        self.sequences += self.training.global_batch_size
        self.pairs = self.pairs + result.pairs
        due = step % self.config.log_interval == 0 or step == self.training.steps
        if not (due or self.first or validation_loss is not None or force):
            return None
        record = self._record(step, result)
        if validation_loss is not None:
            record["validation_loss"] = validation_loss
        self._write(step, record)
        self._account(step, record)
        self.first = False
        return record

    def report(self, profiled: ProfiledStep) -> None:
        """Write down a profiled step, if one was."""
        seconds = profiled.seconds
        parts: Record = {f"breakdown/{name}": part / seconds for name, part in profiled.parts.items()}
        self._write(profiled.step, {"step": profiled.step} | parts)
        if not self.profiled:
            tokens = self.training.global_batch_size * self.training.sequence_length
            mfu = self._utilization(tokens / seconds * flops_per_token(self.model, self.training.sequence_length))
            log.info("%s", profiled.describe(mfu, self.planned_mfu))
        self.profiled = True
        if profiled.slow:
            log.warning("step %d: %s", profiled.step, profiled.slow)

    def close(self) -> None:
        """Close the sinks."""
        for sink in self.sinks:
            sink.close()
        if self.step:
            self._tell(self.step)

    def _write(self, step: int, record: Record) -> None:
        for sink in self.sinks:
            sink.write(step, record)

    def _lose(self, cause: str, seconds: float) -> None:
        self.lost[cause] = self.lost.get(cause, 0.0) + seconds

    def _account(self, step: int, record: Record) -> None:
        """What the first step took beyond the next ones is compilation, warm-up and the like."""
        seconds = record["step_seconds"] or 0.0
        if self.first:
            self.first_seconds = seconds
        else:
            self._lose("compile", max(0.0, self.first_seconds - seconds))
            self.first_seconds = 0.0
        self._tell(step)

    def _tell(self, step: int) -> None:
        self.step = step
        if self.goodput is not None:
            for cause, seconds in self.lost.items():
                self.goodput.lose(cause, seconds)
            self.goodput.write(step)
        self.lost = {}

    def _record(self, step: int, result: "StepResult") -> Record:
        # One transfer for all of them: this is where a logged step waits for the device.
        read = [result.loss, result.grad_norm, result.skipped, self.pairs]
        loss, grad_norm, skipped, pairs = torch.stack([tensor.double() for tensor in read]).tolist()
        seconds = time.perf_counter() - self.started - self.paused
        length = self.training.sequence_length
        tokens = self.steps * self.training.global_batch_size * length
        tokens_per_second = tokens / seconds
        model_flops = flops_per_token(self.model, length)
        record: Record = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": result.learning_rate,
            "tokens": self.sequences * length,
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds / self.steps,
            "data_seconds": self.waited / self.steps,
            "mfu": self._utilization(tokens_per_second * model_flops),
            "mfu_unmasked": self._utilization(tokens_per_second * flops_per_token(self.model, length, pairs / tokens)),
            "hfu": self._utilization(tokens_per_second * (model_flops + self.recomputed)),
            "memory_gib": memory_gib(self.device),
            "skipped_steps": int(skipped),
        }
        if self.gpu is not None:
            record |= self.gpu.read()
        self._start_interval()
        return record

    def _start_interval(self) -> None:
        self.steps = 0
        self.pairs = torch.zeros_like(self.pairs)
        self.waited = 0.0
        self.paused = 0.0
        self.started = time.perf_counter()

    def _utilization(self, rate: float) -> float | None:
        return None if self.peak is None else rate / self.peak

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def memory_gib(device: torch.device) -> float:
    """Memory in GiB: a GPU's highest in live tensors since the start; on a CPU what this process has resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # macOS: bytes, and the highest so far


def peak_flops(device: torch.device, dtype: torch.dtype, ranks_on_node: int = 1) -> float | None:
    """FLOP/s that a rank's matrix products of `dtype` can reach at most; None where it is not known.

    A GPU's is its data sheet's: bfloat16, or float32 if TF32 is on (no tensor core computes in full float32: None). A
    CPU's is measured.
    """
    if device.type != "cuda":
        return measured_peak_flops(dtype, ranks_on_node)
    name = torch.cuda.get_device_name(device)
    if dtype == torch.bfloat16:
        return device_peak_flops(name, "bfloat16")
    return None if torch.get_float32_matmul_precision() == "highest" else device_peak_flops(name, "tf32")


def measured_peak_flops(dtype: torch.dtype = torch.float32, ranks_on_node: int = 1, seconds: float = 0.3) -> float:
    """FLOP/s of the fastest square matrix product that this process's threads were seen to run on this CPU.

    Sizes double from 256 until the next would not fit into `seconds`. Ranks of one machine share its cores: call it on
    all of them at once. Of more threads than cores each is seen with a core of its own, for a moment; it has its share.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    share = min(1.0, cores / (ranks_on_node * torch.get_num_threads()))
    best, size, end = 0.0, 256, time.perf_counter() + seconds
    while True:
        left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        torch.mm(left, right)
        fastest = min(_seconds(lambda a=left, b=right: torch.mm(a, b)) for _ in range(3))  # type: ignore[misc]
        best = max(best, 2 * size**3 / fastest)
        if time.perf_counter() + 4 * 8 * fastest > end:
            return best * share
        size *= 2


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
