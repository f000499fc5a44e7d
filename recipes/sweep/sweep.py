"""Measures layouts, each as a job of its own: the study of Hagemann et al. (arXiv 2311.05610) as one command.

    python recipes/sweep SWEEP.toml [--output=FOLDER] [--planner-top=K] [--dry-run]

SWEEP.toml names a run and, for some of its keys, the values that are all combined (train_configs/sweeps). Degrees that
are -1 there, and gradient accumulation, follow. Every layout is started by run_train.sh for `sweep.steps` steps; the
first is dropped. What cannot be, runs out of memory or time, or crashes is written down as such and stops nothing.

FOLDER/results.csv has a row a layout, in the columns that `recipes/plan.py score` and `calibrate` read; results.md is a
table, *.png are figures. The same command goes on where it was ended. --planner-top measures only the K layouts that
the planner expects to be fastest, and a quarter as many spread over the others, to calibrate it with. --dry-run lists
the layouts and what the planner expects of each.
"""

import argparse
import csv
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchllm.config import Count, Positive
from torchllm.config.read import Fault, read_table
from torchllm.config.toml import dotted, read_files
from torchllm.planner.search.auto import planned
from torchllm.planner.search.explain import GIB
from torchllm.resources import find_config

from .job import COLUMNS, Layout, measure_layout, resolve_layout


@dataclass(frozen=True)
class SweepAxis:
    """One key of the run's config, and what it is set to."""

    key: str = ""
    """dotted, as on the command line: parallel.tp"""
    values: tuple[str, ...] = ()
    """as on the command line"""


@dataclass(frozen=True)
class Sweep:
    """What is measured, and how long."""

    config: str = ""
    """the run's TOML, relative to this file"""
    processes: Count = 1
    """ranks of every layout, all on this node"""
    steps: Count = 10
    """of each layout; the first is not counted"""
    timeout: Positive = 600.0
    """seconds after which a layout is given up"""
    axes: tuple[SweepAxis, ...] = ()
    """one [[sweep.axes]] table each"""


@dataclass(frozen=True)
class SweepFile:
    """The whole file."""

    sweep: Sweep = field(default_factory=Sweep)


def read_sweep(file: str) -> Sweep:
    """A sweep's TOML. SystemExit(2) after one line for everything that is wrong."""
    found: list[str] = []
    layer = read_files(file, found)
    faults: list[Fault] = []
    sweep: Sweep = read_table(SweepFile, layer.table, faults).sweep
    found += [f"{layer.places.get(fault.path, file)}: {dotted(fault.path)}: {fault.message}" for fault in faults]
    if not found and not sweep.config:
        found.append(f"{file}: sweep.config: which run? the path of its TOML, relative to this file")
    if not found and not (Path(file).parent / sweep.config).is_file():
        found.append(f"{file}: sweep.config: {sweep.config}: there is no such file beside it")
    found += [f"{file}: sweep.axes: {axis.key or 'one'} has no values" for axis in sweep.axes if not axis.values]
    if found:
        print("\n".join(found), file=sys.stderr)
        raise SystemExit(2)
    return sweep


def layouts(sweep: Sweep) -> list[Layout]:
    """Every combination of the axes' values, as overrides of the command line."""
    return [
        tuple(f"--{axis.key}={value}" for axis, value in zip(sweep.axes, values, strict=True))
        for values in itertools.product(*(axis.values for axis in sweep.axes))
    ]


def main(arguments: list[str]) -> None:
    """Measure what is not yet in results.csv, then write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep")
    parser.add_argument("--output", default="", help="folder of the results; default: runs/sweep-NAME")
    parser.add_argument("--planner-top", type=int, metavar="K", help="measure the planner's best K, and some others")
    parser.add_argument("--dry-run", action="store_true", help="list the layouts, and why some cannot be")
    given = parser.parse_args(arguments)
    given.sweep = find_config(given.sweep)
    sweep = read_sweep(given.sweep)
    config = os.path.normpath(Path(given.sweep).parent / sweep.config)
    folder = Path(given.output or f"runs/sweep-{Path(given.sweep).stem}")
    results = folder / "results.csv"
    done = {row["layout"] for row in read_results(results)}
    wanted = layouts(sweep)
    if given.planner_top is not None:
        wanted = promising(config, wanted, sweep.processes, given.planner_top)
    todo = [layout for layout in wanted if " ".join(layout) not in done]
    if given.dry_run:
        for layout in todo:
            print(" ".join(layout), f"({expected(config, layout, sweep.processes)})")
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(todo)} layouts to measure, {len(done)} in {results}", flush=True)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a job must be ended by us, whoever reads the output
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is ended
    started, jobs = time.monotonic(), 0
    for number, layout in enumerate(todo):
        try:
            row = measure_layout(config, layout, sweep.processes, sweep.steps, sweep.timeout, folder / "job")
        except KeyboardInterrupt:
            print(f"ended; the same command goes on with the {len(todo) - number} left", file=sys.stderr)
            raise SystemExit(130) from None
        append(results, row)
        jobs += row["status"] != "invalid"
        left = (time.monotonic() - started) / max(1, jobs) * (len(todo) - number - 1)
        seconds = f"{float(row['step_time_s']):.3f} s" if row["step_time_s"] else row["note"]
        print(
            f"{number + 1}/{len(todo)}  {row['status']:8s} {' '.join(layout)}  {seconds}  left {left / 60:.0f} min",
            flush=True,
        )
    from .figures import summarize

    for file in summarize(read_results(results), folder):
        print(file)


def promising(config: str, layouts: Sequence[Layout], processes: int, count: int) -> list[Layout]:
    """The `count` layouts that the planner expects to take least time a sequence, and a quarter as many of the others,
    two at least, evenly spread from fast to slow."""
    ranked: list[tuple[float, Layout]] = []
    for layout in layouts:
        resolved, _ = resolve_layout(config, layout, processes)
        if resolved is not None and (prediction := planned(resolved)):
            ranked.append((prediction.step / resolved.training.global_batch_size, layout))
    order = [layout for _, layout in sorted(ranked)]
    best, rest = order[:count], order[count:]
    spread = min(len(rest), max(2, count // 4))
    return best + [rest[(2 * at + 1) * len(rest) // (2 * spread)] for at in range(spread)]


def expected(config: str, layout: Layout, processes: int) -> str:
    """Why a layout cannot be, or what the planner says of it."""
    resolved, problem = resolve_layout(config, layout, processes)
    if resolved is None:
        return problem
    prediction = planned(resolved)
    if prediction is None:
        return "the planner does not know this machine"
    return f"predicted {prediction.step:.3g} s, {prediction.memory.total / GIB:.3g} GiB"


def read_results(file: Path) -> list[dict[str, str]]:
    """The rows of a sweep; none if there is no file. A last line that was cut off by a kill is left out."""
    if not file.is_file():
        return []
    with open(file, newline="") as opened:
        return [row for row in csv.DictReader(opened) if row.get("layout") is not None and row.get("status")]


def append(file: Path, row: dict[str, str]) -> None:
    """Add a row, in one write; what a kill left of a row before it is dropped."""
    before = read_results(file)
    temporary = file.with_suffix(".tmp")
    with open(temporary, "w", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*before, row])
    temporary.replace(file)
