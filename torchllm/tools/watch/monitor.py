"""Everything that only observes a run, behind one object: without it the run trains the same weights.

    Meter           loss, speed, MFU and memory of logged steps, written to the sinks
    StepProfiler    where the time of some steps went; ranks that are slow
    Goodput         the share of the run's wall time that trained it
    bottlenecks     data waits and stage times, for whoever may change the run's config (`torchllm/tools/adapt`)

Every rank has one; rank 0's writes and logs.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from shlex import quote
from statistics import median
from typing import Literal, NamedTuple

import torch

from torchllm.config import Config, applied, refuse_unapplied
from torchllm.config.errors import UserError
from torchllm.data.loader import TrainLoader
from torchllm.facts.flops import active_parameter_count, parameter_count, recomputes_logits, update_parameter_count
from torchllm.facts.stages import stage_of_rank
from torchllm.metrics.console import Console
from torchllm.metrics.meter import Meter, device_name, peak_flops
from torchllm.metrics.sinks import Record, Sink, TolerantSink, open_loads_file, open_sinks
from torchllm.models.decoder import Decoder
from torchllm.models.lora import check_trained
from torchllm.parallel.mesh import Mesh
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime
from torchllm.runtime.signs_of_life import signs_of_life
from torchllm.runtime.tolerance import Tolerance
from torchllm.tools.launch.on_event import call_on_event
from torchllm.tools.planner.cluster import tensor_parallel_warning
from torchllm.tools.prepare.counts import describe_counts, describe_unknown
from torchllm.tools.watch.bottlenecks import (
    STARVED,
    STARVED_SECONDS,
    DataWait,
    DataWaitClock,
    ForwardTimes,
    StageClock,
    gather_stage_times,
)
from torchllm.tools.watch.goodput import Goodput
from torchllm.tools.watch.step_profiler import ProfiledStep, StepProfiler
from torchllm.tools.watch.task_processes import TaskProcesses
from torchllm.tools.watch.trace import TraceWriter, parse_steps
from torchllm.train.interval import due
from torchllm.train.step import StepResult

log = logging.getLogger("torchllm")

TIMED_STEPS = 5
"""steps after the first by which stages, and steps before and after a change of the config, are compared"""
SLOW_NODES = "slow_nodes"


def planned_mfu(config: Config) -> float | None:
    """Return the MFU that the planner predicts; None where it does not know the machine, or some products (float8)."""
    from torchllm.tools.planner.search.auto import planned  # on rank 0, once: the planner is large

    prediction = None if config.float8.is_on else planned(config)
    return prediction.mfu if prediction else None


class Bottlenecks(NamedTuple):
    """What has slowed the run down since its last checkpoint; the same on all ranks."""

    data_wait: DataWait | None
    """the longest wait for data, if the loader is starved"""
    stage_times: ForwardTimes | None
    """of the forwards of the pipeline's stages, once they were measured (`parallel.rebalance`)"""


class Change(NamedTuple):
    """Another config for the run to go on with, from a checkpoint."""

    config: Config
    reason: str


