"""Traces on request (`metrics.profile_steps`): a file per step and rank for a viewer, and one page that sums them up.

RUN_FOLDER/profile/step-10-rank-0.json.gz opens in ui.perfetto.dev. summary.md lists the parts of the steps, and the
operators that took most time on rank 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from torch.profiler import profile

from torchllm.runtime.tolerance import Tolerance

OPERATORS_SHOWN = 20


def parse_steps(text: str) -> range:
    """Parse `metrics.profile_steps`: "10:13" means steps 10, 11 and 12; "" means no step."""
    first, _, end = text.partition(":")
    return range(int(first or 0), int(end or 0))


@dataclass
class OperatorTotal:
    """What an operator or kernel took in all traced steps."""

    seconds: float = 0.0
    """its own, without the operators that it calls"""
    calls: int = 0


class TraceWriter:
    """Writes the traces of one rank for the steps in `steps`."""

    def __init__(self, folder: Path, steps: range, rank: int) -> None:
        self.folder = folder / "profile"
        self.tolerance = Tolerance(str(self.folder))
        self.steps = steps
        self.rank = rank
        self.parts_of_step: dict[int, dict[str, float]] = {}
        self.operators: dict[str, OperatorTotal] = {}

    def write(self, step: int, profiler: profile, parts: dict[str, float]) -> None:
        """Write the trace of a step; on rank 0 also the page, of all steps so far.

        parts: seconds by part of the step, the mean over ranks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / f"step-{step}-rank-{self.rank}.json.gz"))
        if self.rank != 0:
            return
        self.parts_of_step[step] = parts
        for operator in profiler.key_averages():
            total = self.operators.setdefault(operator.key, OperatorTotal())
            microseconds = operator.self_device_time_total or operator.self_cpu_time_total
            total.seconds += microseconds / 1e6
            total.calls += operator.count
        (self.folder / "summary.md").write_text(self.summary())

    def summary(self) -> str:
        """Return the page, in Markdown."""
        steps = ", ".join(str(step) for step in self.parts_of_step)
        seconds = mean(sum(parts.values()) for parts in self.parts_of_step.values())
        lines = [
            f"# Steps {steps}: {seconds:.4g} s per step, the mean over ranks",
            "",
            *markdown_table(("part", "s per step", "share"), self._part_rows(seconds)),
            "",
            f"The {OPERATORS_SHOWN} operators or kernels that took most time of their own on rank 0:",
            "",
            *markdown_table(("operator", "s per step", "calls per step"), self._operator_rows()),
        ]
        return "\n".join(lines) + "\n"

    def _part_rows(self, step_seconds: float) -> list[tuple[str, str, str]]:
        totals: dict[str, float] = {}
        for parts in self.parts_of_step.values():
            for name, seconds in parts.items():
                totals[name] = totals.get(name, 0.0) + seconds
        rows = []
        for name, total in sorted(totals.items(), key=lambda item: -item[1]):
            if total:
                seconds = total / len(self.parts_of_step)
                rows.append((name, f"{seconds:.4g}", f"{seconds / step_seconds:.1%}"))
        return rows

    def _operator_rows(self) -> list[tuple[str, str, str]]:
        steps = len(self.parts_of_step)
        slowest_first = sorted(self.operators.items(), key=lambda item: -item[1].seconds)
        rows = []
        for name, total in slowest_first[:OPERATORS_SHOWN]:
            rows.append((f"`{name[:80]}`", f"{total.seconds / steps:.4g}", f"{total.calls / steps:.0f}"))
        return rows


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first column is text, the others are numbers."""
    alignment = ["---"] + ["--:"] * (len(header) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in [header, alignment, *rows]]
