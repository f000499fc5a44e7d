"""Say how far a prediction can be trusted: an interval of its step, and the risk of running out of memory. No torch.

They come from rows that the constants were not fitted to: the error of a step depends on the shares of its terms
(`step_errors.py`), the error of its memory is the error of torchllm's peaks (`residuals.py`).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.peak import Memory
from torchllm.tools.planner.predict import Prediction
from torchllm.tools.planner.residuals import (
    ANY,
    LEVELS,
    RowClass,
    Spread,
    classes_of_pair,
    read_spreads,
)
from torchllm.tools.planner.software import Constants
from torchllm.tools.planner.step_errors import (
    RARELY_MEASURED,
    ErrorModels,
    StepInterval,
    generation,
    read_error_models,
    shares_of,
)

ENOUGH_ROWS, ENOUGH_FOLDS = 15, 3
"""rows and folds that a class needs for quantiles without a broader class; the range of 15 rows
holds 7 of 8 others"""
RISK = 0.1
"""largest probability of running out of memory of a layout that is picked: a run that does not fit says so in its first
steps, a slower one costs as long as it trains"""


class Verdict(NamedTuple):
    """How far a prediction can be trusted."""

    fits: str
    """"fits", "may fit" (the risk is above `RISK`) or "does not fit" (the prediction exceeds the memory of the
    GPU, or of the host)"""
    seconds: tuple[float, float]
    """interval that holds 90 % of the step times of rows like it"""
    out_of_memory: float
    """probability of running out of memory"""
    evidence: str
    """source of the step time's interval"""


def judge(case: Case, prediction: Prediction) -> Verdict:
    """Return how far a prediction can be trusted."""
    interval = interval_from(read_error_models(), case, shares_of(case, prediction))
    low, high = interval.bounds
    seconds = (prediction.step * math.exp(low), prediction.step * math.exp(high))
    risk = out_of_memory(case.hardware, prediction.memory)
    fits = "fits" if risk <= RISK else "may fit"
    if not prediction.fits:
        fits = "does not fit"
    return Verdict(fits, seconds, risk, described(case, interval))


def is_measured(case: Case) -> bool:
    """Return whether this framework was measured on this GPU: by others, or by you, who calibrated the cluster file."""
    own = RowClass("torchllm", ANY, generation(case.hardware.gpu))
    return is_calibrated(case) or ("step time", "framework", own) in read_spreads()


def is_calibrated(case: Case) -> bool:
    """Return whether you fitted the constants of the cluster file to runs of yours."""
    return case.software.name == "torchllm" and case.hardware.constants != Constants()


def interval_from(models: ErrorModels, case: Case, shares: Mapping[str, float]) -> StepInterval:
    """Return the interval of a step from the error models. shares: as `shares_of`.

    Where other models of the framework were measured, or the constants are calibrated, they were fitted to those.
    """
    is_known = is_calibrated(case) or case.software.name in models["fold"].factors
    model = models["fold" if is_known else "framework"]
    return model.interval(shares, case.software.name, generation(case.hardware.gpu))


def described(case: Case, interval: StepInterval) -> str:
    """Return the source of an interval, and the properties of the case that are rare in it."""
    gpu = generation(case.hardware.gpu)
    text = f"from {interval.rows:,} steps of {interval.folds} models"
    remarks = []
    if not is_measured(case):
        remarks.append(f"torchllm is not measured on {gpu}")
    if interval.widest == RARELY_MEASURED:
        remarks.append(f"few models are measured on {gpu}")
    else:
        remarks.append(f"the least certain term is {interval.widest}")
    return f"{text} ({', '.join(remarks)})"


def spread_of_pair(simple: Case, complex: Case) -> Spread:
    """Return the slowdown of layouts like the complex one against layouts like the simple, relative to predictions.

    The residuals are of the first class of the pair that has rows enough, widened by those before it. Where torchllm is
    measured, they are of rows of whose framework other folds were fitted to.
    """
    table = read_spreads()
    knowledge = "fold" if is_measured(complex) else "framework"
    closest: Spread | None = None
    for row_class in classes_of_pair(simple, complex):
        spread = table.get(("ratio of two layouts", knowledge, row_class))
        if spread is None:
            continue
        closest = spread if closest is None else _widened(spread, closest)
        if spread.rows >= ENOUGH_ROWS and spread.folds >= ENOUGH_FOLDS:
            return closest
    assert closest is not None, "residuals.csv has no row of two layouts of any framework"
    return closest


def _widened(broad: Spread, narrow: Spread) -> Spread:
    """Return the broad class with the narrow one's quantiles where they lie farther out."""
    quantiles = []
    for level, quantile, narrow_quantile in zip(LEVELS, broad.quantiles, narrow.quantiles, strict=True):
        if level < 0.5:
            quantile = min(quantile, narrow_quantile)
        elif level > 0.5:
            quantile = max(quantile, narrow_quantile)
        quantiles.append(quantile)
    return broad._replace(quantiles=tuple(quantiles))


def out_of_memory(hardware: Hardware, memory: Memory) -> float:
    """Return the probability of running out of memory."""
    return peaks().share_above(1 - memory.total / hardware.memory)


def memory_limit(hardware: Hardware) -> float:
    """Return the bytes that a layout may be predicted to need to be picked: its risk is at most `RISK`."""
    return hardware.memory * (1 - peaks().quantiles[LEVELS.index(1 - RISK)])


def peaks() -> Spread:
    """Return the residuals of torchllm's peak memory.

    They are of true peaks of its layouts on a GPU without a chip (tests/hollow): the bytes of tensors do not depend on
    the machine. The allocator's overhead differs between versions, as it did where others measured a layout repeatedly.
    """
    return read_spreads()["peak memory", "framework", RowClass("torchllm", ANY, ANY)]
