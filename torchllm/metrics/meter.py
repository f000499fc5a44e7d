"""Turns the result of a step into a record, in logged steps only; between them nothing waits for the device.

Keys of a record, which is one line of metrics.jsonl. "Interval": the steps since the last logged one. null: unknown, or
not finite. A profiled step has a separate line: breakdown/PART, the part's share of the step (`breakdown.py`). So has
an evaluation of tasks: tasks/TASK/METRIC.

    step               the step, from 1
    loss               nats per target token, the mean over all target tokens of this step on all ranks
    validation_loss    the same over the held-out sequences; only in steps with an evaluation
    validation_bits_per_byte
                       the loss of the held-out tokens that stand for text, without special tokens, in bits per byte of
                       it: comparable between tokenizers; with validation_loss, unless the sources are random tokens
    validation_loss/SOURCE, validation_bits_per_byte/SOURCE
                       both of each source, if several are evaluated on
    z_loss             training.z_loss times the mean squared log-sum-exp of the target tokens' logits, which the loss
                       does not contain; only with that key
    mtp_loss           nats per target token, the mean of the tokens further ahead, which the loss does not contain;
                       only with model.mtp_depth
    grad_norm          global norm of this step's gradient, before clipping
    learning_rate      learning rate of this step
    tokens             input tokens consumed since step 1 of the run, resumed or not
    tokens_per_second  input tokens of all ranks per second, over the interval
    targets_per_second target tokens of all ranks per second, over the interval: in fine-tuning, the trained ones
    step_seconds       mean over the interval, without evaluation and checkpoints
    data_seconds       mean wait of this rank for a batch, over the interval; part of step_seconds
    mfu                model FLOPs utilization, a fraction: tokens/s * (6 N + 12 L H Q S) / peak of all devices (PaLM);
                       N are all parameters, and of experts those that a token uses; null where the peak is unknown
                       (of a CPU, without metrics.peak_tflops), and over 1;
                       with [float8] the peak is float8's, twice the bfloat16 peak; with updates of frozen weights
                       4 N + 6 n instead of 6 N, n being the trained parameters
    mfu_unmasked       the same, counting only the attention that the causal and document masks leave
    hfu                mfu plus the FLOPs that are recomputed in the backward pass
    memory_gib         GPU: highest memory in live tensors since the start, on this rank; CPU: this process's resident
                       set (macOS: its highest so far)
    memory_reserved_gib
                       GPU: highest memory that torch's allocator has taken from the driver: this must fit
    allocation_retries GPU: how often the allocator had to free unused memory, and to wait for the device
    experts/largest_load
                       tokens of the expert that had most in this step, as a multiple of the mean of its block; of the
                       block where that is largest. 1: all experts have the same number
    experts/entropy    of a token's scores, as a share of ln E: 1: they are equal, 0: they are one expert's
    experts/dead       experts, over all blocks, that no token of this step used
    experts/dropped_tokens
                       0: none ever is
    experts/balance_loss, experts/router_z_loss
                       the penalties of model.balance_loss and router_z_loss with their weight, which the loss does not
                       contain; only with these keys. Tokens per expert are in experts.jsonl
    experts/padding    share of the rows that ranks sent to experts in this step that is padding; with
                       parallel.expert_dispatch = "optimistic"
    experts/repeated_steps
                       steps of this process so far that ran twice, as rows did not fit; with the same key
    gpu/busy           rank 0's GPU, by its driver (needs the package nvidia-ml-py): share of the driver's last sample
                       period during which a kernel ran
    gpu/watts          its power
    gpu/mhz            clock of its multiprocessors; it falls when the GPU is too hot or over its power limit
    gpu/celsius        its temperature
    skipped_steps      steps of this process so far that were not applied: their loss or gradient was not finite

The first step of a process is always logged, alone: it has the initial loss, and its times hold what happens once
(compilation, allocation, kernel selection), so that no later record does.
"""

