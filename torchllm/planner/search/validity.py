"""Say how far a prediction can be trusted: an interval of its step, and the risk of running out of memory. No torch.

They come from residuals of published rows that the constants were not fitted to (`evidence/residuals.py`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchllm.planner.case import Case
from torchllm.planner.evidence.residuals import (
    ANY,
    LEVELS,
    RowClass,
    Spread,
    axes_of,
    classes_of,
    classes_of_pair,
    generation,
    own_class,
    read_outcomes,
    read_spreads,
)
from torchllm.planner.memory import Memory
from torchllm.planner.predict import Prediction
from torchllm.spec.software import Constants

ENOUGH_ROWS, ENOUGH_FOLDS = 15, 3
"""rows and folds of a class from which its quantiles are taken without those of a broader class; the range of 15 rows
holds 7 of 8 others"""
RISK = 0.05
"""probability of running out of memory up to which a layout "fits\""""
UNMEASURED_LIMIT = 0.9
"""share of a GPU's memory that a plan uses at most, where this framework has not been measured on this GPU"""


class Verdict(NamedTuple):
    """How far a prediction can be trusted."""

    fits: str
    """"fits", "may fit" (the risk is above `RISK`) or "does not fit" (the prediction exceeds the GPU's memory)"""
    seconds: tuple[float, float]
    """interval that holds 90 % of the step times of rows like it"""
    out_of_memory: float
    """probability of running out of memory"""
    evidence: str
    """which rows the interval of the step time is from"""


def judge(case: Case, prediction: Prediction) -> Verdict:
    """Return how far a prediction can be trusted."""
    times = spread_of(case, "step time")
    low, high = times.interval
    seconds = (prediction.step * math.exp(low), prediction.step * math.exp(high))
    risk = out_of_memory(case, prediction.memory)
    fits = "fits" if risk <= RISK else "may fit"
    if not prediction.fits:
        fits = "does not fit"
    return Verdict(fits, seconds, risk, described(case, times))


def is_measured(case: Case) -> bool:
    """Return whether this framework was measured on this GPU: by others, or by you, who calibrated the cluster file."""
    if case.software.name == "torchllm":
        return case.hardware.constants != Constants()
    return ("step time", "framework", own_class(case)) in read_spreads()


def spread_of(case: Case, quantity: str) -> Spread:
    """Return the residuals of rows like a case: of the closest class with rows enough.

    A closer class that has too few rows widens those of the broader one.
    """
    return _closest(quantity, is_measured(case), list(classes_of(case)))


def spread_of_pair(simple: Case, other: Case) -> Spread:
    """Return by how much layouts like the other one were slower than predicted, beside layouts like the simple one."""
    return _closest("ratio of two layouts", is_measured(other), list(classes_of_pair(simple, other)))


def _closest(quantity: str, is_measured: bool, classes: Sequence[RowClass]) -> Spread:
    """Return the residuals of the first of some classes that has rows enough, widened by those before it.

    is_measured: take residuals of rows of whose framework other folds were fitted to, where the table has some.
    """
    table = read_spreads()
    knowledge = "fold" if is_measured and any((quantity, "fold", of) in table for of in classes) else "framework"
    found: Spread | None = None
    for of in classes:
        spread = table.get((quantity, knowledge, of))
        if spread is None:
            continue
        found = spread if found is None else _widened(spread, found)
        if spread.rows >= ENOUGH_ROWS and spread.folds >= ENOUGH_FOLDS:
            return found
    assert found is not None, f"residuals.csv has no row of {quantity} for all frameworks"
    return found


def _widened(broad: Spread, narrow: Spread) -> Spread:
    """Return the broad class with the narrow one's quantiles where they lie farther out."""
    quantiles = []
    for level, one, other in zip(LEVELS, broad.quantiles, narrow.quantiles, strict=True):
        if level < 0.5:
            quantiles.append(min(one, other))
        else:
            quantiles.append(max(one, other) if level > 0.5 else one)
    return broad._replace(quantiles=tuple(quantiles))


def described(case: Case, spread: Spread) -> str:
    """Return which rows an interval is from, and what of the case they have not."""
    said = f"from {spread.rows} rows of {spread.of}"
    gpu = generation(case.hardware.gpu)
    missing = []
    if not is_measured(case):
        missing.append(f"{case.software.name} is not measured on {gpu}")
    if spread.of.axes == ANY:
        missing.append(f"too few rows have {axes_of(case)}")
    if spread.of.gpu == ANY:
        missing.append(f"too few are of {gpu}")
    if case.kernels.float8:
        missing.append("none is of float8")
    return f"{said} ({', '.join(missing)})" if missing else said


def out_of_memory(case: Case, memory: Memory) -> float:
    """Return the probability of running out of memory."""
    share = memory.total / case.hardware.memory
    for outcome in read_outcomes():
        if outcome.framework == case.software.name and outcome.share_from <= share < outcome.share_to and outcome.rows:
            return outcome.risk
    return peaks_of(case).share_above(1 - share)


def largest_memory_limit(case: Case) -> float:
    """Return a number of bytes that no layout's `memory_limit` exceeds, on this GPU and under this framework."""
    return case.hardware.memory * (1.0 if is_measured(case) else UNMEASURED_LIMIT)


def memory_limit(case: Case) -> float:
    """Return the bytes that a layout like this may be predicted to need, so that the risk is at most `RISK`.

    Where the framework has not been measured on this GPU, it is at most `UNMEASURED_LIMIT` of the memory.
    """
    _, high = peaks_of(case).interval
    return min(case.hardware.memory * (1 - max(high, 0.0)), largest_memory_limit(case))


def peaks_of(case: Case) -> Spread:
    """Return the residuals of peak memory.

    Those of torchllm are true peaks of its layouts on a GPU without a chip (tests/hollow): what tensors hold does not
    depend on the machine. What an allocator adds differs between versions; how much is seen where others repeated a
    layout.
    """
    own = read_spreads().get(("peak memory", "framework", RowClass(case.software.name, ANY, ANY)))
    if case.software.name != "torchllm" or own is None:
        return spread_of(case, "peak memory")
    versions = read_spreads()["repeated peak", "framework", RowClass(ANY, ANY, "H100")]
    quantiles = (one + other for one, other in zip(own.quantiles, versions.quantiles, strict=True))
    return own._replace(quantiles=tuple(quantiles))
