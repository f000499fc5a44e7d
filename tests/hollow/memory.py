"""Compares the peak memory of real steps, on the hollow GPU, with what the dry run predicts.

    python -m tests.hollow.memory                write the rows of every combination to memory.csv, hours on 2 cores
    python -m tests.hollow.memory --pairs        of a sample in which every pair of settings occurs
    python -m tests.hollow.memory --only=3,7     print rows of the sample by their number

The peak is torch's own: the caching allocator, the streams and NCCL's use of them are real, the GPU has 2 TiB so that
everything fits. The prediction is `run.dry_run`'s, of the same rank.
"""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from tests.hollow.bed import ROOT, Machine
from tests.hollow.launches import measure
from tests.hollow.layouts import Arguments, Settings, as_arguments

TABLE = Path(__file__).parent / "memory.csv"
HUGE = Machine(gib=2048)
GIB = 2**30
WITHIN = 0.05
"""largest difference of a row, of the prediction"""

CONFIGS = {"8b": "train_configs/llama3_8b_8gpu.toml", "70b": "train_configs/llama3_70b_cluster.toml"}
EAGER: Settings = {
    "parallel.dp_shard": 8,
    "parallel.zero_stage": 3,
    "compile.block": False,  # the dry run compiles nothing
    "compile.loss": False,
}
RECOMPUTE: dict[str, Settings] = {mode: {"recompute.mode": mode} for mode in ("none", "selective", "full")}
TENSOR: dict[str, Settings] = {
    "tp 1": {"parallel.tp": 1, "parallel.sequence_parallel": False},
    "tp 4": {"parallel.tp": 4, "parallel.sequence_parallel": False},
    "tp 4, sp": {"parallel.tp": 4, "parallel.sequence_parallel": True},
}
CONTEXT: dict[str, Settings] = {
    "cp 1": {"parallel.cp": 1},
    "ring 2": {"parallel.cp": 2, "parallel.cp_method": "ring"},
    "ulysses 2": {"parallel.cp": 2, "parallel.cp_method": "ulysses"},
}
PIPELINE: dict[str, Settings] = {
    "pp 1": {"parallel.pp": 1, "training.global_batch_size": 8},
    "pp 4": {"parallel.pp": 4, "parallel.schedule": "1F1B", "training.global_batch_size": 64},
    "pp 4, interleaved": {
        "parallel.pp": 4,
        "parallel.schedule": "Interleaved1F1B",
        "training.global_batch_size": 64,
    },
}
AXES = (RECOMPUTE, TENSOR, CONTEXT, PIPELINE)


class Choice(NamedTuple):
    """A name of each setting."""

    model: str
    recompute: str
    tensor: str
    context: str
    pipeline: str

    @property
    def settings(self) -> Settings:
        """Keys that differ from the model's config."""
        merged = dict(EAGER)
        for axis, name in zip(AXES, self[1:], strict=True):
            merged |= axis[name]
        return merged

    @property
    def arguments(self) -> Arguments:
        """Command line of a run."""
        return as_arguments(CONFIGS[self.model], self.settings)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold the same pipeline stage."""
        degrees = [self.settings[f"parallel.{axis}"] for axis in ("dp_shard", "cp", "tp")]
        return math.prod(degrees)


class Peak(NamedTuple):
    """Memory of one rank of a layout; sizes in GiB."""

    pp_rank: int
    live: float
    """largest memory of tensors during a step"""
    reserved: float
    """most memory that torch's allocator held"""
    predicted: float
    """the dry run's peak"""

    @property
    def difference(self) -> float:
        """How much more is live than predicted, as a share of the prediction."""
        return self.live / self.predicted - 1


class Row(NamedTuple):
    """One rank of a choice."""

    choice: Choice
    peak: Peak


def choices() -> Iterator[Choice]:
    for names in product(CONFIGS, *AXES):
        yield Choice(*names)


def sample() -> list[Choice]:
    """Return choices in which every pair of settings occurs, each the one with the most new pairs."""
    missing = {pair for choice in choices() for pair in combinations(choice, 2)}
    drawn = []
    while missing:
        best = max(choices(), key=lambda choice: len(missing.intersection(combinations(choice, 2))))
        drawn.append(best)
        missing -= set(combinations(best, 2))
    return drawn


def predict(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yield what the dry run says of each kind of rank: its `shown_pp_rank` and `peak` in bytes."""
    command = [sys.executable, "recipes/pretrain.py", *arguments, "--run.dry_run=true", "--run.json=true"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    yield from json.loads(done.stdout[done.stdout.index("{") :])["kinds"]


def peaks(arguments: Arguments, ranks_per_stage: int) -> Iterator[Peak]:
    """Yield the peak of the first and of the last kind of rank of a command line."""
    kinds = list(predict(arguments))
    ends = kinds if len(kinds) < 3 else [kinds[0], kinds[-1]]
    cases = {}
    for kind in ends:
        rank = kind["shown_pp_rank"] * ranks_per_stage
        cases[str(kind["shown_pp_rank"])] = [f"--rank={rank}", *arguments]
    reports = measure(cases, HUGE, PYTORCH_ALLOC_CONF="expandable_segments:True")
    for kind, report in zip(ends, reports.values(), strict=True):
        if "error" in report:
            raise RuntimeError(f"{arguments}: {report['error']}")
        yield Peak(kind["shown_pp_rank"], report["live"], report["reserved"], kind["peak"] / GIB)


def write(table: Iterable[Row]) -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Choice._fields, *Peak._fields, "difference"])
        for choice, peak in table:
            sizes = [f"{size:.2f}" for size in (peak.live, peak.reserved, peak.predicted)]
            writer.writerow([*choice, peak.pp_rank, *sizes, f"{peak.difference:+.3f}"])


def main(arguments: Sequence[str]) -> int:
    """Measure and write; exit status 1 if a row is further from the prediction than `WITHIN`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true", help="a sample in which every pair of settings occurs")
    parser.add_argument("--only", default="", help="numbers of choices of the sample")
    options = parser.parse_args(arguments)
    measured = sample() if options.pairs or options.only else list(choices())
    if options.only:
        measured = [measured[int(number)] for number in options.only.split(",")]
    measured_rows = []
    for choice in measured:
        for peak in peaks(choice.arguments, choice.ranks_per_stage):
            measured_rows.append(Row(choice, peak))
            print(f"{peak.difference:+.1%}", *choice, *peak, flush=True)
    if not options.only:
        write(measured_rows)
    return 1 if any(abs(row.peak.difference) > WITHIN for row in measured_rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