import logging
import math
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchllm.config import Metrics, Model, TrainedParameters, Training
from torchllm.facts.flops import ALL_TRAINED, flops_per_token
from torchllm.metrics.console import Console
from torchllm.metrics.sinks import Record, Sink
from torchllm.runtime.heartbeat import phase
from torchllm.runtime.signs_of_life import signs_of_life

if TYPE_CHECKING:
    from torchllm.metrics.expert_load import ExpertLoads
    from torchllm.train.step import StepResult

log = logging.getLogger("torchllm")


class Meter:
    """Times the loop and writes records to the sinks. Every rank has one; only rank 0's has sinks.

    Its clock starts when it is made, or when `start_interval` is called: right before the loop.
    """

    def __init__(
        self,
        config: Metrics,
        model: Model,
        recomputed: Callable[[int], int],
        training: Training,
        *,
        device: torch.device,
        world_size: int,
        peak_flops: float | None,
        sinks: Sequence[Sink],
        check_owner: Callable[[], None] = lambda: None,
        console: Console | None = None,
        spend: Callable[[str, float], None] = lambda cause, seconds: None,
        tokens: int = 0,
        trained: TrainedParameters = ALL_TRAINED,
        loads_file: Sink | None = None,
    ) -> None:
        """recomputed: FLOPs of recomputation per token, by the length of sequences. peak_flops: FLOP/s of this rank's
        device (`peak_flops()` below). tokens: read before. trained: decides how many gradients there are.

        check_owner: raises if another job owns the run folder by now; called before anything is written. spend: called
        with a cause and seconds that were no step's.
        sinks, console and loads_file, which gets the tokens per expert: rank 0's; none of them raises (`TolerantSink`).
        """
        self.config = config
        self.model = model
        self.training = training
        self.device = device
        self.peak = None if peak_flops is None else peak_flops * world_size
        self.sinks = list(sinks)
        self.check_owner = check_owner
        self.console = console
        self.spend = spend
        self.tokens = tokens
        self.trained = trained
        self.recomputed = recomputed
        self.loads_file = loads_file
        self.loads: ExpertLoads | None = None
        """of the experts, in the last logged step"""
        self.first = True
        """no step was logged yet"""
        self.first_seconds: float | None = None
        """of the first step without its wait for data, until it is compared with the next ones"""
        self.pairs = torch.zeros((), dtype=torch.float64, device=device)
        self.targets = torch.zeros((), dtype=torch.float64, device=device)
        self.total_data_wait = 0.0
        self.start_interval()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Return a context around the call that waits for the next batch."""
        start = time.perf_counter()
        try:
            with phase("data"):
                yield
        finally:
            seconds = time.perf_counter() - start
            self.data_wait_seconds += seconds
            self.total_data_wait += seconds
            self.spend("data", seconds)

    @contextmanager
    def pause(self, cause: Literal["evaluate", "checkpoint"]) -> Iterator[None]:
        """Return a context around work whose time is not the step's.

        It waits for the device at both ends.
        """
        self._synchronize()
        start = time.perf_counter()
        try:
            with phase(cause), self._shown(cause):
                yield
        finally:
            self._synchronize()
            seconds = time.perf_counter() - start
            self.paused_seconds += seconds
            self.spend(cause, seconds)

    @contextmanager
    def _shown(self, cause: str) -> Iterator[None]:
        """Return a context that shows the user that the run is busy with `cause`."""
        if self.console is None:
            yield
            return
        with self.console.aside(cause), signs_of_life(cause):
            yield

    def log(
        self,
        step: int,
        result: "StepResult",
        *,
        validation_loss: float | None = None,
        force: bool = False,
        extra: Mapping[str, float | torch.Tensor] | None = None,
    ) -> Record | None:
        """Count a step; write and return its record if it is logged (the same steps on all ranks), else None.

        Logged are the first step of the process, every `log_interval`-th, the last, evaluated ones and forced ones.
        `extra`: values that a forked recipe adds to the record; rank 0's are written. A tensor () is read in a logged
        step only, so it may be on the device. ValueError if the record has one of its keys.
        """
        self.steps += 1
        length = result.length or self.training.sequence_length
        self.tokens_of[length] += length * (result.sequences or self.training.global_batch_size)
        self.pairs = self.pairs + result.pairs
        self.targets = self.targets + result.tokens
        due = step % self.config.log_interval == 0 or step == self.training.steps
        if not (due or self.first or validation_loss is not None or force):
            return None
        record = self._record(step, result)
        if validation_loss is not None:
            by_source = getattr(validation_loss, "by_source", {})  # a fork may give another kind of loss
            for name, loss in {"": validation_loss, **{f"/{name}": loss for name, loss in by_source.items()}}.items():
                record[f"validation_loss{name}"] = loss
                bits = getattr(loss, "bits_per_byte", None)
                if bits is not None:
                    record[f"validation_bits_per_byte{name}"] = bits
        for key, value in (extra or {}).items():
            if key in record:
                raise ValueError(f"the record has {key} already: choose another name")
            record[key] = float(value)
        self.write(step, record)
        self._charge_compilation(record)
        self.first = False
        return record

    def close(self) -> None:
        """Close the sinks, the file of expert loads and the console."""
        for sink in self.sinks:
            sink.close()
        if self.loads_file is not None:
            self.loads_file.close()
        if self.console is not None:
            self.console.close()

    def write(self, step: int, record: Record) -> None:
        """Write a record to the sinks and the console."""
        self.check_owner()
        for sink in self.sinks:
            sink.write(step, record)
        if self.console is not None:
            self.console.write(step, record)

    def _charge_compilation(self, record: Record) -> None:
        """Charge the time of the first step beyond the next one's: compilation, allocation, warm-up."""
        # Without the wait for data, which is long in a first step, and already charged to "data".
        seconds = (record["step_seconds"] or 0.0) - (record["data_seconds"] or 0.0)
        if self.first:
            self.first_seconds = seconds
        elif self.first_seconds is not None:
            self.spend("compile", max(0.0, self.first_seconds - seconds))
            self.first_seconds = None

    def _record(self, step: int, result: "StepResult") -> Record:
        # One transfer for all values: this is where a logged step waits for the device, so the clock is read after it.
        others = {name: loss for name in ("z_loss", "mtp_loss") if (loss := getattr(result, name)) is not None}
        tensors = [result.loss, result.grad_norm, result.skipped, self.pairs, self.targets, *others.values()]
        scalars = torch.stack([tensor.double() for tensor in tensors])
        routing = [] if result.routing is None else [result.routing.packed().to(scalars.device)]
        values = torch.cat((scalars, *routing)).tolist()
        loss, grad_norm, skipped, pairs, targets, *other_losses = values[: len(tensors)]
        seconds = time.perf_counter() - self.interval_started - self.paused_seconds
        tokens = self.tokens_of.total()
        self.tokens += tokens
        tokens_per_second = tokens / seconds
        of_length = {length: share / tokens for length, share in self.tokens_of.items()}
        flops = partial(flops_per_token, self.model, trained=self.trained)
        model_flops = sum(share * flops(length) for length, share in of_length.items())
        unmasked_flops = sum(share * flops(length, pairs=pairs / tokens) for length, share in of_length.items())
        recomputed = sum(share * self.recomputed(length) for length, share in of_length.items())
        record: Record = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": result.learning_rate,
            "tokens": self.tokens,
            "tokens_per_second": tokens_per_second,
            "targets_per_second": targets / seconds,
            "step_seconds": seconds / self.steps,
            "data_seconds": self.data_wait_seconds / self.steps,
            "mfu": self.utilization(tokens_per_second * model_flops),
            "mfu_unmasked": self.utilization(tokens_per_second * unmasked_flops),
            "hfu": self.utilization(tokens_per_second * (model_flops + recomputed)),
            "memory_gib": memory_gib(self.device),
            "skipped_steps": int(skipped),
        }
        record |= dict(zip(others, other_losses, strict=True))
        if result.routing is not None:
            from torchllm.metrics.expert_load import unpack  # few models have experts

            self.loads = unpack(values[len(tensors) :], result.routing)
            record |= self.loads.as_record()
            self._write_loads(step, self.loads)
        if result.padding is not None:
            record |= {"experts/padding": result.padding.share, "experts/repeated_steps": result.padding.repeated}
        if self.device.type == "cuda":
            record |= allocator_record(self.device)
            if self.sinks:
                record |= read_gpu(self.device)
        self.start_interval()
        return record

    def _write_loads(self, step: int, loads: "ExpertLoads") -> None:
        """Write the tokens per expert: on rank 0."""
        if self.loads_file is not None:
            self.check_owner()
            blocks = zip(self.model.sparse_blocks, loads.tokens, strict=True)
            tokens: dict[str, Any] = {f"layers.{block}": tokens_of_block for block, tokens_of_block in blocks}
            self.loads_file.write(step, {"step": step} | tokens)

    def start_interval(self) -> None:
        """Start the clock of the steps up to the next logged one."""
        self.steps = 0
        self.tokens_of = Counter[int]()
        """tokens, by the length of their sequences"""
        self.pairs = torch.zeros_like(self.pairs)
        self.targets = torch.zeros_like(self.targets)
        self.data_wait_seconds = 0.0
        self.paused_seconds = 0.0
        self.interval_started = time.perf_counter()

    def utilization(self, flops_per_second: float) -> float | None:
        """Return the share of the peak; None without a peak, or over 1.

        Then the peak is wrong, or documents are so short that most of the attention that PaLM's MFU counts is masked.
        """
        share = math.inf if self.peak is None else flops_per_second / self.peak
        return share if share <= 1 else None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def memory_gib(device: torch.device) -> float:
    """Return GiB, or nan: a GPU's highest memory in live tensors since the start; on a CPU the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "linux":
        with suppress(OSError):  # no descriptor is left, or /proc is hidden
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # macOS: bytes, and the highest so far


def allocator_record(device: torch.device) -> Record:
    """Return the peak memory that a GPU's allocator has reserved, and the number of its retries, since the start."""
    return {
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "allocation_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }


def read_gpu(device: torch.device) -> dict[str, float]:
    """Return the current values of a GPU by key, without those that cannot be read, e.g. of a virtual GPU."""
    readings = {
        "gpu/busy": lambda: torch.cuda.utilization(device) / 100,
        "gpu/watts": lambda: torch.cuda.power_draw(device) / 1000,
        "gpu/mhz": lambda: float(torch.cuda.clock_rate(device)),
        "gpu/celsius": lambda: float(torch.cuda.temperature(device)),
    }
    values = {}
    for key, read in readings.items():
        with suppress(Exception):  # ImportError without the package, and every error of the driver
            values[key] = read()
    return values


def peak_flops(settings: Metrics, device: torch.device, dtype: torch.dtype, float8: bool = False) -> float | None:
    """Return the FLOP/s that a rank's matrix products of `dtype` reach at most; None if unknown.

    It is `settings.peak_tflops`, or from a GPU's data sheet: for bfloat16, or for float32 if TF32 is on (no tensor
    core computes in full float32: None). A CPU's is not measured: on a busy machine too little would be found.

    float8: the run has products in float8. Then the peak is float8's, though the head and attention are bfloat16: with
    the larger peak no run looks better than it is.
    """
    if settings.peak_tflops or device.type != "cuda":
        return 1e12 * settings.peak_tflops or None
    from torchllm.facts.device_peaks import device_peak_flops  # of no use to a CPU

    name = torch.cuda.get_device_name(device)
    if float8:
        return device_peak_flops(name, "float8")
    if dtype == torch.bfloat16:
        return device_peak_flops(name, "bfloat16")
    return None if torch.get_float32_matmul_precision() == "highest" else device_peak_flops(name, "tf32")
