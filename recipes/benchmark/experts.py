"""benchmark experts: what a mixture of experts learns from the tokens that a dense model learns from, and in what time.

train_configs/debug.toml and train_configs/moe_debug.toml have as many active parameters. For each seed, from run.seed
on, run_train.sh trains one after the other, on one process each. The data are prepared before. Seconds are those of the
whole command: start, training, evaluations and checkpoints.
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
from torchllm.config.load import load_config
from torchllm.data.loader import DataRanks, build_loader
from torchllm.resources import resource
from torchllm.runtime.process import Runtime
from torchllm.spec.flops import active_parameter_count, parameter_count

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
    """What came of one run."""

    config: Config
    loss: float
    """of the last evaluation, nats per byte"""
    seconds: float
    data: dict[str, Any]
    """state of the data loader in the last checkpoint: which data, and how many sequences of them"""

    def facts(self) -> dict[str, Any]:
        """Return what both sides must have in common for their losses to be comparable."""
        config = self.config
        return {
            "data": self.data,
            "training": config.training,
            "schedule": config.schedule,
            "evaluate": config.evaluate,
        }


def experts(config: "BenchmarkConfig", runtime: Runtime, overrides: Mapping[str, str]) -> Tables:
    """Train both in turns. `overrides` of the command line, key to text, are those of all runs, too."""
    if runtime.world_size > 1:
        raise UserError("benchmark experts: runs on one process, which starts others")
    if not config.evaluate.interval:
        raise UserError("benchmark experts: compares validation losses: set evaluate.interval over 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the run that goes on is ended too
    build_loader(config.data, config.training, config.model, config.run.seed, DataRanks(0, 1)).close()
    given = {key: text for key, text in overrides.items() if not key.startswith("benchmark.")}
    with scratch(runtime) as folder:
        folder.mkdir(parents=True)
        sides = []
        for name in CONFIGS:
            sides.append(partial(train_next, name, count(config.run.seed), given, folder))
        dense, sparse = take_turns(sides, config.benchmark.rounds)
    for pair in zip(dense, sparse, strict=True):
        check_alike(*pair)
    seconds = ratio_row("experts / dense", seconds_of_runs(sparse), seconds_of_runs(dense))
    return {
        "validation loss, nats per byte": loss_rows(dense, sparse),
        "seconds of each run": second_rows(dense, sparse),
        "seconds, all seeds": [seconds | {"target": TIME_TARGET}],
        "what both were trained on": [fact_row("dense", dense[0]), fact_row("experts", sparse[0])],
    }


def train_next(name: str, seeds: Iterator[int], overrides: Mapping[str, str], folder: Path) -> TrainedRun:
    """Train the side `name` from the next seed, in a folder of its own in `folder`. UserError if the run fails."""
    seed = next(seeds)
    run_folder = folder / f"{name}-{seed}"
    log = folder / f"{name}-{seed}.log"
    of_this_run = {"run.seed": str(seed), "run.folder": str(run_folder), "generate.after_training": "false"}
    words = [f"--{key}={text}" for key, text in (dict(overrides) | of_this_run).items()]
    start = time.perf_counter()
    status = run_job([str(resource(CONFIGS[name])), *words], 1, None, log)
    seconds = time.perf_counter() - start
    if status != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])
        what = f"{CONFIGS[name]}, seed {seed}, ended with exit status {status}"
        raise UserError(f"benchmark experts: {what}; the end of {log}:\n{end}")
    run = read_run(run_folder, seconds)
    print(f"seed {seed}, {name}: loss {run.loss:.4f}, {run.seconds:.0f} s", file=sys.stderr)
    return run


def read_run(folder: Path, seconds: float) -> TrainedRun:
    """Return what a run that took `seconds` has left in its folder."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    config = load_config([str(folder / "config.toml")])
    newest = step_folders(folder / "checkpoints")[0]
    return TrainedRun(config, losses[-1], seconds, read_manifest(newest).data)


def check_alike(dense: TrainedRun, sparse: TrainedRun) -> None:
    """UserError if two runs were not trained on the same tokens in the same batches, or not evaluated alike."""
    theirs = sparse.facts()
    for name, fact in dense.facts().items():
        if fact != theirs[name]:
            raise UserError(f"benchmark experts: the runs do not have the same {name}: {fact} and {theirs[name]}")


def seconds_of_runs(runs: Sequence[TrainedRun]) -> list[float]:
    """Return the seconds of each run."""
    return [run.seconds for run in runs]


def loss_rows(dense: Sequence[TrainedRun], sparse: Sequence[TrainedRun]) -> list[TableRow]:
    """Return both losses for each seed, then their means."""
    rows = []
    for one, other in zip(dense, sparse, strict=True):
        rows.append(loss_row(str(one.config.run.seed), one.loss, other.loss, None))
    dense_mean = mean(run.loss for run in dense)
    sparse_mean = mean(run.loss for run in sparse)
    return [*rows, loss_row("mean", dense_mean, sparse_mean, LOSS_TARGET)]


def loss_row(seed: str, dense: float, sparse: float, target: float | None) -> TableRow:
    """Return one row of losses; `target`: of the difference."""
    return {"seed": seed, "dense": dense, "experts": sparse, "difference": sparse - dense, "target": target}


def second_rows(dense: Sequence[TrainedRun], sparse: Sequence[TrainedRun]) -> list[TableRow]:
    """Return both times for each seed."""
    rows: list[TableRow] = []
    for one, other in zip(dense, sparse, strict=True):
        ratio = other.seconds / one.seconds
        seed = str(one.config.run.seed)
        rows.append({"seed": seed, "dense_s": one.seconds, "experts_s": other.seconds, "ratio": ratio})
    return rows


def fact_row(name: str, run: TrainedRun) -> TableRow:
    """Return the sizes of a run's model, and its tokens."""
    training = run.config.training
    sequences = run.data["sequences"]
    fingerprints = [fingerprint for fingerprint, _ in run.data["fingerprint"]["sources"]]
    return {
        "run": name,
        "active_parameters": active_parameter_count(run.config.model),
        "parameters": parameter_count(run.config.model),
        "steps": training.steps,
        "global_batch_size": training.global_batch_size,
        "sequence_length": training.sequence_length,
        "tokens": sequences * training.sequence_length,
        "data": " ".join(fingerprint[:16] for fingerprint in fingerprints),
    }
