"""How far a prediction can be trusted: whether measurements like it were there to check it, and an interval. No torch.

The ranges are those of the published measurements that the constants were fitted and checked on (BENCHMARKS.md, "The
planner against measurements"); the widths are the 90th percentile of their errors, of whole data sets left out.
"""

from typing import NamedTuple

from torchllm.planner.case import Case
from torchllm.planner.predict import Prediction
from torchllm.spec.flops import parameter_count


class Range(NamedTuple):
    """What was measured on one kind of GPU: least and most of each."""

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
"""that of memory"""


class Verdict(NamedTuple):
    """What may be said of a prediction."""

    fits: str
    """fits; may fit: the device's memory lies in the interval; does not fit"""
    seconds: tuple[float, float]
    """interval of the step"""
    range: str
    """inside the validated range, or what is outside of it"""


def judge(case: Case, prediction: Prediction) -> Verdict:
    """Of one prediction."""
    beyond = list(_beyond(case))
    width = OUTSIDE if beyond else INSIDE
    share = prediction.memory.total / case.hardware.memory
    fits = "fits" if share * (1 + MEMORY) <= 1 else "may fit" if share <= 1 else "does not fit"
    seconds = (prediction.step / (1 + width), prediction.step * (1 + width))
    return Verdict(
        fits, seconds, "outside the validated range: " + ", ".join(beyond) if beyond else "inside the validated range"
    )


def _beyond(case: Case) -> list[str]:
    found = next((one for one in RANGES if one.gpu in case.hardware.gpu), None)
    if found is None:
        return [f"GPU {case.hardware.gpu}"]
    parallel = case.parallel
    given = {
        "parameters": (parameter_count(case.model), found.parameters),
        "sequence length": (case.training.sequence_length, found.sequence_length),
        "GPUs": (case.ranks, found.gpus),
        "tp": (parallel.tp, found.tp),
    }
    names = [f"{name} {value:,}" for name, (value, (least, most)) in given.items() if not least <= value <= most]
    names += ["cp"] * (parallel.cp > 1) + [f"schedule {parallel.schedule}"] * (
        parallel.schedule in ("GPipe", "LoopedBFS", "DualPipeV")
    )
    return names + ["float8"] * case.kernels.float8
