"""Write the tables of `residuals.py` and `step_errors.py` from rows that the constants were not fitted to. No torch.

`python -m evidence residuals FOLDER ...` writes two tables; none has the figure of a single row.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from evidence.cross_validation import Residual, left_out_residuals, step_errors
from evidence.fit_step_errors import fit_error_models, write_error_models
from evidence.measurements import MeasuredRow, read_rows
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.residuals import (
    ANY,
    LEVELS,
    QUANTILES,
    SAME,
    TABLE,
    RowClass,
    Spread,
    added_axes,
    classes_of_pair,
)
from torchllm.tools.planner.step_errors import KNOWLEDGE, Knowledge, generation
from torchllm.tools.planner.step_errors import TABLE as STEP_ERRORS

Quantity = Literal["step time", "peak memory", "ratio of two layouts"]
"""step time: of torchllm on a GPU; peak memory: of torchllm, with any version's allocator"""
SHOWN_FROM = 10
"""rows that a class needs to be in the table: with fewer, quantiles would be the rows themselves"""
HEADER = ("quantity", "left_out", *RowClass._fields, "rows", "folds", *QUANTILES)


class Point(NamedTuple):
    """One residual, before it is put into classes."""

    quantity: Quantity
    left_out: Knowledge
    classes: tuple[RowClass, ...]
    fold: str
    value: float


def points(residuals: Sequence[Residual]) -> Iterator[Point]:
    """Yield the residuals of torchllm's step times and peaks, and of pairs of layouts of one job.

    Rows that were not fitted, and those in float8, are no evidence of step times here.
    """
    evidence = []
    for residual in residuals:
        left_out, fold, case = residual.left_out, residual.fold, residual.case
        is_own = case.software.name == "torchllm"
        if residual.time is not None and residual.is_fitted and not case.kernels.float8:
            evidence.append(residual)
            if is_own:
                own = RowClass("torchllm", ANY, generation(case.hardware.gpu))
                yield Point("step time", left_out, (own,), fold, residual.time)
    yield from peaks(residuals)
    yield from pairs(evidence)


def peaks(residuals: Sequence[Residual]) -> Iterator[Point]:
    """Yield the possible errors of torchllm's peaks: each of its errors, plus each change from version to version.

    The two are independent: its errors are of the bytes of tensors, the changes of an allocator's overhead.
    """
    for residual, (left_out, change) in product(residuals, repeated_peaks(residuals)):
        if residual.peak is not None and residual.case.software.name == "torchllm" and residual.left_out == left_out:
            of_torchllm = RowClass("torchllm", ANY, ANY)
            yield Point("peak memory", left_out, (of_torchllm,), residual.fold, residual.peak + change)


def repeated_peaks(residuals: Iterable[Residual]) -> list[tuple[Knowledge, float]]:
    """Return the distances of peaks from their median, where a layout was measured more than once."""
    layouts: dict[tuple[Knowledge, str, Case, str], list[float]] = {}
    for residual in residuals:
        if residual.peak is not None:
            layout = (residual.left_out, residual.fold, residual.case, residual.row.cells.get("compile", ""))
            layouts.setdefault(layout, []).append(residual.peak)
    changes = []
    for (left_out, *_), of_layout in layouts.items():
        if len(of_layout) > 1:
            changes += [(left_out, peak - median(of_layout)) for peak in of_layout]
    return changes


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
    classes = classes_of_pair(simple.case, complex.case)
    if not complex.case.software.fsdp:
        classes = (row_class for row_class in classes if row_class.framework == ANY)
    return Point("ratio of two layouts", simple.left_out, tuple(classes), simple.fold, complex.time - simple.time)


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
    errors = {kind: step_errors(residuals, kind) for kind in KNOWLEDGE}
    write_error_models(str(Path(target) / STEP_ERRORS.name), fit_error_models(errors))
    lines.append(f"{target}: {len(classes)} classes; errors of {len(errors['fold'])} steps")
    return "\n".join(lines)
