"""How far measurements were from predictions that knew nothing of them, by class of rows: the table residuals.csv.

A residual is log(measured / predicted) of a step time, and (measured - predicted) / the GPU's memory of a peak: what
the allocator adds to the tensors does not grow with them. The table has quantiles of classes, no figure of one row, and
`recipes/plan.py residuals FOLDER ...` writes it. A class is a framework (its name, its kind, or any), the axes that the
layout uses, and a generation of GPUs. No torch.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import NormalDist, median
from typing import Literal, NamedTuple

from torchllm.planner.case import Case
from torchllm.planner.evidence.cross_validation import Residual, left_out_residuals
from torchllm.planner.evidence.measurements import MeasuredRow, read_rows

TABLE = Path(__file__).with_name("residuals.csv")
Quantity = Literal["step time", "peak memory", "repeated peak", "ratio of two layouts"]
"""repeated peak: of one layout, with several versions of a framework; less their median"""
Knowledge = Literal["fold", "framework"]
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""shares of the rows below the quantiles of the table"""
ANY = "any"
SHOWN_FROM = 10
"""rows of a class from which it is in the table: of fewer, quantiles are the rows themselves"""
AXES = ("tp", "pp", "cp", "ep")
NATIVE, MEGATRON = "torch-native", "Megatron-like"
GAUSS_95 = NormalDist().inv_cdf(0.95)


class RowClass(NamedTuple):
    """What rows have in common."""

    framework: str
    """its name, its kind (`NATIVE`, `MEGATRON`) or `ANY`"""
    axes: str
    """those of more than one rank, joined by +; of two layouts, those of the second alone; "data only" or `ANY`"""
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
    """what the constants were not fitted to: the row's fold, or its whole framework"""
    of: RowClass
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
        low, middle, high = self.quantiles[0], self.quantiles[LEVELS.index(0.5)], self.quantiles[-1]
        if value >= high or value <= low:
            edge = high if value >= high else low
            deviation = max(abs(edge - middle), SMALLEST_DEVIATION) / GAUSS_95
            beyond = edge - math.copysign(GAUSS_95 * deviation, value - middle)  # the median, if it is not too close
            return 1 - NormalDist(beyond, deviation).cdf(value)
        at = next(index for index, quantile in enumerate(self.quantiles) if quantile > value)
        lower, upper = self.quantiles[at - 1], self.quantiles[at]
        return 1 - (LEVELS[at - 1] + (LEVELS[at] - LEVELS[at - 1]) * (value - lower) / (upper - lower))

    @property
    def mean(self) -> float:
        """The mean of the residuals: of the quantiles, each for the rows that are closest to it."""
        borders = [0.0, *((low + high) / 2 for low, high in pairwise(LEVELS)), 1.0]
        shares = [high - low for low, high in pairwise(borders)]
        return sum(share * value for share, value in zip(shares, self.quantiles, strict=True))


SMALLEST_DEVIATION = 1e-3
"""distance of an edge of the interval from the median, where they coincide"""


def axes_of(case: Case) -> str:
    """Return the axes that a layout uses beside data parallelism; experts are as unlike dense layers as an axis is."""
    parallel = case.parallel
    used = [axis for axis in AXES if getattr(parallel, axis) > 1]
    if case.model.experts:
        used.append("experts")
    return "+".join(used) or "data only"


def kind_of(case: Case) -> str:
    """Return the kind of a case's framework: its weights are sharded as by torch's FSDP, or copied as Megatron's."""
    return NATIVE if case.software.fsdp else MEGATRON


def generation(gpu: str) -> str:
    """Return the generation of a GPU: "H100" of "H100-SXM5-80GB"."""
    return gpu.split("-")[0]


def classes_of(case: Case) -> Iterator[RowClass]:
    """Yield the classes of a case, the one most like it first.

    The axes count most: rows of the same framework that do not use them say nothing of them.
    """
    gpu, name = generation(case.hardware.gpu), case.software.name
    for framework, generation_or_any in product((name, kind_of(case), ANY), (gpu, ANY)):
        yield RowClass(framework, axes_of(case), generation_or_any)
    yield RowClass(ANY, ANY, ANY)


