"""Measure layouts, one job each: the study of Hagemann et al. 2023 (arXiv 2311.05610) as one command.

    python recipes/sweep SWEEP.toml [--output=FOLDER] [--planner-top=K] [--dry-run]
    python recipes/sweep FOLDER                 sweep.toml of a folder that plan.py rank --write-sweep wrote

SWEEP.toml names a run and lists values for some of its keys; all combinations are measured (train_configs/sweeps has an
example), and the runs that it lists one by one. Degrees of -1 and gradient accumulation follow from the rest.
run_train.sh runs every layout for `sweep.steps` steps; the first is not counted. A layout that is invalid, runs out of
memory or time, or crashes gets a row with the reason; the sweep goes on.

FOLDER/results.csv has one row per layout, in the columns that `recipes/plan.py calibrate` reads; results.md is a
table. The same command continues a sweep that was ended; FOLDER gets no rows of another run, or number of processes.
--planner-top measures the K layouts that the planner predicts to be fastest, and for calibration a quarter of that
number spread over the others. --dry-run lists the layouts and their predictions.
"""

import argparse
import csv
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torchllm.config import Count, Positive
from torchllm.config.errors import UserError
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.config.toml_files import read_files
from torchllm.tools.planner.search.auto import planned, why_unplanned
from torchllm.tools.planner.search.explain import GIB
from torchllm.tools.resources import find_config

from .job import COLUMNS, Overrides, measure_layout, resolve_layout

S = TypeVar("S")
WITHOUT_A_STEP = ("run", "cluster", "schedule", "checkpoint", "metrics", "evaluate", "generate", "export")
"""sections of a run that change no step's time"""
ResultRow = dict[str, str]
"""a row of results.csv"""


@dataclass(frozen=True)
class SweepAxis:
    """One key of the run's config, and the values it is set to."""

    key: str = ""
    """dotted, as on the command line: parallel.tp"""
    values: tuple[str, ...] = ()
    """as on the command line"""


@dataclass(frozen=True)
class SweepRun:
    """One layout."""

    overrides: tuple[str, ...] = ()
    """as on the command line: --parallel.tp=2"""


@dataclass(frozen=True)
class Sweep:
    """The layouts to measure, and for how long."""

    config: str = ""
    """the run's TOML, relative to this file"""
    processes: Count = 1
    """ranks of every layout, all on this node if there is no launcher"""
    launcher: str = ""
    """command that starts run_train.sh on the nodes of a job, which share the results' folder: srun --nodes=8"""
    steps: Count = 10
    """steps of each layout; the first is not counted"""
    timeout: Positive = 600.0
    """seconds after which a layout is given up"""
    axes: tuple[SweepAxis, ...] = ()
    """one [[sweep.axes]] table each"""
    runs: tuple[SweepRun, ...] = ()
    """one [[sweep.runs]] table each"""


@dataclass(frozen=True)
class SweepFile:
    """The whole file."""

    sweep: Sweep = field(default_factory=Sweep)


def read_study(schema: type[S], file: str, errors: list[str]) -> S:
    """Read the TOML of a sweep or a ladder; add a line to `errors` for each key that is wrong."""
    layer = read_files(file, errors)
    faults: list[ConfigError] = []
    study: S = read_table(schema, layer.table, faults)
    for fault in faults:
        errors.append(f"{layer.origins.get(fault.path, file)}: {fault.key}: {fault.message}")
    return study


def read_sweep(file: str) -> Sweep:
    """Read a sweep's TOML. SystemExit(2) after one line for everything that is wrong."""
    errors: list[str] = []
    sweep = read_study(SweepFile, file, errors).sweep
    if not errors and not sweep.config:
        errors.append(f"{file}: sweep.config: required key is missing: the run's TOML, relative to this file")
    if not errors and not (Path(file).parent / sweep.config).is_file():
        errors.append(f"{file}: sweep.config: {sweep.config}: no such file in {Path(file).parent}")
    for axis in sweep.axes:
        if not axis.values:
            errors.append(f"{file}: sweep.axes: {axis.key or 'an axis without a key'} has no values")
    if errors:
        print("\n".join(errors), file=sys.stderr)
        raise SystemExit(2)
    return sweep


