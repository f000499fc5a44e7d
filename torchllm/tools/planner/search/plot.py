"""Draw a search: step times of the best layouts by term, with intervals, and MFU over memory. No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchllm.config.errors import UserError
from torchllm.tools.planner.search.explain import GIB
from torchllm.tools.planner.search.layouts import Job
from torchllm.tools.planner.search.search import CloudPoint, Found, Ranked
from torchllm.tools.planner.validity import judge

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TERMS = (
    "matmul",
    "attention",
    "elementwise",
    "launch",
    "host",
    "ends",
    "recompute",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "fsdp",
    "pipeline parallel",
    "bubble",
    "gradient reduction",
    "weight gather",
    "optimizer",
)
"""terms of a step in the order of the bars; each has its own color, the same in every plot"""
SMALLEST = 1 / 500
"""share of the slowest step below which a term is not drawn"""

ROW_MARK = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "black", "alpha": 0.8}
"""how the number of a row is drawn in the cloud"""


def plot(job: Job, outcome: Found, file: str, title: str) -> None:
    """Write the picture to `file`. UserError if matplotlib is missing."""
    draw(job, outcome, title).savefig(file)


def draw(job: Job, outcome: Found, title: str) -> "Figure":
    """Return the picture. UserError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'torchllm[plot]'") from None
    figure = Figure(figsize=(16, 7), layout="constrained")
    figure.suptitle(title)
    bars, cloud = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_terms(bars, job, outcome.best)
    _draw_cloud(cloud, job, outcome)
    return figure


def _draw_terms(axes: "Axes", job: Job, best: Sequence[Ranked]) -> None:
    """Draw one bar per layout, the fastest on top, in parts by term, and the interval of its step time."""
    from matplotlib import colormaps

    colors = colormaps["tab20"]
    labels = [f"{number}. {_two_lines(ranked.layout.text())}" for number, ranked in enumerate(best, start=1)]
    longest = max(ranked.prediction.step for ranked in best)
    starts = [0.0] * len(best)
    for index, name in enumerate(TERMS):
        seconds = [ranked.prediction.terms.get(name, 0.0) for ranked in best]
        if max(seconds) > SMALLEST * longest:
            axes.barh(labels, seconds, left=starts, label=name, color=colors(index))
            starts = [start + width for start, width in zip(starts, seconds, strict=True)]
    steps = [ranked.prediction.step for ranked in best]
    intervals = [judge(job.case(ranked.layout), ranked.prediction).seconds for ranked in best]
    below = [step - low for step, (low, _) in zip(steps, intervals, strict=True)]
    above = [high - step for step, (_, high) in zip(steps, intervals, strict=True)]
    axes.errorbar(steps, labels, xerr=[below, above], fmt="none", color="black", capsize=3, label="in 9 of 10 cases")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="small")
    axes.set_title("step time of the best layouts")
    axes.set_xlabel("seconds per step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=5, fontsize="small", title="where the time goes")


def _two_lines(layout: str) -> str:
    """Break a layout's text near its middle."""
    parts = layout.split(", ")
    middle = (len(parts) + 1) // 2
    return ", ".join(parts[:middle]) + ",\n" + ", ".join(parts[middle:])


def _draw_cloud(axes: "Axes", job: Job, outcome: Found) -> None:
    """Draw one point per layout that was looked at: memory, and the highest MFU it can have."""
    fitting = [point for point in outcome.cloud if point.fits]
    too_large = [point for point in outcome.cloud if not point.fits]
    _draw_points(axes, fitting, "tab:blue", "fits in memory")
    _draw_points(axes, too_large, "tab:red", "does not fit")
    for number, (_, prediction) in enumerate(outcome.best, start=1):
        place = (prediction.memory.total / GIB, prediction.mfu)
        axes.annotate(str(number), place, fontsize="small", weight="bold", ha="center", va="center", bbox=ROW_MARK)
    axes.axvline(job.hardware.memory / GIB, color="gray", linestyle="--", label="memory of one GPU")
    axes.set_title("layouts predicted one by one; numbers: rows on the left")
    axes.set_xlabel("peak memory, GiB per GPU")
    axes.set_ylabel("MFU (upper bound)")
    axes.legend(fontsize="small")


def _draw_points(axes: "Axes", points: Sequence[CloudPoint], color: str, label: str) -> None:
    if points:
        memory = [point.memory / GIB for point in points]
        mfu = [point.mfu for point in points]
        axes.scatter(memory, mfu, s=6, color=color, label=label)
