"""benchmark experts: loss and time of a mixture of experts and of a dense model, trained on the same tokens.

train_configs/debug.toml and train_configs/moe_debug.toml have the same number of active parameters. For each seed,
starting with run.seed, run_train.sh trains one after the other, on one process each. The data are prepared before.
Seconds are measured for the whole command: start, training, evaluations and checkpoints.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from sweep.job import run_job

from torchllm.checkpoint.manifest import read_manifest, step_folders
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.data.loader import DataRanks, build_loader
from torchllm.facts.flops import active_parameter_count, parameter_count
from torchllm.runtime.process import Runtime
from torchllm.tools.config.load import load_config
from torchllm.tools.resources import resource

from .tools import TableRow, Tables, ratio_row, scratch, take_turns

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

CONFIGS = {"dense": "train_configs/debug.toml", "experts": "train_configs/moe_debug.toml"}
LOSS_TARGET = -0.01
"""nats per byte: how much lower the mean loss with experts shall be, or less"""
TIME_TARGET = 2.0
"""seconds with experts over seconds of the dense run, at most"""
LINES = 20
"""of the log of a failed run that are printed"""


class TrainedRun(NamedTuple):
    """The result of one run."""

    config: Config
    loss: float
    """of the last evaluation, nats per byte"""
    seconds: float
    data: dict[str, Any]
    """state of the data loader in the last checkpoint: which data, and how many sequences of them"""

    @property
    def seed(self) -> str:
        """Seed of the run, as text."""
        return str(self.config.run.seed)

    def facts(self) -> dict[str, Any]:
        """Return the settings that both sides must share for their losses to be comparable."""
        facts: dict[str, Any] = {"data": self.data}
        for section in ("training", "schedule", "evaluate"):
            facts[section] = getattr(self.config, section)
        return facts


Runs = Sequence[TrainedRun]
"""the runs of one side, one per seed"""


def experts(config: "BenchmarkConfig", runtime: Runtime, overrides: Mapping[str, str]) -> Tables:
    """Train both in turns. `overrides` of the command line, key to text, apply to all runs, too."""
    if runtime.world_size > 1:
        raise UserError("benchmark experts: runs on one process, which starts others")
    if not config.evaluate.interval:
        raise UserError("benchmark experts: compares validation losses: set evaluate.interval over 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the run that goes on is ended too
    prepare_data(config)
    of_training = {key: text for key, text in overrides.items() if not key.startswith("benchmark.")}
    with scratch(runtime) as folder:
        folder.mkdir(parents=True)
        sides = []
        for name in CONFIGS:
            seeds = count(config.run.seed)
            sides.append(partial(train_next, name, seeds, of_training, folder))
        dense, sparse = take_turns(sides, config.benchmark.rounds)
    for pair in zip(dense, sparse, strict=True):
        check_alike(*pair)
    return result_tables(dense, sparse)


def prepare_data(config: Config) -> None:
    """Prepare the data of all runs, so that no run's seconds have it."""
    alone = DataRanks(0, 1)
    loader = build_loader(config.data, config.training, config.model, config.run.seed, alone)
    loader.close()


def result_tables(dense: Runs, sparse: Runs) -> Tables:
    """Return losses, times, and the training data of the first run of each side."""
    seconds = ratio_row("experts / dense", seconds_of_runs(sparse), seconds_of_runs(dense))
    seconds["target"] = TIME_TARGET
    first_runs = [fact_row("dense", dense[0]), fact_row("experts", sparse[0])]
    return {
        "validation loss, nats per byte": loss_rows(dense, sparse),
        "seconds of each run": second_rows(dense, sparse),
        "seconds, all seeds": [seconds],
        "training data of both": first_runs,
    }


