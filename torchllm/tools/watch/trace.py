"""Traces on request (`metrics.profile_steps`): a file per step and rank for a viewer, and one page that sums them up.

RUN_FOLDER/profile/step-10-rank-0.json.gz opens in ui.perfetto.dev. summary.md lists the parts of each step, and torch's
table of the operators that took most time on rank 0.
"""

from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from torchllm.runtime.tolerance import Tolerance

OPERATORS_SHOWN = 20


def parse_steps(text: str) -> range:
    """Parse `metrics.profile_steps`: "10:13" means steps 10, 11 and 12; "" means no step."""
    first, _, end = text.partition(":")
    return range(int(first or 0), int(end or 0))


class TraceWriter:
    """Writes the traces of one rank for the steps in `steps`."""

    def __init__(self, folder: Path, steps: range, rank: int) -> None:
        self.folder = folder / "profile"
        self.tolerance = Tolerance(str(self.folder))
        self.steps = steps
        self.rank = rank
        self.page = ""

    def write(self, step: int, profiler: profile, parts: dict[str, float]) -> None:
        """Write the trace of a step; on rank 0 also the page, of all steps so far.

        parts: seconds by part of the step, the mean over ranks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / f"step-{step}-rank-{self.rank}.json.gz"))
        if self.rank == 0:
            self.page += describe_step(step, profiler, parts)
            (self.folder / "summary.md").write_text(self.page)


def describe_step(step: int, profiler: profile, parts: dict[str, float]) -> str:
    """Return the section of the page about a step, in Markdown. parts: as in `TraceWriter.write`."""
    seconds = sum(parts.values())
    lines = [f"# Step {step}: {seconds:.4g} s, the mean over ranks", ""]
    for name, part in sorted(parts.items(), key=lambda item: -item[1]):
        if part:
            lines.append(f"- {name}: {part:.4g} s, {part / seconds:.1%}")
    device = "device" if ProfilerActivity.CUDA in profiler.activities else "cpu"
    table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=OPERATORS_SHOWN)
    lines += ["", f"The {OPERATORS_SHOWN} operators or kernels that took most time of their own on rank 0:", ""]
    return "\n".join([*lines, "```text", table, "```", "", ""])
