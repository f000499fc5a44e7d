"""Say how far a prediction can be trusted: whether similar measurements checked it, and an interval. No torch.

The ranges are those of the published measurements that the constants were fitted and checked on (BENCHMARKS.md, "The
planner against measurements"); the widths are the 90th percentile of their errors, of whole data sets left out.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torchllm.planner.case import Case
from torchllm.planner.predict import Prediction
from torchllm.spec.flops import parameter_count


class Range(NamedTuple):
    """What was measured on one kind of GPU: the smallest and the largest value of each."""

    gpu: str
    parameters: tuple[float, float]
    sequence_length: tuple[int, int]
    gpus: tuple[int, int]
    tp: tuple[int, int]


RANGES = (
    Range("A100", (1.2e8, 1.05e12), (512, 65536), (8, 3072), (1, 16)),
    Range("H100", (1.2e8, 3.1e10), (512, 65536), (8, 512), (1, 8)),
)
INSIDE, OUTSIDE = 0.15, 0.35
"""half widths of the interval of a step time, as shares of it"""
MEMORY = 0.08
"""half width of the interval of memory, as a share of it"""
NEVER_MEASURED = ("GPipe", "LoopedBFS", "DualPipeV")
"""schedules of which no measurement is published"""


class Verdict(NamedTuple):
    """How far a prediction can be trusted."""

    fits: str
    """"fits", "may fit" (the device's memory lies in the interval) or "does not fit\""""
    seconds: tuple[float, float]
    """interval of the step time"""
    range: str
    """whether the layout is inside the validated range, or what of it is not"""


def judge(case: Case, prediction: Prediction) -> Verdict:
    """Return how far a prediction can be trusted."""
    outside = list(_outside(case))
    width = OUTSIDE if outside else INSIDE
    share = prediction.memory.total / case.hardware.memory
    if share * (1 + MEMORY) <= 1:
        fits = "fits"
    elif share <= 1:
        fits = "may fit"
    else:
        fits = "does not fit"
    seconds = (prediction.step / (1 + width), prediction.step * (1 + width))
    described = "inside the validated range"
    if outside:
        described = "outside the validated range: " + ", ".join(outside)
    return Verdict(fits, seconds, described)


def _outside(case: Case) -> Iterator[str]:
    """Yield what of a layout lies outside the measurements."""
    measured = next((measured for measured in RANGES if measured.gpu in case.hardware.gpu), None)
    if measured is None:
        yield f"GPU {case.hardware.gpu}"
        return
    parallel = case.parallel
    sizes = {
        "parameters": (parameter_count(case.model), measured.parameters),
        "sequence length": (case.training.sequence_length, measured.sequence_length),
        "GPUs": (case.ranks, measured.gpus),
        "tp": (parallel.tp, measured.tp),
    }
    for name, (value, (smallest, largest)) in sizes.items():
        if not smallest <= value <= largest:
            yield f"{name} {value:,}"
    if parallel.cp > 1:
        yield "cp"
    if parallel.schedule in NEVER_MEASURED:
        yield f"schedule {parallel.schedule}"
    if case.kernels.float8:
        yield "float8"
