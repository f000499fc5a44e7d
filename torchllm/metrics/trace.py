"""Traces on request (`metrics.profile_steps`): a file a step and rank for a viewer, and one page that sums them up.

RUN_FOLDER/profile/step-10-rank-0.json.gz opens in ui.perfetto.dev; summary.md has the parts of the steps and the
operators that took most time on rank 0.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from torch.profiler import profile

TOP = 20


def steps_of(text: str) -> range:
    """Of `metrics.profile_steps`: "10:13" is steps 10, 11 and 12; empty: none."""
    first, _, end = text.partition(":")
    return range(int(first or 0), int(end or 0))


class Traces:
    """Those of one rank; `steps`: of which steps."""

    def __init__(self, folder: Path, steps: range, rank: int) -> None:
        self.folder, self.steps, self.rank = folder / "profile", steps, rank
        self.kept: list[tuple[int, dict[str, float]]] = []
        self.operators: dict[str, tuple[float, int]] = {}

    def keep(self, step: int, profiler: profile, parts: dict[str, float]) -> None:
        """Write a step's trace, and after the last one the page. parts: seconds, the mean over ranks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / f"step-{step}-rank-{self.rank}.json.gz"))
        if self.rank:
            return
        self.kept.append((step, parts))
        for one in profiler.key_averages():
            seconds = (one.self_device_time_total or one.self_cpu_time_total) / 1e6
            before, count = self.operators.get(one.key, (0.0, 0))
            self.operators[one.key] = before + seconds, count + one.count
        (self.folder / "summary.md").write_text(self.summary())

    def summary(self) -> str:
        """The page, in Markdown."""
        seconds = [sum(parts.values()) for _, parts in self.kept]
        numbers = ", ".join(str(step) for step, _ in self.kept)
        lines = [f"# Steps {numbers}: {mean(seconds):.4g} s each, the mean over ranks", ""]
        lines += table(("part", "s a step", "share"), self._parts(mean(seconds)))
        lines += ["", f"The {TOP} operators or kernels that took most time of their own on rank 0:", ""]
        ranked = sorted(self.operators.items(), key=lambda item: -item[1][0])[:TOP]
        each = len(self.kept)
        rows = [(f"`{name[:80]}`", f"{s / each:.4g}", f"{count / each:.0f}") for name, (s, count) in ranked]
        return "\n".join([*lines, *table(("operator", "s a step", "calls"), rows)]) + "\n"

    def _parts(self, seconds: float) -> list[tuple[str, str, str]]:
        names = {name for _, parts in self.kept for name in parts}
        means = {name: mean(parts.get(name, 0.0) for _, parts in self.kept) for name in names}
        ranked = sorted(means.items(), key=lambda item: -item[1])
        return [(name, f"{part:.4g}", f"{part / seconds:.1%}") for name, part in ranked if part]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first column is text."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
