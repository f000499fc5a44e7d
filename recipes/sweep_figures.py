"""What a sweep found: a Markdown table, and the figures of Hagemann et al. (arXiv 2311.05610, figures 1 to 5).

Each figure compares the values of one setting: for every value the best MFU of all layouts that have it, whatever else
they have. Without matplotlib there are none.
"""

from collections.abc import Sequence
from pathlib import Path

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
        lines.append(
            f"| {row['step_time_s']} | {row['spread_pct']} % | {mfu} | {row['peak_memory_gib']} | `{row['layout']}` |"
        )
    lines += ["", "| status | layouts | for example |", "|---|--:|---|"]
    for status in sorted({row["status"] for row in rows} - {"ok"}):
        of = [row for row in rows if row["status"] == status]
        lines.append(f"| {status} | {len(of)} | `{of[0]['layout']}`: {of[0]['note']} |")
    return "\n".join(lines) + "\n"


def _per_sequence(row: dict[str, str]) -> float:
    return float(row["step_time_s"]) / float(row["global_batch_seqs"])


def best_of_the_rest(rows: Rows, columns: Sequence[str]) -> dict[str, float]:
    """For each combination of the columns' values, the least seconds a sequence of the layouts that have it."""
    found: dict[str, float] = {}
    for row in rows:
        if row["status"] == "ok":
            value = ", ".join(f"{column} {row[column]}" for column in columns)
            found[value] = min(found.get(value, float("inf")), _per_sequence(row))
    return dict(sorted(found.items()))


def figures(rows: Rows, folder: Path) -> list[Path]:
    """One for every setting of which there are two values; empty without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    written = []
    for name, columns in FIGURES.items():
        best = best_of_the_rest(rows, columns.split())
        if len(best) < 2:
            continue
        figure = Figure(figsize=(6, 1 + 0.4 * len(best)), layout="constrained")
        axes = figure.subplots()
        fastest = min(best.values())
        axes.barh(list(best), [fastest / seconds for seconds in best.values()])
        axes.invert_yaxis()
        axes.set_xlabel("speed of the best layout that has it, over that of the best of all")
        file = folder / f"{name}.png"
        figure.savefig(file)
        written.append(file)
    return written
