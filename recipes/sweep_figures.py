"""What a sweep found: a Markdown table, and the figures of Hagemann et al. (arXiv 2311.05610, figures 1 to 5).

Each figure compares the values of one setting: for every value the MFU of the best of all layouts that have it,
whatever else they have; their speed where no peak is known. One more has what the planner predicts beside what was
measured. Without matplotlib there are none.
"""

from collections.abc import Sequence
from pathlib import Path

from torchllm.planner.measurements import read_row
from torchllm.planner.score import score_rows

Rows = Sequence[dict[str, str]]

FIGURES = {
    "kernel": "attn_impl rmsnorm_kernel compile",
    "recompute": "act_ckpt",
    "micro_batch": "micro_batch",
    "tensor_pipeline": "tp pp",
    "sequence_parallel": "seq_parallel",
}
"""file -> columns whose values are compared"""


def summarize(rows: Rows, folder: Path) -> list[Path]:
    """Write results.md and the figures; the files written."""
    table = folder / "results.md"
    table.write_text(markdown(rows))
    return [table, *figures(rows, folder)]


def markdown(rows: Rows) -> str:
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
        found.setdefault(", ".join(f"{column} {row[column]}" for column in columns), row)
    return dict(sorted(found.items()))


def figures(rows: Rows, folder: Path) -> list[Path]:
    """One for every setting of which there are two values, and the planner's; empty without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    except ImportError:
        return []
    written = []
    for name, columns in FIGURES.items():
        best = best_of_the_rest(rows, columns.split())
        if len(best) < 2:
            continue
        figure = Figure(figsize=(6, 1 + 0.4 * len(best)), layout="constrained")
        axes = figure.subplots()
        if all(row["mfu_pct"] for row in best.values()):
            speeds, of_what = [float(row["mfu_pct"]) / 100 for row in best.values()], "MFU"
        else:
            fastest = min(_per_sequence(row) for row in best.values())
            speeds, of_what = [fastest / _per_sequence(row) for row in best.values()], "speed, over the best's,"
        bars = axes.barh(list(best), speeds)
        axes.bar_label(bars, [f"{speed:.1%}" for speed in speeds], padding=3)
        axes.set_xlim(0, 1.15 * max(speeds))
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.invert_yaxis()
        axes.set_xlabel(f"{of_what} of the best layout that has it")
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1])
    compared = predictions(rows)
    if compared:
        figure = Figure(figsize=(6, 5.5), layout="constrained")
        axes = figure.subplots()
        for kind in sorted({kind for _, _, kind in compared}):
            of = [(measured, predicted) for measured, predicted, its in compared if its == kind]
            axes.scatter([measured for measured, _ in of], [predicted for _, predicted in of], label=kind, s=18)
        ends = [min(min(pair[:2]) for pair in compared), max(max(pair[:2]) for pair in compared)]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="measured, s a sequence", ylabel="predicted, s a sequence")
        axes.legend()
        written.append(folder / "predicted.png")
        figure.savefig(written[-1])
    return written


def predictions(rows: Rows) -> list[tuple[float, float, str]]:
    """Measured and predicted seconds a sequence of each timed layout that the planner can read, and what it is."""
    found = []
    for one in score_rows(read_row(row) for row in rows if row["status"] == "ok"):
        if one.prediction is not None and one.row.case is not None:
            cells = one.row.cells
            kind = f"tp {one.row.case.parallel.tp}, recompute {cells['act_ckpt']}"
            found.append((_per_sequence(cells), one.prediction.step / float(cells["global_batch_seqs"]), kind))
    return found
