"""The errors of predictions on rows that the constants were not fitted to: the tables that advice is computed from.

`recipes/plan.py residuals FOLDER ...` writes three tables; none has the figure of a single row. step_errors.csv is
the error model of steps (`step_errors`). residuals.csv has quantiles of classes of rows: of peak memory, and of the
measured slowdown of one layout against another of its job, relative to the prediction. out_of_memory.csv counts
which layouts ran out of memory. A residual is log(measured / predicted) of a step time, and (measured - predicted) /
the GPU's memory of a peak: the allocator's overhead does not grow with the tensors. A class is a framework (its
name, its kind, or any), the axes that the layout uses, and a generation of GPUs. No torch.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import NormalDist, median
from typing import Literal, NamedTuple

from torchllm.tools.planner.case import Case
from torchllm.tools.planner.evidence.cross_validation import Residual, left_out_residuals, step_errors
from torchllm.tools.planner.evidence.measurements import MeasuredRow, read_rows
from torchllm.tools.planner.evidence.step_errors import (
    KNOWLEDGE,
    Knowledge,
    fit_error_models,
    generation,
    write_error_models,
)
from torchllm.tools.planner.evidence.step_errors import TABLE as STEP_ERRORS

TABLE = Path(__file__).with_name("residuals.csv")
Quantity = Literal["step time", "peak memory", "repeated peak", "ratio of two layouts"]
"""step time: of a framework on a GPU; repeated peak: of one layout, with several versions of a framework; less their
median"""
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""shares of the rows below the quantiles of the table"""
ANY = "any"
SHOWN_FROM = 10
"""rows that a class needs to be in the table: with fewer, quantiles would be the rows themselves"""
AXES = ("tp", "pp", "cp", "ep")
SAME = "the same"
"""axes that a layout adds to another one that has them all"""
NATIVE, MEGATRON = "torch-native", "Megatron-like"
GAUSS_95 = NormalDist().inv_cdf(0.95)
SMALLEST_DEVIATION = 1e-3
"""distance of an edge of the interval from the median, where they coincide"""


class RowClass(NamedTuple):
    """Properties that rows have in common."""

    framework: str
    """its name, its kind (`NATIVE`, `MEGATRON`) or `ANY`"""
    axes: str
    """axes of more than one rank, joined by +; of two layouts, those that only the second uses; "data only" or `ANY`"""
    gpu: str
    """generation (A100, H100), or `ANY`"""

    def __str__(self) -> str:
        frameworks = "all frameworks" if self.framework == ANY else self.framework
        axes = "" if self.axes == ANY else f" with {self.axes}"
        return f"{frameworks}{axes}" + ("" if self.gpu == ANY else f" on {self.gpu}")


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


def axes_of(case: Case) -> str:
    """Return the axes that a layout uses besides data parallelism; experts count as an axis, they change as much."""
    parallel = case.parallel
    used = [axis for axis in AXES if getattr(parallel, axis) > 1]
    if case.model.experts:
        used.append("experts")
    return "+".join(used) or "data only"


def kind_of(case: Case) -> str:
    """Return the kind of a case's framework: its weights are sharded as by torch's FSDP, or copied as Megatron's."""
    return NATIVE if case.software.fsdp else MEGATRON


def classes_of(case: Case) -> Iterator[RowClass]:
    """Yield the classes of a case, the one most like it first.

    The axes count most: rows of the same framework without these axes do not inform it.
    """
    frameworks = (case.software.name, kind_of(case), ANY)
    gpus = (generation(case.hardware.gpu), ANY)
    for framework, gpu in product(frameworks, gpus):
        yield RowClass(framework, axes_of(case), gpu)
    yield RowClass(ANY, ANY, ANY)


def own_class(case: Case) -> RowClass:
    """Return the class of all rows of this framework on this GPU."""
    return RowClass(case.software.name, ANY, generation(case.hardware.gpu))


def classes_of_pair(simple: Case, complex: Case) -> Iterator[RowClass]:
    """Yield the classes of the step from one layout to another: which axes the second one has and the first has not."""
    frameworks = (kind_of(complex), ANY)
    additions = (added_axes(simple, complex), ANY)
    for framework, axes in product(frameworks, additions):
        yield RowClass(framework, axes, ANY)