def own_class(case: Case) -> RowClass:
    """Return the class of all rows of this framework on this GPU."""
    return RowClass(case.software.name, ANY, generation(case.hardware.gpu))


def classes_of_pair(simple: Case, other: Case) -> Iterator[RowClass]:
    """Yield the classes of the step from one layout to another: which axes the second one has and the first has not."""
    for framework, axes in product((kind_of(other), ANY), (added_axes(simple, other), ANY)):
        yield RowClass(framework, axes, ANY)


def added_axes(simple: Case, other: Case) -> str:
    """Return the axes that the other layout uses and the simple one does not."""
    before = axes_of(simple).split("+")
    added = [axis for axis in axes_of(other).split("+") if axis not in before and axis in AXES]
    return "+" + "+".join(added) if added else "the same"


class Point(NamedTuple):
    """One residual, before it is put into classes."""

    quantity: Quantity
    left_out: Knowledge
    classes: tuple[RowClass, ...]
    fold: str
    value: float


def points(residuals: Iterable[Residual]) -> Iterator[Point]:
    """Yield the residuals of step times and peaks, and of pairs of layouts of one job."""
    jobs: dict[tuple[object, ...], list[Residual]] = {}
    repeated: dict[tuple[str, str, Case, str], list[Residual]] = {}
    for one in residuals:
        case = one.row.case
        assert case is not None
        classes = (*classes_of(case), own_class(case))
        if case.software.name == "torchllm":  # its peaks are of a GPU without a chip: no evidence for others
            classes = (RowClass(case.software.name, ANY, ANY),)
        if one.peak is not None:
            yield Point("peak memory", one.left_out, classes, one.fold, one.peak)
            repeated.setdefault((one.left_out, one.fold, case, one.row.cells.get("compile", "")), []).append(one)
        if one.time is not None:
            yield Point("step time", one.left_out, classes, one.fold, one.time)
            jobs.setdefault(_job(one, case), []).append(one)
    for of_one_job in jobs.values():
        for one, other in combinations(of_one_job, 2):
            yield from _pair(one, other)
    for (_, _, case, _), alike in repeated.items():
        peaks = [one.peak for one in alike if one.peak is not None]
        if len(peaks) > 1:
            for one, peak in zip(alike, peaks, strict=True):
                yield Point(
                    "repeated peak",
                    one.left_out,
                    (RowClass(ANY, ANY, generation(case.hardware.gpu)),),
                    one.fold,
                    peak - median(peaks),
                )


def _job(one: Residual, case: Case) -> tuple[object, ...]:
    """Return what rows must have in common to answer one question: which layout of this job is faster?"""
    machines = case.hardware.gpu, case.ranks
    group = one.fold, one.row.cells.get("group", ""), one.row.cells.get("compile", "")
    return one.left_out, *group, *machines, case.training.sequence_length, case.kernels


def _pair(one: Residual, other: Residual) -> Iterator[Point]:
    """Yield by how much the layout with more axes was slower than predicted from the other; both ways, if alike."""
    assert one.row.case is not None
    assert other.row.case is not None
    assert one.time is not None
    assert other.time is not None
    simple, complex = sorted((one, other), key=lambda of: len(added_axes(*_cases(one, of))))
    orders = [(simple, complex)]
    if added_axes(*_cases(simple, complex)) == "the same":
        orders.append((complex, simple))
    for first, second in orders:
        assert first.time is not None
        assert second.time is not None
        classes = tuple(classes_of_pair(*_cases(first, second)))
        yield Point("ratio of two layouts", one.left_out, classes, one.fold, second.time - first.time)


def _cases(one: Residual, other: Residual) -> tuple[Case, Case]:
    assert one.row.case is not None
    assert other.row.case is not None
    return one.row.case, other.row.case


def spreads(residuals: Iterable[Residual]) -> list[Spread]:
    """Return the quantiles of every class that has rows enough."""
    groups: dict[tuple[str, str, RowClass], list[Point]] = {}
    for point in points(residuals):
        for of in dict.fromkeys(point.classes):
            groups.setdefault((point.quantity, point.left_out, of), []).append(point)
    found = []
    for (quantity, left_out, of), group in sorted(groups.items()):
        if len(group) >= SHOWN_FROM:
            values = sorted(point.value for point in group)
            quantiles = tuple(_quantile(values, level) for level in LEVELS)
            found.append(Spread(quantity, left_out, of, len(group), len({point.fold for point in group}), quantiles))
    return found


