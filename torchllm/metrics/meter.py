"""Turns what a step returns into a record, at logged steps only; between them nothing waits for the device.

Keys of a record, one object a line in metrics.jsonl. "Interval": the steps since the last logged one. null: not known,
or not finite.

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
    skipped_steps      steps of this process so far that were not applied: their loss or gradient was not finite

The first step of a process is always logged, alone: it has the initial loss, and its times hold what happens once
(compilation, allocation, kernel selection), so that no later record does.
"""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchllm.config import Metrics, Model, Recompute, Training
from torchllm.metrics.flops import device_peak_flops, flops_per_token, recomputed_flops_per_token
from torchllm.metrics.sinks import Record, Sink

if TYPE_CHECKING:
    from torchllm.train_step import StepResult


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
        sequences: int = 0,
    ) -> None:
        self.config, self.model, self.training, self.device = config, model, training, device
        self.peak = None if peak_flops is None else peak_flops * world_size
        self.sinks, self.sequences = sinks, sequences
        length = training.sequence_length
        self.recomputed = recomputed_flops_per_token(model, recompute, length, training.loss_chunk)
        self.first = True
        self.pairs = torch.zeros((), dtype=torch.float64, device=device)
        self._start_interval()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Around the call that waits for the next batch."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - start

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around an evaluation or a checkpoint: its time is no step's. Waits for the device at both ends."""
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self.paused += time.perf_counter() - start

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
        self.first = False
        record = self._record(step, result)
        if validation_loss is not None:
            record["validation_loss"] = validation_loss
        for sink in self.sinks:
            sink.write(step, record)
        return record

    def close(self) -> None:
        """Close the sinks."""
        for sink in self.sinks:
            sink.close()

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


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that a rank's matrix products of `dtype` can reach at most; None where it is not known.

    A GPU's is its data sheet's: bfloat16, or float32 if TF32 is on (no tensor core computes in full float32: None). A
    CPU's is measured.
    """
    if device.type != "cuda":
        return measured_peak_flops(dtype)
    name = torch.cuda.get_device_name(device)
    if dtype == torch.bfloat16:
        return device_peak_flops(name, "bfloat16")
    return None if torch.get_float32_matmul_precision() == "highest" else device_peak_flops(name, "tf32")


def measured_peak_flops(dtype: torch.dtype = torch.float32, seconds: float = 0.3) -> float:
    """FLOP/s of the fastest square matrix product that this process's threads were seen to run on this CPU.

    Sizes double from 256 until the next would not fit into `seconds`. Ranks of one machine share its cores: call it on
    all of them at once, so that each measures its share and their sum is the machine's.
    """
    best, size, end = 0.0, 256, time.perf_counter() + seconds
    while True:
        left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        torch.mm(left, right)
        fastest = min(_seconds(lambda a=left, b=right: torch.mm(a, b)) for _ in range(3))  # type: ignore[misc]
        best = max(best, 2 * size**3 / fastest)
        if time.perf_counter() + 4 * 8 * fastest > end:
            return best
        size *= 2


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
