"""A picture of a search: time by term of the best layouts; memory against MFU of all looked at. No torch."""

from torchllm.errors import UserError
from torchllm.planner.layouts import Job
from torchllm.planner.search import Found

GIB = 2**30


def plot(job: Job, found: Found, file: str) -> None:
    """Write it. UserError if matplotlib is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'torchllm[plot]'") from None
    figure = Figure(figsize=(14, 6), layout="constrained")
    bars, cloud = figure.subplots(1, 2)
    names = sorted({name for one in found.best for name in one.prediction.terms})
    labels = [one.layout.text() for one in found.best]
    left = [0.0] * len(labels)
    for name in names:
        widths = [one.prediction.terms.get(name, 0.0) for one in found.best]
        bars.barh(labels, widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    bars.invert_yaxis()
    bars.set_xlabel("seconds of a step")
    bars.legend(fontsize="small")
    for fits, color in ((True, "tab:blue"), (False, "tab:red")):
        points = [(held / GIB, mfu) for held, mfu, does in found.cloud if does == fits]
        cloud.scatter(*zip(*points, strict=True), s=6, color=color) if points else None
    cloud.axvline(job.hardware.memory / GIB, color="gray", linestyle="--")
    cloud.set_xlabel("GiB of a GPU")
    cloud.set_ylabel("MFU at best")
    figure.savefig(file)