def combinations(sweep: Sweep) -> list[Overrides]:
    """Return every combination of the axes' values, and the runs; the run itself if there is neither."""
    options_of_axes = [[f"--{axis.key}={value}" for value in axis.values] for axis in sweep.axes]
    runs = [run.overrides for run in sweep.runs]
    return [*itertools.product(*options_of_axes), *runs] if options_of_axes or not runs else runs


def main(arguments: list[str]) -> None:
    """Measure layouts that are not in results.csv yet, then write the summary."""
    options = sweep_parser().parse_args(arguments)
    is_folder = Path(options.sweep).is_dir()
    sweep_file = find_config(str(Path(options.sweep) / "sweep.toml") if is_folder else options.sweep)
    sweep = read_sweep(sweep_file)
    config = os.path.normpath(Path(sweep_file).parent / sweep.config)
    folder = Path(options.output or (options.sweep if is_folder else f"runs/sweep-{Path(sweep_file).stem}"))
    results = folder / "results.csv"
    measured = {row["layout"] for row in read_results(results)}
    layouts = combinations(sweep)
    if options.planner_top is not None and options.planner_top < 1:
        print(f"--planner-top: must be at least 1, not {options.planner_top}", file=sys.stderr)
        raise SystemExit(2)
    if options.planner_top is not None:
        try:
            layouts = promising(config, layouts, sweep.processes, options.planner_top)
        except UserError as error:
            print(f"--planner-top: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    remaining = [overrides for overrides in layouts if " ".join(overrides) not in measured]
    if options.dry_run:
        list_layouts(config, remaining, sweep.processes)
        return
    folder.mkdir(parents=True, exist_ok=True)
    refuse_other_run(config, sweep.processes, folder)
    print(f"{len(remaining)} layouts to measure, {len(measured)} in {results}", flush=True)
    measure_all(sweep, config, remaining, results)
    table = folder / "results.md"
    table.write_text(results_table(read_results(results)))
    print(table)


def refuse_other_run(config: str, processes: int, folder: Path) -> None:
    """Write into a sweep's folder which run its layouts change. SystemExit(2) if the folder has rows of another one.

    A row is known by its overrides alone, which say nothing about the run.
    """
    file = folder / "sweep.json"
    table = read_files(config, []).table
    sections = {name: keys for name, keys in table.items() if name not in WITHOUT_A_STEP}
    content = json.dumps({"processes": processes, "run": sections}, indent=1, sort_keys=True, default=str)
    if (folder / "results.csv").exists() and file.exists() and file.read_text() != content:
        print(
            f"{file}: the rows there are of another run, or number of processes: choose another --output, or remove "
            f"{folder / 'results.csv'}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    file.write_text(content)


def results_table(rows: Sequence[ResultRow]) -> str:
    """Return the measured layouts, fastest first, then how many were not measured and an example of each reason."""
    lines = ["| step s | spread | MFU | GiB | layout |", "|--:|--:|--:|--:|---|"]
    timed = [row for row in rows if row["status"] == "ok"]
    for row in sorted(timed, key=lambda row: float(row["step_time_s"]) / float(row["global_batch_seqs"])):
        mfu = f"{row['mfu_pct']} %" if row["mfu_pct"] else "-"
        memory = row["peak_memory_gib"] or "-"
        lines.append(f"| {row['step_time_s']} | {row['spread_pct']} % | {mfu} | {memory} | `{row['layout']}` |")
    lines += ["", "| status | layouts | for example |", "|---|--:|---|"]
    rows_of_status: dict[str, list[ResultRow]] = {}
    for row in rows:
        rows_of_status.setdefault(row["status"], []).append(row)
    for status, alike in sorted(rows_of_status.items()):
        if status != "ok":
            lines.append(f"| {status} | {len(alike)} | `{alike[0]['layout']}`: {alike[0]['note']} |")
    return "\n".join(lines) + "\n"


def sweep_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", metavar="SWEEP.toml", help="or the folder of a sweep.toml, which gets the results")
    parser.add_argument("--output", default="", metavar="FOLDER", help="results (default: runs/sweep-NAME)")
    parser.add_argument(
        "--planner-top", type=int, metavar="K", help="measure the planner's best K layouts and some of the others"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the layouts with their predictions, or why they are invalid"
    )
    return parser


def list_layouts(config: str, layouts: Sequence[Overrides], processes: int) -> None:
    """Print each layout with its prediction, or why it is invalid."""
    for overrides in layouts:
        print(" ".join(overrides), f"({expected(config, overrides, processes)})")


def measure_all(sweep: Sweep, config: str, layouts: Sequence[Overrides], results: Path) -> None:
    """Measure the layouts one by one and append their rows. SystemExit(130) if interrupted, after ending the job."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a closed output must not end the sweep before its job is ended
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the running job is ended too
    started = time.monotonic()
    jobs = 0  # an invalid layout takes no time
    for number, overrides in enumerate(layouts, start=1):
        try:
            row = measure_layout(
                config, overrides, sweep.processes, sweep.steps, sweep.timeout, results.parent / "job", sweep.launcher
            )
        except KeyboardInterrupt:
            remaining = len(layouts) - number + 1
            print(f"interrupted; the same command continues with the remaining {remaining}", file=sys.stderr)
            raise SystemExit(130) from None
        append(results, row)
        if row["status"] != "invalid":
            jobs += 1
        seconds_per_job = (time.monotonic() - started) / max(1, jobs)
        minutes_left = seconds_per_job * (len(layouts) - number) / 60
        outcome = f"{float(row['step_time_s']):.3f} s" if row["step_time_s"] else row["note"]
        print(
            f"{number}/{len(layouts)}  {row['status']:8s} {row['layout']}  {outcome}  {minutes_left:.0f} min left",
            flush=True,
        )


def promising(config: str, layouts: Sequence[Overrides], processes: int, count: int) -> list[Overrides]:
    """Return the `count` layouts that the planner expects to take least time per sequence, and some of the others.

    The others are a quarter of `count`, at least two, evenly spread from fast to slow.
    """
    predicted: list[tuple[float, Overrides]] = []
    unplanned = ""
    for overrides in layouts:
        resolved = resolve_layout(config, overrides, processes).config
        if resolved is None:
            continue
        prediction = planned(resolved)
        if prediction is not None:
            predicted.append((prediction.step / resolved.training.global_batch_size, overrides))
        elif reason := why_unplanned(resolved):
            unplanned = unplanned or reason
    if not predicted and unplanned:
        raise UserError(f"no layout can be predicted: {unplanned}")
    fastest_first = [overrides for _, overrides in sorted(predicted)]
    best, rest = fastest_first[:count], fastest_first[count:]
    spread = min(len(rest), max(2, count // 4))
    chosen = list(best)
    for index in range(spread):
        chosen.append(rest[(2 * index + 1) * len(rest) // (2 * spread)])  # the middle of each of `spread` equal parts
    return chosen


def expected(config: str, overrides: Overrides, processes: int) -> str:
    """Return the planner's prediction of a layout, or why the layout is invalid."""
    resolved = resolve_layout(config, overrides, processes)
    if resolved.config is None:
        return f"invalid: {resolved.problem}"
    prediction = planned(resolved.config)
    if prediction is None:
        return f"no prediction: {why_unplanned(resolved.config)}"
    return f"predicted {prediction.step:.3g} s, {prediction.memory.total / GIB:.3g} GiB"


def read_results(file: Path) -> list[dict[str, str]]:
    """Return the rows of a sweep; none if there is no file. A last line that a kill cut off is dropped."""
    if not file.is_file():
        return []
    with open(file, newline="") as opened:
        return [row for row in csv.DictReader(opened) if row.get("layout") is not None and row.get("status")]


def append(file: Path, row: dict[str, str]) -> None:
    """Add a row by replacing the whole file, so that no reader sees half a row."""
    rows = [*read_results(file), row]
    temporary = file.with_suffix(".tmp")
    with open(temporary, "w", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(file)
