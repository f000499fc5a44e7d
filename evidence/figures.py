"""Draw a sweep as the figures of Hagemann et al. 2023 (arXiv 2311.05610, figures 1 to 5). It needs matplotlib.

Each figure compares the values of one setting: for every value, the MFU of the best layout that has it, whatever its
other settings (or its speed, where no peak is known). One more figure shows predicted over measured times, before and
after the planner's constants are fitted to the sweep.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from torchllm.tools.planner.calibration.calibrate import calibrate
from torchllm.tools.planner.calibration.fit import with_constants
from torchllm.tools.planner.calibration.rows import read_row
from torchllm.tools.planner.predict import predict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ResultRow = dict[str, str]


class ComparedSetting(NamedTuple):
    """One figure: which columns' values it compares, and its title."""

    columns: str
    """names of columns, separated by spaces"""
    title: str


FIGURES = {
    "kernel": ComparedSetting("attn_impl rmsnorm_kernel compile", "attention and norm kernels, compilation"),
    "recompute": ComparedSetting("act_ckpt", "recomputation"),
    "micro_batch": ComparedSetting("micro_batch", "micro batch size"),
    "tensor_pipeline": ComparedSetting("tp pp", "tensor and pipeline parallelism"),
    "sequence_parallel": ComparedSetting("tp seq_parallel", "sequence parallelism"),
}
"""file name -> the settings that the figure compares"""
COLUMN_WORDS = {
    "attn_impl": "attention",
    "rmsnorm_kernel": "fused norm",
    "act_ckpt": "recompute",
    "micro_batch": "micro batch",
    "seq_parallel": "sequence parallel",
}
"""names of columns in figures, if they differ from the table's"""
SWITCHES = ("rmsnorm_kernel", "compile", "seq_parallel")
"""columns whose 0 and 1 mean off and on"""


class Comparison(NamedTuple):
    """One layout, measured and predicted."""

    measured: float
    """seconds per sequence"""
    predicted: float
    """seconds per sequence"""
    kind: str
    """the settings that a figure tells apart by color"""


def write_figures(source: str, folder: str) -> str:
    """Draw the figures of a sweep's results.csv into a folder; return the files written. OSError if it is missing."""
    with open(source, newline="") as opened:
        rows = list(csv.DictReader(opened))
    Path(folder).mkdir(parents=True, exist_ok=True)
    return "\n".join(str(file) for file in draw_figures(rows, Path(folder)))