class Monitor:
    """Observes this rank. One per process; `begin` starts it for a config, `end` ends it.

    adapt: decides at a checkpoint, the same on all ranks, whether the run goes on with another config; without it the
    run never does. starved_seconds: a rank that waits less for data between two checkpoints has no starved loader.
    """

    def __init__(
        self,
        runtime: Runtime,
        adapt: Callable[[Config, Bottlenecks], Change | None] | None = None,
        starved_seconds: float = STARVED_SECONDS,
    ) -> None:
        self.runtime = runtime
        self.adapt = adapt
        self.starved_seconds = starved_seconds
        self.goodput = Goodput(runtime.folder) if runtime.is_main else None
        self.start_up = ExitStack()
        """closed when the steps begin"""
        if runtime.is_main:
            self.start_up.enter_context(signs_of_life("start-up"))
        self.slow_nodes: list[str] = []
        self.slow_nodes_file = runtime.folder / SLOW_NODES
        self.slow_nodes_tolerance = Tolerance(str(self.slow_nodes_file))
        self.next_config: Config | None = None
        """set by `wants_change`: with which to go on from the last checkpoint"""
        self.change_reason = ""
        self.task_processes: TaskProcesses | None = None
        self.seconds_before_change: float | None = None
        """of a step; None once the steps after the change were compared with it"""

    def begin(self, config: Config, mesh: Mesh, stages: Sequence[Decoder], data: TrainLoader, start: int) -> None:
        """Start the clocks, right before step `start` + 1, the first with this config.

        Raises UserError if it does not train what the config says (`check_trained`, `refuse_unapplied`).
        """
        check_trained(stages, config.lora)
        if not isinstance(data, TrainLoader):  # a fork's own knows what these keys mean to it
            applied("evaluate.interval")
            applied("finetune.epochs")
        self.unread_keys = refuse_unapplied(config)
        self.records = 0
        runtime, device, training = self.runtime, self.runtime.device, config.training
        runtime.check_owner()  # metrics.jsonl is cut to `start`
        dtype = compute_dtype(training, device)
        self.config, self.next_config = config, None
        self.skipped_steps = 0.0
        self.has_described_a_step = False
        peak = peak_flops(device, dtype, runtime.ranks_on_node, config.float8.is_on)
        if not self.change_reason:
            self.describe(config, data, start)
            self.describe_peak(config, peak)
        self.warn(config, data, dtype, start)
        self.meter = Meter(
            config.metrics,
            config.model,
            config.recompute,
            training,
            device=device,
            world_size=runtime.world_size,
            peak_flops=peak,
            sinks=self._open_sinks(start) if runtime.is_main else [],
            loads_file=open_loads_file(runtime.folder, start) if runtime.is_main and config.model.experts else None,
            console=Console(training.steps, start) if runtime.is_main else None,
            check_owner=runtime.check_owner,
            goodput=self.goodput,
            sequences=data.state()["sequences"],
            has_logits_again=recomputes_logits(training, config.parallel),
            lora=config.lora,
            on_imbalance=self._call_on_imbalance,
        )
        traces = TraceWriter(runtime.folder, parse_steps(config.metrics.profile_steps), runtime.rank)
        interval = config.metrics.breakdown_interval
        self.profiler = StepProfiler(interval, mesh, runtime.host_group, device, traces, start)
        self.data_wait_clock = DataWaitClock(runtime.host_group)
        self.stage_clock = None
        if config.parallel.rebalance and mesh.pp.size() > 1:
            indices = stage_of_rank(config.parallel, mesh.pp.get_local_rank())
            self.stage_clock = StageClock(stages, indices, device)
        if runtime.is_main and config.evaluate.tasks_interval and self.task_processes is None:
            self.task_processes = TaskProcesses(runtime.folder, config.evaluate.tasks_interval, start)
        self.last_step = start
        self.step_seconds: deque[float] = deque(maxlen=TIMED_STEPS + 2)
        self.steps = 0
        self.start_up.close()
        # The time up to here is the start-up's: none of it may be the first step's too.
        if self.goodput is not None:
            self.goodput.begin(start, config.training.steps)
        self.meter.start_interval()
        self.step_ended = time.perf_counter()

    def describe(self, config: Config, data: TrainLoader, start: int) -> None:
        """Log what is trained, on what."""
        training, model = config.training, config.model
        log.info("model: %s parameters in %d blocks", f"{parameter_count(model):,}", model.layers)
        if model.experts:
            log.info(
                "experts: %d of %d for a token, in %d blocks; it uses %s of the parameters",
                model.top_k,
                model.experts,
                model.layers - model.dense_layers,
                f"{active_parameter_count(model):,}",
            )
        if config.lora.is_on:
            trained = update_parameter_count(model, config.lora)
            log.info(
                "LoRA of rank %d: %s parameters are trained, the others are frozen", config.lora.rank, f"{trained:,}"
            )
        for line in data.describe_sources(training.steps):
            log.info("%s", line)
        for name, header in data.corpora().items():
            for line in (*describe_counts(header.counts), *describe_unknown(header)):
                log.info("%s: %s", name, line)
        tokens_per_step = training.global_batch_size * training.sequence_length
        if start < training.steps:
            tokens = f"{(training.steps - start) * tokens_per_step:,} tokens, {tokens_per_step:,} per step"
            log.info("steps %d to %d: %s", start + 1, training.steps, tokens)

    def describe_peak(self, config: Config, peak: float | None) -> None:
        """Log against which peak MFU counts where some products are in float8 and others are not."""
        if not config.float8.is_on or peak is None:
            return
        kind = "float8's" if self.runtime.device.type == "cuda" else "bfloat16's, for a CPU emulates float8"
        log.info("MFU and HFU are against %.4g TFLOP/s per rank, %s", peak / 1e12, kind)

    def warn(self, config: Config, data: TrainLoader, dtype: torch.dtype, start: int) -> None:
        """Log what a user should know about a config before its first step."""
        if start >= config.training.steps:
            log.info(
                "nothing to do: the run is at step %d of training.steps = %d; raise training.steps, or set another "
                "run.folder",
                start,
                config.training.steps,
            )
        if self.unread_keys:
            log.warning("set, but not read by this recipe: %s", ", ".join(self.unread_keys))
        if data.skipped:
            log.warning("records skipped: %s", data.skipped)
        if rounded := data.describe_rounded_shares():
            log.warning("shares of data.sources are rounded: %s", rounded)
        if slow := tensor_parallel_warning(config, self.runtime.ranks_on_node, dtype.itemsize):
            log.warning("%s", slow)

    def _open_sinks(self, start: int) -> list[Sink]:
        """Return the sinks of rank 0: the files, and the trackers that the config names."""
        sinks = open_sinks(self.runtime.folder, self.config, start)
        if self.config.metrics.trackers:
            from torchllm.tools.watch.trackers import open_trackers  # of no use to other runs

            sinks += open_trackers(self.runtime.folder, self.config, device_name(self.runtime.device))
        return sinks

    def add_sink(self, sink: Sink) -> None:
        """Write the records of this config to one more sink: rank 0's. Call it after `begin`.

        A sink that raises ends no training (`TolerantSink`).
        """
        if self.runtime.is_main:
            self.meter.sinks.append(TolerantSink(type(sink).__name__, sink))

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """Observe step `n`: a context around all that the loop does in it."""
        with self.profiler.step(n):
            yield
        if self.meter.console is not None:
            self.meter.console.advance(n)
        ended = time.perf_counter()
        self.step_seconds.append(ended - self.step_ended)
        self.step_ended = ended
        self.steps += 1
        self.last_step = n
        self._evaluate_tasks()
        if self.steps == TIMED_STEPS + 1:
            self._compare_with_before()
        if self.profiler.latest is not None:
            self._report(self.profiler.latest)

    def data_wait(self) -> AbstractContextManager[None]:
        """Return a context around the call that waits for the next batch."""
        return self.meter.data_wait()

    def pause(self, cause: Literal["evaluate", "checkpoint"]) -> AbstractContextManager[None]:
        """Return a context around an evaluation or a checkpoint, whose time is not the step's."""
        return self.meter.pause(cause)

    def log(
        self,
        n: int,
        result: StepResult,
        validation_loss: float | None,
        force: bool,
        extra: Mapping[str, float | torch.Tensor] | None = None,
    ) -> Record | None:
        """Count step `n`; write and return its record if it is a logged one, as `Meter.log` says.

        Raises LeaseLost on rank 0 if another job owns the run folder by now, and UserError if the recipe has not done
        what the config asks for after a step: evaluate where it is due, and read the health of logged steps.
        """
        config = self.config
        if validation_loss is None and due(n, config.evaluate.interval, config.training.steps):
            raise UserError(
                f"evaluate.interval: is {config.evaluate.interval}, but this recipe has not evaluated step {n}: give "
                "monitor.log what evaluate(...) returns, as torchllm's own recipes do; or remove the key"
            )
        record = self.meter.log(n, result, validation_loss=validation_loss, force=force, extra=extra)
        if record is not None:
            self.records += 1
            if self.records == 2:
                refuse_unapplied(config, late=True)
            self._notice_skipped_steps(record["skipped_steps"] or 0.0)
        return record

    def _notice_skipped_steps(self, skipped: float) -> None:
        """Call `run.on_event` where the first of this process' steps were not finite; not for every later one."""
        if skipped and not self.skipped_steps and self.runtime.is_main:
            call_on_event(self.config.run.on_event, "nan", self.runtime.folder)
        self.skipped_steps = skipped

    def _call_on_imbalance(self) -> None:
        """Call `run.on_event` where experts have had no tokens, or far too many, for too long: on rank 0."""
        call_on_event(self.config.run.on_event, "imbalance", self.runtime.folder)

    def wants_change(self, n: int) -> bool:
        """Whether the run should go on with another config (`next_config`) from the checkpoint of step `n`.

        Call it on all ranks, after a checkpoint.
        """
        if self.adapt is None:
            return False
        change = self.adapt(self.config, self._bottlenecks())
        if change is None:
            return False
        log.info("step %d: %s, from this checkpoint on", n, change.reason)
        self.next_config, self.change_reason = change
        self.seconds_before_change = self._usual_seconds()
        return True

    def end(self) -> None:
        """End what `begin` started; checkpoints are written by now."""
        self._evaluate_tasks()
        self.meter.close()

    def close(self) -> None:
        """Log what the run's time went to."""
        if self.goodput is not None:
            log.info("%s", self.goodput.summary())

    def _evaluate_tasks(self) -> None:
        """Start the evaluation of a checkpoint's tasks if one is due, on rank 0."""
        if self.task_processes is not None:
            self.task_processes.start_due(self.last_step)

    def _bottlenecks(self) -> Bottlenecks:
        data_wait = self.data_wait_clock.longest(self.meter.total_data_wait)
        starved = data_wait.share > STARVED and data_wait.seconds > self.starved_seconds
        stage_times = None
        if self.stage_clock is not None and self.steps > TIMED_STEPS:
            self.stage_clock.close()
            times = self.stage_clock.seconds()
            stage_times = gather_stage_times(times, self.config.parallel.stages, self.runtime.host_group)
            self.stage_clock = None  # measured once per config
            log.info("forwards of the stages take %s s", ", ".join(f"{seconds:.3g}" for seconds in stage_times.seconds))
        return Bottlenecks(data_wait if starved else None, stage_times)

    def _usual_seconds(self) -> float:
        """Return the median time of the latest steps, without the first of a config: it compiles and allocates."""
        seconds = list(self.step_seconds)
        return median(seconds[1:] or seconds)

    def _compare_with_before(self) -> None:
        """Log how much faster the steps are after a change of the config."""
        old_seconds, seconds = self.seconds_before_change, self._usual_seconds()
        if old_seconds is not None:
            percent = 100 * (seconds / old_seconds - 1)
            log.info("%s: steps took %.3g s, now %.3g s (%+.0f %%)", self.change_reason, old_seconds, seconds, percent)
        self.seconds_before_change = None

    def _report(self, profiled: ProfiledStep) -> None:
        seconds = profiled.seconds
        parts: Record = {f"breakdown/{name}": part / seconds for name, part in profiled.parts.items()}
        self.meter.write(profiled.step, {"step": profiled.step} | parts)
        if not self.has_described_a_step and self.runtime.is_main:
            log.info("%s", profiled.describe(self.meter.step_mfu(seconds), planned_mfu(self.config)))
        self.has_described_a_step = True
        if profiled.slow:
            log.warning("step %d: %s", profiled.step, profiled.slow)
        if profiled.slow is not None and self.runtime.is_main and profiled.slow.host not in self.slow_nodes:
            self.slow_nodes.append(profiled.slow.host)
            with self.slow_nodes_tolerance.attempt():
                self.slow_nodes_file.write_text(",".join(self.slow_nodes))
                if "SLURM_JOB_ID" in os.environ:
                    advice = 'to exclude %s from the next start: sbatch --exclude="$(cat %s)"'
                    log.warning(advice, profiled.slow.host, quote(str(self.slow_nodes_file)))
