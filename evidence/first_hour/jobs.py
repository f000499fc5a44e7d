"""The jobs of the first hour: runs, benchmarks and measured layouts, each within the time of its stage."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from sweep.job import Overrides, measure_layout, run_command, run_job

from evidence.benchmark import NAMES
from torchllm.tools.resources import resource

Figures = dict[str, Any]
"""figures of a stage by title, as JSON has them: a number, a text, a list of numbers, or a list of rows"""
MOST_RANKS = 8
"""GPUs of this node that a stage takes at most"""

LOGGED = (
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--metrics.breakdown_interval=0",
    "--evaluate.interval=0",
    "--generate.after_training=false",
)
"""overrides of every run: it logs each step, and only trains and saves"""


class StageFailed(Exception):
    """A job of a stage did not end as it must for the stage to have an answer."""


class Machine(NamedTuple):
    """The conditions of the figures besides the code."""

    gpus: tuple[str, ...]
    """names; none: the rehearsal on a CPU"""
    torch: str
    cuda: str
    """version that torch was built for; empty: a build without CUDA"""
    driver: str
    """version; empty if nvidia-smi is not there to ask"""

    @property
    def ranks(self) -> int:
        """Ranks of a stage that takes all GPUs: a power of two."""
        gpus = min(len(self.gpus) or 2, MOST_RANKS)
        return 1 << (gpus.bit_length() - 1)

    def describe(self) -> str:
        """Return it as the first line of a report."""
        if not self.gpus:
            return f"a CPU, torch {self.torch}: a rehearsal, which says nothing of a GPU"
        driver = self.driver or "unknown"
        return f"{len(self.gpus)} x {self.gpus[0]}, driver {driver}, torch {self.torch}, CUDA {self.cuda}"


class Jobs:
    """Starts the jobs of one stage."""

    def __init__(self, machine: Machine, config: str, folder: Path, deadline: float) -> None:
        """config: the small run's TOML. folder: empty; deleted at the end. deadline: of time.monotonic()."""
        self.machine = machine
        self.config = config
        self.folder = folder
        self.deadline = deadline
        self.clean_up()
        folder.mkdir(parents=True)

    def clean_up(self) -> None:
        """Delete the files of the jobs."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def seconds_left(self) -> float:
        """Return the seconds until the stage must end, at least one."""
        return max(1.0, self.deadline - time.monotonic())

    def train(self, run: str, *overrides: str, ranks: int = 1) -> list[dict[str, Any]]:
        """Train the small model in the run folder `run`, and return its logged steps. StageFailed if the run fails."""
        folder = self.folder / run
        log = self.folder / f"{run}.log"
        arguments = [self.config, *LOGGED, *overrides, f"--run.folder={folder}"]
        self._check(f"run {run}", run_job(arguments, ranks, self.seconds_left(), log), log)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [record for record in records if "loss" in record]

    def losses(self, run: str, *overrides: str, ranks: int = 1) -> list[float]:
        """Train as `train` does, and return the loss of every step."""
        return [record["loss"] for record in self.train(run, *overrides, ranks=ranks)]

    def benchmark(self, name: str, *arguments: str, ranks: int = 1) -> dict[str, list[dict[str, Any]]]:
        """Return the tables of a benchmark, rows by title. StageFailed if it fails.

        arguments: a config, if not the small run's, and overrides.
        """
        log = self.folder / f"benchmark {name}.log"
        command = [sys.executable]
        if ranks > 1:
            command += ["-P", "-m", "torchllm.tools.launch.launch", f"--nproc-per-node={ranks}"]
        folder = Path(__file__).parents[1] / "benchmark" if name in NAMES else resource("recipes/benchmark")
        command += [str(folder), name, *arguments]
        command += ["--benchmark.json=true", f"--run.folder={self.folder / 'benchmark'}"]
        self._check(f"benchmark {name}", run_command(command, {}, self.seconds_left(), log), log)
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith('{"benchmark"'):
                answer: dict[str, Any] = json.loads(line)
                return {title: rows for title, rows in answer.items() if title not in ("benchmark", "environment")}
        raise StageFailed(f"benchmark {name} printed no result: {_last_line(log)}")

    def measure(self, config: str, overrides: Overrides, steps: int, ranks: int) -> dict[str, str]:
        """Return the measured row of a layout, whatever its job comes to, as recipes/sweep writes it."""
        return measure_layout(config, overrides, ranks, steps, self.seconds_left(), self.folder / "layout")

    @staticmethod
    def _check(job: str, status: int | None, log: Path) -> None:
        """Raise StageFailed if the job has failed, or the stage's time is over."""
        if status is None:
            raise StageFailed(f"{job} was not done in the stage's time")
        if status != 0:
            raise StageFailed(f"{job} ended with exit status {status}: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
