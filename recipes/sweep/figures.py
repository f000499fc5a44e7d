"""What a sweep found: a Markdown table, and the figures of Hagemann et al. (arXiv 2311.05610, figures 1 to 5).

Each figure compares the values of one setting: for every value the MFU of the best of all layouts that have it,
whatever else they have; their speed where no peak is known. One more has what the planner predicts beside what was
measured, before and after its constants are fitted to that. Without matplotlib there are none.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from torchllm.planner.evidence.calibrate import calibrate, with_constants
from torchllm.planner.evidence.measurements import read_row
from torchllm.planner.evidence.score import score_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[dict[str, str]]

FIGURES = {
    "kernel": "attn_impl rmsnorm_kernel compile",
    "recompute": "act_ckpt",
    "micro_batch": "micro_batch",
    "tensor_pipeline": "tp pp",
    "sequence_parallel": "tp seq_parallel",
}
"""file -> columns whose values are compared"""
WORDS = {
    "attn_impl": "attention",
    "rmsnorm_kernel": "norm kernel",
    "act_ckpt": "recompute",
    "micro_batch": "micro batch",
    "seq_parallel": "sequence parallel",
}
"""columns that are called otherwise in a figure"""
TITLES = {"before": False, "constants fitted to these": True}
"""of the two panels with the planner's predictions -> whether `calibrate` comes first"""


def summarize(rows: Rows, folder: Path) -> list[Path]:
    """Write results.md and the figures; the files written."""
    table = folder / "results.md"
    table.write_text(results_table(rows))
    return [table, *draw_figures(rows, folder)]


def results_table(rows: Rows) -> str:
    """The measured layouts, fastest first, then what was not measured and why."""
    timed = sorted((row for row in rows if row["status"] == "ok"), key=_per_sequence)
    lines = ["| step s | spread | MFU | GiB | layout |", "|--:|--:|--:|--:|---|"]
    for row in timed:
        mfu = f"{row['mfu_pct']} %" if row["mfu_pct"] else "-"
        seconds, memory = f"{row['step_time_s']} | {row['spread_pct']} %", row["peak_memory_gib"] or "-"
        lines.append(f"| {seconds} | {mfu} | {memory} | `{row['layout']}` |")
    lines += ["", "| status | layouts | for example |", "|---|--:|---|"]
    for status in sorted({row["status"] for row in rows} - {"ok"}):
        of = [row for row in rows if row["status"] == status]
        lines.append(f"| {status} | {len(of)} | `{of[0]['layout']}`: {of[0]['note']} |")
    return "\n".join(lines) + "\n"


def _per_sequence(row: dict[str, str]) -> float:
    return float(row["step_time_s"]) / float(row["global_batch_seqs"])


def best_of_the_rest(rows: Rows, columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """For each combination of the columns' values, the layout that has it and takes least time a sequence."""
    found: dict[str, dict[str, str]] = {}
    for row in sorted((row for row in rows if row["status"] == "ok"), key=_per_sequence):
        found.setdefault(", ".join(f"{WORDS.get(column, column)} {row[column]}" for column in columns), row)
    return dict(sorted(found.items()))


def draw_figures(rows: Rows, folder: Path) -> list[Path]:
    """One for every setting of which there are two values, and the planner's; empty without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    drawn: dict[str, Figure] = {}
    for name, columns in FIGURES.items():
        best = best_of_the_rest(rows, columns.split())
        if len(best) > 1:
            drawn[name] = Figure(figsize=(6, 1 + 0.4 * len(best)), layout="constrained")
            _bars(drawn[name].subplots(), best)
    compared = {title: predictions(rows, fitted) for title, fitted in TITLES.items()}
    if all(compared.values()):
        drawn["predicted"] = Figure(figsize=(10, 5), layout="constrained")
        panels = drawn["predicted"].subplots(1, 2, sharex=True, sharey=True)
        for axes, (title, of) in zip(panels, compared.items(), strict=True):
            _points(axes, title, of)
    files = [folder / f"{name}.png" for name in drawn]
    for file, figure in zip(files, drawn.values(), strict=True):
        figure.savefig(file)
    return files


def _bars(axes: "Axes", best: dict[str, dict[str, str]]) -> None:
    from matplotlib.ticker import PercentFormatter

    if all(row["mfu_pct"] for row in best.values()):
        speeds, of_what = [float(row["mfu_pct"]) / 100 for row in best.values()], "MFU"
    else:
        fastest = min(map(_per_sequence, best.values()))
        speeds, of_what = [fastest / _per_sequence(row) for row in best.values()], "speed, over the best's,"
    axes.bar_label(axes.barh(list(best), speeds), [f"{speed:.1%}" for speed in speeds], padding=3)
    axes.set_xlim(0, 1.15 * max(speeds))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.invert_yaxis()
    axes.set_xlabel(f"{of_what} of the best layout that has it")


def _points(axes: "Axes", title: str, compared: Sequence[tuple[float, float, str]]) -> None:
    from matplotlib.ticker import LogLocator

    for kind in sorted({kind for _, _, kind in compared}):
        of = [(measured, predicted) for measured, predicted, its in compared if its == kind]
        axes.scatter([measured for measured, _ in of], [predicted for _, predicted in of], label=kind, s=18)
    ends = [min(min(pair[:2]) for pair in compared), max(max(pair[:2]) for pair in compared)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, s a sequence", ylabel="predicted, s a sequence")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    off = mean(abs(predicted / measured - 1) for measured, predicted, _ in compared)
    axes.set_title(f"{title}: off by {off:.0%} in the mean")
    axes.legend()


def predictions(rows: Rows, fitted: bool = False) -> list[tuple[float, float, str]]:
    """Measured and predicted seconds a sequence of each timed layout that the planner can read, and what it is.

    fitted: by a planner whose constants `calibrate` has fitted to these rows.
    """
    read = [row for row in (read_row(row) for row in rows if row["status"] == "ok") if row.case is not None]
    if fitted and read:
        constants, _, _ = calibrate(read)
        read = [row._replace(case=with_constants(row.case, constants)) for row in read if row.case is not None]
    found = []
    for one in score_rows(read):
        assert one.prediction is not None
        assert one.row.case is not None
        cells = one.row.cells
        kind = f"tp {one.row.case.parallel.tp}, recompute {cells['act_ckpt']}"
        found.append((_per_sequence(cells), one.prediction.step / float(cells["global_batch_seqs"]), kind))
    return found