def added_axes(simple: Case, complex: Case) -> str:
    """Return the axes that the complex layout uses and the simple one does not."""
    simple_axes = axes_of(simple).split("+")
    added = []
    for axis in axes_of(complex).split("+"):
        if axis in AXES and axis not in simple_axes:
            added.append(axis)
    return "+" + "+".join(added) if added else SAME


class Point(NamedTuple):
    """One residual, before it is put into classes."""

    quantity: Quantity
    left_out: Knowledge
    classes: tuple[RowClass, ...]
    fold: str
    value: float


def points(residuals: Sequence[Residual]) -> Iterator[Point]:
    """Yield the residuals of step times and peaks, and of pairs of layouts of one job.

    Rows that were not fitted, and those in float8, are no evidence of step times here.
    """
    evidence = []
    for residual in residuals:
        if residual.peak is not None:
            yield Point("peak memory", residual.left_out, peak_classes(residual.case), residual.fold, residual.peak)
        if residual.time is not None and residual.is_fitted and not residual.case.kernels.float8:
            evidence.append(residual)
            yield Point("step time", residual.left_out, (own_class(residual.case),), residual.fold, residual.time)
    yield from repeated_peaks(residuals)
    yield from pairs(evidence)


def peak_classes(case: Case) -> tuple[RowClass, ...]:
    """Return the classes of a peak. torchllm's are measured on a GPU without a chip: they tell nothing about others."""
    if case.software.name == "torchllm":
        return (RowClass(case.software.name, ANY, ANY),)
    return (*classes_of(case), own_class(case))


def repeated_peaks(residuals: Iterable[Residual]) -> Iterator[Point]:
    """Yield the distances of peaks from their median, where a layout was measured more than once."""
    layouts: dict[tuple[str, str, Case, str], list[float]] = {}
    for residual in residuals:
        if residual.peak is not None:
            layout = (residual.left_out, residual.fold, residual.case, residual.row.cells.get("compile", ""))
            layouts.setdefault(layout, []).append(residual.peak)
    for (left_out, fold, case, _), peaks in layouts.items():
        if len(peaks) > 1:
            classes = (RowClass(ANY, ANY, generation(case.hardware.gpu)),)
            for peak in peaks:
                knowledge: Knowledge = "fold" if left_out == "fold" else "framework"
                yield Point("repeated peak", knowledge, classes, fold, peak - median(peaks))


def pairs(evidence: Iterable[Residual]) -> Iterator[Point]:
    """Yield by how much layouts were slower than predicted from another one of their job: the one that adds axes.

    Where both add some, or none, that is either of the two.
    """
    jobs: dict[tuple[object, ...], list[Residual]] = {}
    for residual in evidence:
        jobs.setdefault(question_of(residual), []).append(residual)
    for layouts in jobs.values():
        for first, second in combinations(layouts, 2):
            second_adds = added_axes(first.case, second.case) != SAME
            first_adds = added_axes(second.case, first.case) != SAME
            if second_adds or not first_adds:
                yield pair(first, second)
            if first_adds or not second_adds:
                yield pair(second, first)


def question_of(residual: Residual) -> tuple[object, ...]:
    """Return the key that rows share if they answer one question: which layout of this job is faster?"""
    case, cells = residual.case, residual.row.cells
    group = residual.left_out, residual.fold, cells.get("group", ""), cells.get("compile", "")
    machines = case.hardware.gpu, case.ranks
    return *group, *machines, case.training.sequence_length, case.kernels


def pair(simple: Residual, complex: Residual) -> Point:
    """Return by how much the complex layout was slower than predicted from the simple one."""
    assert simple.time is not None
    assert complex.time is not None
    classes = tuple(classes_of_pair(simple.case, complex.case))
    return Point("ratio of two layouts", simple.left_out, classes, simple.fold, complex.time - simple.time)


def spreads(residuals: Sequence[Residual]) -> list[Spread]:
    """Return the quantiles of every class that has rows enough."""
    groups: dict[tuple[str, str, RowClass], list[Point]] = {}
    for point in points(residuals):
        for row_class in dict.fromkeys(point.classes):
            groups.setdefault((point.quantity, point.left_out, row_class), []).append(point)
    classes = []
    for (quantity, left_out, row_class), group in sorted(groups.items()):
        if len(group) >= SHOWN_FROM:
            values = sorted(point.value for point in group)
            quantiles = tuple(_quantile(values, level) for level in LEVELS)
            folds = len({point.fold for point in group})
            classes.append(Spread(quantity, left_out, row_class, len(group), folds, quantiles))
    return classes


