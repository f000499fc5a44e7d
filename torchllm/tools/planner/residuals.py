"""The errors of predictions on rows that the constants were not fitted to, by class of rows. No torch.

residuals.csv has quantiles: of torchllm's peaks of memory, and of the measured slowdown of one layout against another
of its job, relative to the prediction. A residual is log(measured / predicted) of a step time, and (measured -
predicted) / the GPU's memory of a peak: the allocator's overhead does not grow with the tensors. A class is a
framework, the axes that a layout adds to another, and a generation of GPUs. `python -m evidence residuals` of a
checkout writes the table.
"""

import csv
import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from torchllm.tools.planner.case import Case

TABLE = Path(__file__).with_name("residuals.csv")
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""shares of the rows below the quantiles of the table"""
ANY = "any"
AXES = ("tp", "pp", "cp", "ep")
SAME = "the same"
"""axes that a layout adds to another one that has them all"""
NATIVE = "torch-native"
"""frameworks whose weights are sharded as by torch's FSDP"""
GAUSS_95 = NormalDist().inv_cdf(0.95)
SMALLEST_DEVIATION = 1e-3
"""distance of an edge of the interval from the median, where they coincide"""


class RowClass(NamedTuple):
    """Properties that rows have in common."""

    framework: str
    """torchllm, `NATIVE` or `ANY`"""
    axes: str
    """of two layouts, the axes that only the second uses, after a +; `SAME` or `ANY`"""
    gpu: str
    """generation (A100, H100), or `ANY`"""


class Spread(NamedTuple):
    """The residuals of a class."""

    quantity: str
    left_out: str
    """rows that the constants were not fitted to: the row's fold, or its whole framework"""
    row_class: RowClass
    rows: int
    folds: int
    quantiles: tuple[float, ...]
    """at `LEVELS`"""

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of 90 % of the rows."""
        return self.quantiles[0], self.quantiles[-1]

    def share_above(self, value: float) -> float:
        """Return the share of rows whose residual is above `value`: linear between quantiles, a normal tail outside."""
        low, high = self.interval
        if value <= low:
            return self._share_beyond(low, value)
        if value >= high:
            return self._share_beyond(high, value)
        for (level, quantile), (upper_level, upper) in pairwise(zip(LEVELS, self.quantiles, strict=True)):
            if value < upper:
                passed = (value - quantile) / (upper - quantile)
                return 1 - (level + (upper_level - level) * passed)
        raise AssertionError("the last quantile is the high end of the interval")

    def _share_beyond(self, edge: float, value: float) -> float:
        """Return the share above a value beyond one end of the interval."""
        middle = self.quantiles[LEVELS.index(0.5)]
        deviation = max(abs(edge - middle), SMALLEST_DEVIATION) / GAUSS_95
        center = edge - math.copysign(GAUSS_95 * deviation, value - middle)  # the median, if it is not too close
        return 1 - NormalDist(center, deviation).cdf(value)

    @property
    def mean(self) -> float:
        """The mean of the residuals: of the quantiles, each for the rows that are closest to it."""
        borders = [0.0]
        for low, high in pairwise(LEVELS):
            borders.append((low + high) / 2)
        borders.append(1.0)
        total = 0.0
        for (low, high), quantile in zip(pairwise(borders), self.quantiles, strict=True):
            total += (high - low) * quantile
        return total


def classes_of_pair(simple: Case, complex: Case) -> Iterator[RowClass]:
    """Yield the classes of the step from one layout to another: which axes the second one has and the first has not."""
    for framework, axes in product((NATIVE, ANY), (added_axes(simple, complex), ANY)):
        yield RowClass(framework, axes, ANY)


def added_axes(simple: Case, complex: Case) -> str:
    """Return the axes that the complex layout uses and the simple one does not."""
    first, second = simple.parallel, complex.parallel
    added = [axis for axis in AXES if getattr(second, axis) > 1 >= getattr(first, axis)]
    return "+" + "+".join(added) if added else SAME


QUANTILES = tuple(f"p{100 * level:02.0f}" for level in LEVELS)
"""columns of the quantiles"""


@lru_cache(maxsize=1)
def read_spreads() -> dict[tuple[str, str, RowClass], Spread]:
    """Return the table that comes with torchllm, by quantity, kind of left-out rows, and class."""
    table = {}
    with TABLE.open(newline="") as opened:
        for cells in csv.DictReader(opened):
            row_class = RowClass(cells["framework"], cells["axes"], cells["gpu"])
            quantiles = tuple(float(cells[name]) for name in QUANTILES)
            rows, folds = int(cells["rows"]), int(cells["folds"])
            spread = Spread(cells["quantity"], cells["left_out"], row_class, rows, folds, quantiles)
            table[spread.quantity, spread.left_out, row_class] = spread
    return table