def train_next(name: str, seeds: Iterator[int], overrides: Mapping[str, str], folder: Path) -> TrainedRun:
    """Train the side `name` from the next seed, in a new subfolder of `folder`. UserError if the run fails."""
    seed = next(seeds)
    run_folder = folder / f"{name}-{seed}"
    log = folder / f"{name}-{seed}.log"
    settings = dict(overrides)
    settings["run.seed"] = str(seed)
    settings["run.folder"] = str(run_folder)
    settings["generate.after_training"] = "false"
    words = [str(resource(CONFIGS[name]))]
    for key, text in settings.items():
        words.append(f"--{key}={text}")
    start = time.perf_counter()
    status = run_job(words, 1, None, log)
    seconds = time.perf_counter() - start
    if status != 0:
        failure = f"{CONFIGS[name]}, seed {seed}, ended with exit status {status}"
        raise UserError(f"benchmark experts: {failure}; the end of {log}:\n{end_of(log)}")
    run = read_run(run_folder, seconds)
    line = f"seed {seed}, {name}: loss {run.loss:.4f}, {seconds:.0f} s"
    print(line, file=sys.stderr)
    return run


def end_of(log: Path) -> str:
    """Return the last lines of a log."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LINES:])


def read_run(folder: Path, seconds: float) -> TrainedRun:
    """Return the result of a run from its folder. seconds: its duration."""
    metrics = (folder / "metrics.jsonl").read_text()
    losses = []
    for line in metrics.splitlines():
        record = json.loads(line)
        if "validation_loss" in record:
            losses.append(record["validation_loss"])
    config = load_config([str(folder / "config.toml")])
    newest = step_folders(folder / "checkpoints")[0]
    manifest = read_manifest(newest)
    return TrainedRun(config, losses[-1], seconds, manifest.data)


def check_alike(dense: TrainedRun, sparse: TrainedRun) -> None:
    """UserError if two runs differ in their tokens, their batches or their evaluation."""
    sparse_facts = sparse.facts()
    for name, dense_fact in dense.facts().items():
        sparse_fact = sparse_facts[name]
        if dense_fact != sparse_fact:
            problem = f"the runs do not have the same {name}: {dense_fact} and {sparse_fact}"
            raise UserError(f"benchmark experts: {problem}")


def seconds_of_runs(runs: Runs) -> list[float]:
    """Return the seconds of each run."""
    return [run.seconds for run in runs]


def loss_rows(dense: Runs, sparse: Runs) -> list[TableRow]:
    """Return both losses for each seed, then their means."""
    rows = []
    for dense_run, sparse_run in zip(dense, sparse, strict=True):
        row = loss_row(dense_run.seed, dense_run.loss, sparse_run.loss, None)
        rows.append(row)
    dense_mean = mean(run.loss for run in dense)
    sparse_mean = mean(run.loss for run in sparse)
    return [*rows, loss_row("mean", dense_mean, sparse_mean, LOSS_TARGET)]


def loss_row(seed: str, dense: float, sparse: float, target: float | None) -> TableRow:
    """Return one row of losses; `target`: of the difference."""
    difference = sparse - dense
    return {"seed": seed, "dense": dense, "experts": sparse, "difference": difference, "target": target}


def second_rows(dense: Runs, sparse: Runs) -> list[TableRow]:
    """Return both times for each seed."""
    rows = []
    for dense_run, sparse_run in zip(dense, sparse, strict=True):
        row: TableRow = {"seed": dense_run.seed}
        row["dense_s"] = dense_run.seconds
        row["experts_s"] = sparse_run.seconds
        row["ratio"] = sparse_run.seconds / dense_run.seconds
        rows.append(row)
    return rows


def fact_row(name: str, run: TrainedRun) -> TableRow:
    """Return the sizes of a run's model, and its tokens."""
    training = run.config.training
    sequences = run.data["sequences"]
    sources = run.data["fingerprint"]["sources"]
    row: TableRow = {"run": name}
    row["active_parameters"] = active_parameter_count(run.config.model)
    row["parameters"] = parameter_count(run.config.model)
    row["steps"] = training.steps
    row["global_batch_size"] = training.global_batch_size
    row["sequence_length"] = training.sequence_length
    row["tokens"] = sequences * training.sequence_length
    row["data"] = " ".join(fingerprint[:16] for fingerprint, _ in sources)
    return row
