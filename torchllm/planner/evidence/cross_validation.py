"""Compute errors on data that the constants were not fitted to: a fold or a whole framework is left out at a time.

No torch. A fold is a framework and a model: all lengths, numbers of GPUs and files of it together. Where a framework is
left out its speed is 1, which is what a user of an unknown framework gets. Facts about frameworks and the cluster files
stay.
"""

import json
import math
from collections.abc import Sequence
from statistics import mean, median
from typing import Literal, NamedTuple

from torchllm.planner.evidence.fit import fit, joint_problem, left_out, timed_rows, with_constants
from torchllm.planner.evidence.measurements import MeasuredRow, read_rows
from torchllm.planner.memory import counted
from torchllm.planner.predict import predict
from torchllm.spec.software import Constants

LeftOutKind = Literal["fold", "framework"]


class LeftOut(NamedTuple):
    """The errors of what was left out."""

    name: str
    rows: int
    fitted: float
    """mean error with constants fitted to all rows"""
    mean: float
    """mean error with constants fitted to the others"""
    median: float
    bias: float
    """mean of predicted / measured - 1, with constants fitted to the others"""


class Residual(NamedTuple):
    """A row, and its distance from a prediction that knew nothing of it."""

    row: MeasuredRow
    fold: str
    left_out: Literal["fold", "framework"]
    """what the constants were not fitted to"""
    time: float | None
    """log of measured over predicted step time; None: not timed"""
    peak: float | None
    """measured less predicted peak memory, as a share of the GPU's; None: not measured"""
    share: float
    """predicted memory, as a share of the GPU's"""


def left_out_residuals(rows: Sequence[MeasuredRow]) -> list[Residual]:
    """Predict each row twice, with constants fitted without its fold and without its framework; takes minutes.

    Step times are those of rows that `fit` takes. Rows in float8 are no evidence.
    """
    evidence = [row for row in rows if row.case is not None and not row.case.kernels.float8]
    fitted = [(row, timed) for row in evidence for timed in timed_rows([row])]
    problem = joint_problem([timed for _, timed in fitted])
    near = fit(problem) if fitted else None
    kinds: tuple[LeftOutKind, ...] = ("fold", "framework")
    found = []
    for what in kinds:
        names = [getattr(timed, what) for _, timed in fitted]
        logs = left_out(problem, near, names) if near else {}
        in_order = {name: iter(of) for name, of in logs.items()}
        times = {id(row): -next(in_order[name]) for (row, _), name in zip(fitted, names, strict=True)}
        found += [_residual(row, what, times.get(id(row))) for row in evidence]
    return found


def fold_of(row: MeasuredRow) -> str:
    """Return the fold of a row: rows of one fold are left out together."""
    return row.cells.get("fold") or f"{row.cells.get('dataset', '')}/{row.cells.get('model', '')}"


def _residual(row: MeasuredRow, what: LeftOutKind, time: float | None) -> Residual:
    assert row.case is not None
    memory, available = predict(with_constants(row.case, Constants())).memory, row.case.hardware.memory
    peak = None
    if row.cells.get("peak_memory_gib") and not row.out_of_memory:
        measured = float(row.cells["peak_memory_gib"]) * 2**30
        peak = (measured - counted(memory, row.case.software)) / available
    return Residual(row, fold_of(row), what, time, peak, memory.total / available)


def cross_validate(files: Sequence[str], what: LeftOutKind, as_json: bool) -> str:
    """Return the errors of whole files as text; takes minutes. OSError or ValueError if a file is no such table."""
    found = leave_out([row for file in files for row in read_rows(file)], what)
    if as_json:
        return json.dumps([one._asdict() for one in found], indent=1)
    lines = [f"{'left out':48s}{'rows':>6s}{'fitted':>8s}{'mean':>8s}{'median':>8s}{'bias':>8s}"]
    for one in found:
        shares = "".join(f"{100 * share:8.1f}" for share in one[2:])
        lines.append(f"{one.name:48s}{one.rows:6d}{shares}")
    return "\n".join(lines)


def leave_out(rows: Sequence[MeasuredRow], what: LeftOutKind) -> list[LeftOut]:
    """Leave out each fold or framework. Where folds are left out, a line for each framework has all its folds."""
    timed = timed_rows(rows)
    if not timed:
        return []
    problem = joint_problem(timed)
    near = fit(problem)
    logs = left_out(problem, near, [getattr(row, what) for row in timed])
    fitted = _by_name([getattr(row, what) for row in timed], near.errors)
    found = [_left_out(name, fitted[name], logs[name]) for name in logs]
    if what == "fold":
        framework_of = {row.fold: row.framework for row in timed}
        together: dict[str, tuple[list[float], list[float]]] = {}
        for fold, framework in framework_of.items():
            of_framework = together.setdefault(framework, ([], []))
            of_framework[0].extend(fitted[fold])
            of_framework[1].extend(logs[fold])
        found += [_left_out(f"{name}, all folds", *both) for name, both in together.items()]
    return found


def _left_out(name: str, fitted: Sequence[float], logs: Sequence[float]) -> LeftOut:
    errors = [math.expm1(log) for log in logs]
    sizes = [abs(error) for error in errors]
    before = mean(abs(math.expm1(log)) for log in fitted)
    return LeftOut(name, len(logs), before, mean(sizes), median(sizes), mean(errors))


def _by_name(names: Sequence[str], errors: Sequence[float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, error in zip(names, errors, strict=True):
        found.setdefault(name, []).append(error)
    return found
