"""A picture of a search: time by term of the best layouts; memory against MFU of all looked at. No torch."""

from itertools import chain

from torchllm.config.errors import UserError
from torchllm.planner.search.layouts import Job
from torchllm.planner.search.search import Found

GIB = 2**30


def plot(job: Job, found: Found, file: str) -> None:
    """Write it. UserError if matplotlib is not there."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'torchllm[plot]'") from None
    figure = Figure(figsize=(14, 6), layout="constrained")
    bars, cloud = figure.subplots(1, 2)
    terms = [one.prediction.terms for one in found.best]
    most = {name: max(of.get(name, 0.0) for of in terms) for name in dict.fromkeys(chain(*terms))}
    step = max(one.prediction.step for one in found.best)
    names = sorted((name for name in most if most[name] > step / 500), key=lambda name: -most[name])
    bars.set_prop_cycle(color=[colormaps["tab20"](number) for number in range(20)])
    labels = [one.layout.text() for one in found.best]
    left = [0.0] * len(labels)
    for name in names:
        widths = [of.get(name, 0.0) for of in terms]
        bars.barh(labels, widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    bars.invert_yaxis()
    bars.set_xlabel("seconds of a step")
    figure.legend(loc="outside lower center", ncols=7, fontsize="small")
    for fits, color in ((True, "tab:blue"), (False, "tab:red")):
        points = [(held / GIB, mfu) for held, mfu, does in found.cloud if does == fits]
        cloud.scatter(*zip(*points, strict=True), s=6, color=color) if points else None
    cloud.axvline(job.hardware.memory / GIB, color="gray", linestyle="--")
    cloud.set_xlabel("GiB of a GPU")
    cloud.set_ylabel("MFU at best")
    figure.savefig(file)