def _quantile(ascending: Sequence[float], level: float) -> float:
    """Return a quantile of an unseen value: linear between the values, the n-th of N at n / (N + 1)."""
    rank = level * (len(ascending) + 1) - 1
    rank = min(max(rank, 0.0), len(ascending) - 1.0)
    lower = min(int(rank), len(ascending) - 2)
    low, high = ascending[lower], ascending[lower + 1]
    return low + (rank - lower) * (high - low)


QUANTILES = tuple(f"p{100 * level:02.0f}" for level in LEVELS)
"""columns of the quantiles"""
HEADER = ("quantity", "left_out", *RowClass._fields, "rows", "folds", *QUANTILES)


def write_spreads(target: str, classes: Iterable[Spread]) -> None:
    """Write a table of residuals."""
    with open(target, "w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(HEADER)
        for spread in classes:
            kind = [spread.quantity, spread.left_out, *spread.row_class]
            counts = [spread.rows, spread.folds]
            quantiles = [f"{quantile:.3f}" for quantile in spread.quantiles]
            writer.writerow([*kind, *counts, *quantiles])


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


class Outcomes(NamedTuple):
    """Number of layouts that ran out of memory, among those of a framework with this predicted share of memory."""

    framework: str
    share_from: float
    share_to: float
    rows: int
    ran_out: int

    @property
    def risk(self) -> float:
        """Probability of running out of memory, by Laplace's rule of succession."""
        return (self.ran_out + 1) / (self.rows + 2)


OUTCOMES = Path(__file__).with_name("out_of_memory.csv")
OUTCOMES_FROM = 100
"""rows that a framework needs to be in that table: with fewer, a line would be one row"""
SHARES = (0.0, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, math.inf)
"""borders of the shares of memory in out_of_memory.csv"""


def outcomes(residuals: Iterable[Residual]) -> Iterator[Outcomes]:
    """Yield the outcomes by framework and share of memory, with constants not fitted to the framework.

    The activations of float8 layouts are not known well enough.
    """
    frameworks: dict[str, list[Residual]] = {}
    for residual in residuals:
        is_known = residual.row.out_of_memory is not None and not residual.case.kernels.float8
        if residual.left_out == "framework" and is_known:
            frameworks.setdefault(residual.case.software.name, []).append(residual)
    for framework, members in sorted(frameworks.items()):
        if len(members) < OUTCOMES_FROM or not any(residual.row.out_of_memory for residual in members):
            continue
        for low, high in pairwise(SHARES):
            ran_out = [residual.row.out_of_memory for residual in members if low <= residual.memory_share < high]
            yield Outcomes(framework, low, high, len(ran_out), ran_out.count(True))


def write_outcomes(target: str, table: Iterable[Outcomes]) -> None:
    """Write a table of outcomes."""
    with open(target, "w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(Outcomes._fields)
        writer.writerows(table)


@lru_cache(maxsize=1)
def read_outcomes() -> list[Outcomes]:
    """Return the outcomes that come with torchllm."""
    table = []
    with OUTCOMES.open(newline="") as opened:
        for cells in csv.DictReader(opened):
            share_from, share_to = float(cells["share_from"]), float(cells["share_to"])
            rows, ran_out = int(cells["rows"]), int(cells["ran_out"])
            table.append(Outcomes(cells["framework"], share_from, share_to, rows, ran_out))
    return table


def write_residuals(folders: Sequence[str], target: str) -> str:
    """Write the tables of all measurements in some folders into a folder; return a summary of the rows read."""
    rows: list[MeasuredRow] = []
    lines = []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.csv")):
            try:
                file_rows = read_rows(str(file))
            except ValueError as error:
                lines.append(f"skipped: {error}")
                continue
            rows += file_rows
            lines.append(f"{file.name}: {len(file_rows)} rows")
    residuals = left_out_residuals(rows)
    classes = spreads(residuals)
    write_spreads(str(Path(target) / TABLE.name), classes)
    write_outcomes(str(Path(target) / OUTCOMES.name), outcomes(residuals))
    errors = {kind: step_errors(residuals, kind) for kind in KNOWLEDGE}
    write_error_models(str(Path(target) / STEP_ERRORS.name), fit_error_models(errors))
    lines.append(f"{target}: {len(classes)} classes; errors of {len(errors['fold'])} steps")
    return "\n".join(lines)
