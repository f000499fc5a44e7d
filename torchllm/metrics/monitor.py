"""The monitor of a run, which its recipe calls: without it the run trains the same weights.

The Meter times the steps and writes the records of logged ones to the sinks. Observers (`observer.py`) do everything
else, such as those in `torchllm/tools/watch`. Every rank has a Monitor; rank 0's writes and logs.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Literal

import torch

from torchllm.checkpoint.checkpointer import CHECKPOINTERS
from torchllm.config import Config, applied, refuse_unapplied
from torchllm.config.applied_keys import BY_LIBRARY, is_left_to_library, leave_to_library, refuse_evaluation_of_weights
from torchllm.config.errors import UserError
from torchllm.data.loader import TrainLoader
from torchllm.facts.flops import recomputed_flops
from torchllm.metrics.console import Console
from torchllm.metrics.meter import Meter, peak_flops
from torchllm.metrics.observer import Change, ObservedData, ObservedRun, Observer
from torchllm.metrics.sinks import Record, Sink, TolerantSink, open_loads_file, open_sinks
from torchllm.models.decoder import Decoder
from torchllm.parallel.mesh import Mesh
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime
from torchllm.runtime.signs_of_life import signs_of_life
from torchllm.runtime.stop import may_give_up
from torchllm.train.interval import due
from torchllm.train.step import Health, StepResult, read_health

log = logging.getLogger("torchllm")


class Monitor:
    """Observes this rank. One per process; `begin` starts it for a config, `end` ends it."""

    def __init__(self, runtime: Runtime, observers: Sequence[Observer] = ()) -> None:
        self.runtime = runtime
        self.observers = list(observers)
        self.start_up = ExitStack()
        """closed when the steps begin"""
        if runtime.is_main:
            self.start_up.enter_context(signs_of_life("start-up"))
        self.change: Change | None = None
        """the config to continue with from the last checkpoint; set by `wants_change`"""

    def begin(self, config: Config, mesh: Mesh, stages: Sequence[Decoder], data: ObservedData, start: int) -> None:
        """Start the clocks, right before step `start` + 1, the first with this config.

        Raises UserError if the training does not follow the config (`check_trained`, `refuse_unapplied`).
        """
        if not isinstance(data, TrainLoader):  # a fork's own loader decides about these keys
            applied("evaluate.interval")
            applied("finetune.epochs")
        self.read_health: Callable[[], Health] | None = None
        """of a step that has been logged"""
        leave_to_library("training.on_nonfinite", "training.max_consecutive_nonfinite")
        unread_keys = refuse_unapplied(config)
        if not config.trains_all:
            from torchllm.models.frozen import check_trained  # of no use to other runs

            check_trained(stages, config)
        runtime, device, training = self.runtime, self.runtime.device, config.training
        runtime.check_owner()  # metrics.jsonl is cut to `start`
        dtype = compute_dtype(training, device)
        self.config, self.change = config, None
        if unread_keys:
            log.warning("set, but torchllm does not read them here, only this recipe may: %s", ", ".join(unread_keys))
        read = data.state()
        self.meter = Meter(
            config.metrics,
            config.model,
            partial(recomputed_flops, config),
            training,
            device=device,
            world_size=runtime.world_size,
            peak_flops=peak_flops(config.metrics, device, dtype, config.float8.is_on),
            sinks=open_sinks(runtime.folder, config, start) if runtime.is_main else [],
            loads_file=open_loads_file(runtime.folder, start) if runtime.is_main and config.model.experts else None,
            console=Console(training.steps, start) if runtime.is_main else None,
            check_owner=runtime.check_owner,
            spend=self._spend,
            tokens=read.get("tokens", read["sequences"] * training.sequence_length),
            trained=config.trained,
        )
        self.start_up.close()
        self.run = ObservedRun(config, runtime, mesh, stages, data, start, self.meter)
        self.begun: list[Observer] = []
        self._begin_observers()
        self.meter.start_interval()

    def _begin_observers(self) -> None:
        """Begin the observers that have not, such as one that a fork has appended after `begin`."""
        for observer in self.observers:
            if not any(observer is begun for begun in self.begun):
                observer.begin(self.run)
                self.begun.append(observer)

    def add_sink(self, sink: Sink) -> None:
        """Write the records of this config to one more sink: rank 0's. Call it after `begin`.

        A sink that raises ends no training (`TolerantSink`).
        """
        if self.runtime.is_main:
            self.meter.sinks.append(TolerantSink(type(sink).__name__, sink))

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """Observe step `n`: a context around all that the loop does in it."""
        self._begin_observers()
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.step(n))
            yield
            self._act_on_health()
            if self.meter.console is not None:
                self.meter.console.advance(n)

    def data_wait(self) -> AbstractContextManager[None]:
        """Return a context around the call that waits for the next batch."""
        return self.meter.data_wait()

    @contextmanager
    def pause(self, cause: Literal["evaluate", "checkpoint"]) -> Iterator[None]:
        """Return a context around an evaluation or a checkpoint, whose time is not the step's.

        An evaluation ends early, without a loss, if the run is asked to stop: it must save in time.
        """
        with self.meter.pause(cause), may_give_up(self.runtime.should_give_up):
            yield
        if self.runtime.has_given_up and cause == "evaluate":
            file = self.runtime.folder / "config.toml"
            log.warning("evaluation given up, to save in time; to make up for it: torchllm evaluate %s", file)

    def log(
        self,
        n: int,
        result: StepResult,
        validation_loss: float | None,
        force: bool,
        extra: Mapping[str, float | torch.Tensor] | None = None,
    ) -> Record | None:
        """Count step `n`; write and return its record if it is a logged one, as `Meter.log` says.

        Raises LeaseLost on rank 0 if another job owns the run folder by now, and UserError if the recipe has not
        evaluated where it is due, or has evaluated the weights in place of their average (`evaluate.ema`).
        """
        config = self.config
        is_evaluated = validation_loss is not None or self.runtime.has_given_up
        if not is_evaluated and due(n, config.evaluate.interval, config.training.steps):
            raise UserError(
                f"evaluate.interval: is {config.evaluate.interval}, but this recipe has not evaluated step {n}: give "
                "monitor.log what evaluate(...) returns, as torchllm's own recipes do; or remove the key"
            )
        if validation_loss is not None:
            refuse_evaluation_of_weights()
        self._begin_observers()
        record = self.meter.log(n, result, validation_loss=validation_loss, force=force, extra=extra)
        if record is not None:
            self.read_health = partial(read_health, config.training, n, result, validation_loss)
            for observer in self.observers:
                observer.logged(n, record)
        if validation_loss is not None:
            for observer in self.observers:
                observer.evaluated(n, validation_loss)
        return record

    def _act_on_health(self) -> None:
        """Judge the checkpoints by a step that was logged, and end a lost run, if the recipe does not `read_health`."""
        if self.read_health is not None and is_left_to_library("training.on_nonfinite"):
            health = self.read_health()
            applied("training.on_nonfinite", BY_LIBRARY)  # still
            for checkpoints in CHECKPOINTERS:
                checkpoints.judge(health)
            health.check()
        self.read_health = None

    def wants_change(self, n: int) -> bool:
        """Return whether the run should go on with another config (`change`) from the checkpoint of step `n`.

        Call it on all ranks, after a checkpoint.
        """
        changes = [observer.saved(n) for observer in self.observers]
        self.change = next((change for change in changes if change is not None), None)
        if self.change is not None:
            log.info("step %d: %s, from this checkpoint on", n, self.change.reason)
        return self.change is not None

    def end(self) -> None:
        """End what `begin` started; checkpoints are written by now."""
        self.meter.close()
        for observer in self.observers:
            observer.end()

    def close(self) -> None:
        """End the observers: the run is over."""
        for observer in self.observers:
            observer.close()

    def _spend(self, cause: str, seconds: float) -> None:
        for observer in self.observers:
            observer.spent(cause, seconds)
