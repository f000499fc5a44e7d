"""Evaluate the tasks of a run while it trains: a process next to rank 0 for each checkpoint that is due.

The process is `recipes/evaluate.py` on CPUs of rank 0's machine, with the lowest priority. The run neither waits for it
nor ends with its failure, which is a warning. A checkpoint that is due while an earlier one is being evaluated is
skipped, and said so. What still runs at the end of the training goes on, as long as the scheduler lets it.
"""

import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchllm.checkpoint.manifest import MANIFEST, step_folder
from torchllm.metrics.observer import ObservedRun, Observer
from torchllm.runtime.tolerance import Tolerance
from torchllm.tools.resources import resource
from torchllm.tools.watch.tasks import EVALUATIONS

log = logging.getLogger("torchllm")

OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""variables of the environment that make a process a rank"""


class TaskProcesses(Observer):
    """Starts an evaluation for each checkpoint of every `interval` steps. For rank 0."""

    def __init__(self, run_folder: Path, interval: int) -> None:
        self.run_folder = run_folder
        self.interval = interval
        self.latest: int | None = None
        """step up to which checkpoints were evaluated or skipped: at first that from which the run goes on"""
        self.last_step = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.process_step = 0
        self.tolerance = Tolerance("evaluate.tasks")

    def begin(self, run: ObservedRun) -> None:
        self.last_step = run.start
        if self.latest is None:
            self.latest = run.start

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        yield
        self.last_step = n
        self.end()

    def end(self) -> None:
        """See Observer: start the evaluation of the newest checkpoint that is due, once it is published."""
        self._look_at_process()
        due = self.last_step - self.last_step % self.interval
        due_folder = step_folder(self.run_folder / "checkpoints", due)
        if due <= (self.latest or 0) or not (due_folder / MANIFEST).exists():
            return
        self.latest = due
        if self.process is not None:
            words = [f"{self.run_folder}/config.toml", f"--checkpoint.resume={due_folder}"]
            command = f"python recipes/evaluate.py {shlex.join(words)}"
            running = self.process_step
            log.warning("evaluate.tasks: step %d is skipped: step %d is not done yet; later: %s", due, running, command)
            return
        with self.tolerance.attempt():
            self._start(due)

    def _start(self, step: int) -> None:
        folder = self.run_folder / EVALUATIONS
        folder.mkdir(exist_ok=True)
        words = [sys.executable, str(resource("recipes/evaluate.py")), str(self.run_folder / "config.toml")]
        words += [f"--checkpoint.resume={step_folder(self.run_folder / 'checkpoints', step)}", "--run.device=cpu"]
        if nice := shutil.which("nice"):
            words = [nice, "-n", "19", *words]
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        with (folder / f"step-{step:08d}.log").open("wb") as output:
            self.process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.process_step = step
        log.info("evaluate.tasks: step %d is evaluated by process %d", step, self.process.pid)

    def _look_at_process(self) -> None:
        """Forget the process if it has ended; a failure is a warning."""
        if self.process is None or self.process.poll() is None:
            return
        log_file = self.run_folder / EVALUATIONS / f"step-{self.process_step:08d}.log"
        if self.process.returncode != 0:
            log.warning("evaluate.tasks: step %d failed: see %s", self.process_step, log_file)
        self.process = None
