"""Evaluates tasks of lm-evaluation-harness while a run trains, on its ranks (`evaluate.tasks_interval`).

The harness builds requests and scores them on rank 0, while the other ranks wait for work.
"""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout

from torchllm.config.errors import UserError
from torchllm.data.tokenizer import load_tokenizer
from torchllm.metrics.observer import ObservedRun, Observer
from torchllm.metrics.sinks import Record
from torchllm.optim.average import average_of
from torchllm.runtime.heartbeat import during
from torchllm.runtime.stop import may_give_up
from torchllm.runtime.tolerance import Tolerance
from torchllm.tools.watch.tasks import Tasks, values_of, write_task_results
from torchllm.tools.watch.text_ranks import TextRanks
from torchllm.train.interval import due

log = logging.getLogger("torchllm")


class TaskEvaluations(Observer):
    """Evaluates the tasks; every rank has one."""

    def __init__(self) -> None:
        self.tasks: Tasks | None = None
        """on rank 0"""
        self.tolerance = Tolerance("evaluate.tasks")

    def begin(self, run: ObservedRun) -> None:
        """See Observer. Raises UserError, on all ranks, if lm-eval or a task is missing or does not suit the layout."""
        self.run, runtime, data = run, run.runtime, run.config.data
        self.ranks = TextRanks(run.stages, run.config, runtime.device, run.mesh, runtime.host_group)
        problem = None
        if runtime.is_main:
            try:
                self.tokenizer = load_tokenizer(data.tokenizer)
                self.tasks = self.tasks or Tasks(run.config.evaluate)
                self.tasks.check_model(self.ranks, self.tokenizer)
            except UserError as error:
                problem = str(error)
        problem = runtime.gather_texts(problem)[0]
        if problem is not None:
            raise UserError(problem)

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        yield
        run = self.run
        if due(n, run.config.evaluate.tasks_interval, run.config.training.steps):
            with run.meter.pause("evaluate"), may_give_up(run.runtime.should_give_up), during("evaluation"):
                average = average_of(run.stages) if run.config.evaluate.ema else None
                with nullcontext() if average is None else average.in_place():
                    self._evaluate(n)
            if run.runtime.has_given_up:
                log.warning("evaluate.tasks: step %d is given up, to save in time", n)

    def _evaluate(self, n: int) -> None:
        """Evaluate step `n`, and write the results on rank 0. A failure on rank 0 alone does not end the run."""
        run, tasks = self.run, self.tasks
        if tasks is None:
            self.ranks.serve()
            return
        try:
            with self.ranks.lead(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                results = tasks.evaluate(self.ranks, self.tokenizer)
        except Exception as error:
            if self.ranks.is_at_work:
                raise
            log.warning("evaluate.tasks: step %d is not evaluated, training goes on: %r", n, error)
            return
        values: Record = {value.key: value.value for value in values_of(results)}
        run.meter.write(n, {"step": n} | values)
        log.info("step %d: %s", n, ", ".join(f"{key} {value:.4f}" for key, value in values.items()))
        with self.tolerance.attempt():
            write_task_results(run.runtime.folder, n, results)