def fastest_first(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows that were timed, the least time per sequence first."""
    return sorted((row for row in rows if row["status"] == "ok"), key=seconds_per_sequence)


def seconds_per_sequence(row: ResultRow) -> float:
    """Return the measured time of a step over its sequences."""
    return float(row["step_time_s"]) / float(row["global_batch_seqs"])


def best_by_setting(rows: Sequence[ResultRow], columns: Sequence[str]) -> dict[str, ResultRow]:
    """Return the fastest layout of each combination of the columns' values."""
    best: dict[str, ResultRow] = {}
    for row in fastest_first(rows):
        label = ", ".join(describe_value(row, column) for column in columns)
        best.setdefault(label, row)
    return dict(sorted(best.items()))


def describe_value(row: ResultRow, column: str) -> str:
    """Return a cell in words: "sequence parallel on"."""
    value = row[column]
    if column in SWITCHES:
        value = {"0": "off", "1": "on"}.get(value, value)
    return f"{COLUMN_WORDS.get(column, column)} {value}"


def draw_figures(rows: Sequence[ResultRow], folder: Path) -> list[Path]:
    """Draw a figure for every setting that has two values or more, and the planner's. Return the files written."""
    files = []
    for name, (columns, title) in FIGURES.items():
        best = best_by_setting(rows, columns.split())
        if len(best) > 1:
            files.append(folder / f"{name}.png")
            setting_figure(best, title).savefig(files[-1])
    default = compare_predictions(rows)
    if default:
        files.append(folder / "predicted.png")
        run = run_in_words(fastest_first(rows)[0])
        prediction_figure(default, compare_predictions(rows, fitted=True), run).savefig(files[-1])
    return files


def run_in_words(row: ResultRow) -> str:
    """Return which run a row is a layout of."""
    size = float(row["n_params"] or 0)
    parameters = f" with {size / 1e6:,.3g} M parameters" if size else ""
    return f"{row['model']}{parameters} on {row['gpus']} x {row['gpu']}, {row['global_batch_seqs']} sequences per step"


def setting_figure(best: dict[str, ResultRow], title: str) -> "Figure":
    """Draw one bar per value of a setting."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 1.6 + 0.4 * len(best)), layout="constrained")
    axes = figure.subplots()
    rows = list(best.values())
    if all(row["mfu_pct"] for row in rows):
        speeds = [float(row["mfu_pct"]) / 100 for row in rows]
        quantity = "MFU"
    else:
        fastest = min(map(seconds_per_sequence, rows))
        speeds = [fastest / seconds_per_sequence(row) for row in rows]
        quantity = "speed relative to the fastest"
    bars = axes.barh(list(best), speeds)
    axes.bar_label(bars, [f"{speed:.1%}" for speed in speeds], padding=3)
    axes.set_xlim(0, 1.15 * max(speeds))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.invert_yaxis()
    axes.set_xlabel(f"{quantity}, best layout with each value")
    figure.suptitle(f"{title}\n{run_in_words(rows[0])}", fontsize="medium")
    return figure


def prediction_figure(default: Sequence[Comparison], fitted: Sequence[Comparison], run: str) -> "Figure":
    """Draw predicted over measured times, with the planner's constants and with constants fitted to the sweep.

    run: description in the title.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4), layout="constrained")
    default_axes, fitted_axes = figure.subplots(1, 2, sharex=True, sharey=True)
    draw_points(default_axes, "before fitting", default)
    draw_points(fitted_axes, "after fitting", fitted)
    figure.suptitle(f"predicted and measured step times, before and after fitting the planner's constants\n{run}")
    return figure


def draw_points(axes: "Axes", title: str, comparisons: Sequence[Comparison]) -> None:
    """Draw one point per layout, in a color per kind, and the diagonal of exact predictions."""
    from matplotlib import colormaps
    from matplotlib.ticker import LogLocator

    colors = colormaps["tab20"]
    for index, kind in enumerate(sorted({comparison.kind for comparison in comparisons})):
        measured = [comparison.measured for comparison in comparisons if comparison.kind == kind]
        predicted = [comparison.predicted for comparison in comparisons if comparison.kind == kind]
        axes.scatter(measured, predicted, label=kind, s=18, color=colors(index % colors.N))
    seconds = [value for comparison in comparisons for value in (comparison.measured, comparison.predicted)]
    ends = (min(seconds), max(seconds))
    axes.plot(ends, ends, color="black", linewidth=0.8, label="prediction = measurement")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured, seconds per sequence")
    axes.set_ylabel("predicted, seconds per sequence")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    error = mean(abs(comparison.predicted / comparison.measured - 1) for comparison in comparisons)
    axes.set_title(f"{title}: mean error {error:.0%}")
    axes.legend(fontsize="small")


def compare_predictions(rows: Sequence[ResultRow], fitted: bool = False) -> list[Comparison]:
    """Compare measured and predicted times of the timed layouts that the planner can read.

    `fitted`: by a planner whose constants `calibrate` has fitted to these rows.
    """
    readable = [read_row(row) for row in rows if row["status"] == "ok"]
    readable = [row for row in readable if row.case is not None]
    constants = calibrate(readable).constants if fitted and readable else None
    comparisons = []
    for row in readable:
        assert row.case is not None
        case = with_constants(row.case, constants) if constants else row.case
        kind = f"tp {case.parallel.tp}, recompute {row.cells['act_ckpt']}"
        predicted = predict(case).step / case.training.global_batch_size
        comparisons.append(Comparison(seconds_per_sequence(row.cells), predicted, kind))
    return comparisons