def _quantile(ascending: Sequence[float], level: float) -> float:
    """Return a quantile of an unseen value: linear between the values, the n-th of N at n / (N + 1)."""
    place = min(max(level * (len(ascending) + 1) - 1, 0.0), len(ascending) - 1.0)
    below = min(int(place), len(ascending) - 2)
    return ascending[below] + (place - below) * (ascending[below + 1] - ascending[below])


HEADER = ["quantity", "left_out", *RowClass._fields, "rows", "folds", *(f"p{100 * level:02.0f}" for level in LEVELS)]


def write_spreads(target: str, found: Iterable[Spread]) -> None:
    """Write a table of residuals."""
    with open(target, "w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(HEADER)
        for one in found:
            writer.writerow(
                [one.quantity, one.left_out, *one.of, one.rows, one.folds, *(f"{q:.3f}" for q in one.quantiles)]
            )


@lru_cache(maxsize=1)
def read_spreads() -> dict[tuple[str, str, RowClass], Spread]:
    """Return the table that comes with torchllm, by quantity, what was left out, and class."""
    found = {}
    with TABLE.open(newline="") as opened:
        for cells in csv.DictReader(opened):
            of = RowClass(cells["framework"], cells["axes"], cells["gpu"])
            quantiles = tuple(float(cells[name]) for name in HEADER[-len(LEVELS) :])
            spread = Spread(
                cells["quantity"], cells["left_out"], of, int(cells["rows"]), int(cells["folds"]), quantiles
            )
            found[spread.quantity, spread.left_out, of] = spread
    return found


class Outcomes(NamedTuple):
    """How many layouts ran out of memory, of those of a framework that were predicted to need such a share of it."""

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
"""rows of a framework from which it is in that table: of fewer, a line is one row"""
SHARES = (0.0, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, math.inf)
"""borders of the shares of memory in out_of_memory.csv"""


def outcomes(residuals: Iterable[Residual]) -> Iterator[Outcomes]:
    """Yield the outcomes by framework and share of memory, with constants not fitted to the framework."""
    known: dict[str, list[Residual]] = {}
    for one in residuals:
        if one.left_out == "framework" and one.row.case is not None and one.row.out_of_memory is not None:
            known.setdefault(one.row.case.software.name, []).append(one)
    for framework, rows in sorted(known.items()):
        if len(rows) < OUTCOMES_FROM or not any(one.row.out_of_memory for one in rows):
            continue
        for low, high in pairwise(SHARES):
            of = [one for one in rows if low <= one.share < high]
            yield Outcomes(framework, low, high, len(of), sum(bool(one.row.out_of_memory) for one in of))


def write_outcomes(target: str, found: Iterable[Outcomes]) -> None:
    """Write a table of outcomes."""
    with open(target, "w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(Outcomes._fields)
        writer.writerows(found)


@lru_cache(maxsize=1)
def read_outcomes() -> list[Outcomes]:
    """Return the outcomes that come with torchllm."""
    with OUTCOMES.open(newline="") as opened:
        found = []
        for framework, low, high, rows, ran_out in list(csv.reader(opened))[1:]:
            found.append(Outcomes(framework, float(low), float(high), int(rows), int(ran_out)))
        return found


def write_residuals(folders: Sequence[str], target: str) -> str:
    """Write the tables of all measurements in some folders into a folder; return what was read."""
    rows: list[MeasuredRow] = []
    lines = []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.csv")):
            try:
                of_file = read_rows(str(file))
            except ValueError as error:
                lines.append(f"skipped: {error}")
                continue
            rows += of_file
            lines.append(f"{file.name}: {len(of_file)} rows")
    residuals = left_out_residuals(rows)
    found = spreads(residuals)
    write_spreads(str(Path(target) / TABLE.name), found)
    write_outcomes(str(Path(target) / OUTCOMES.name), outcomes(residuals))
    return "\n".join([*lines, f"{target}: {len(found)} classes"])
