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

from torchllm.planner.evidence.calibrate import calibrate
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


def left_out_residuals(rows: Sequence[MeasuredRow], fits: bool = True) -> list[Residual]:
    """Predict each row with constants fitted without its fold, and with those of no framework at all.

    fits: False leaves out the fits, which take a minute per fold.

    A fold is what the column `fold` says (framework and model), else the data set and the model. Rows in float8 are no
    evidence: how much faster that makes a product is not predicted.
    """
    folds: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        if _is_evidence(row):
            folds.setdefault(fold_of(row), []).append(row)
    found = []
    for fold, of_fold in folds.items():
        for framework, left in _by_framework(of_fold).items():
            rest = [row for other, some in folds.items() if other != fold for row in some]
            of_framework = [row for row in _by_framework(rest).get(framework, []) if row.seconds]
            if of_framework and fits:
                constants = calibrate([_with_constants(row, Constants()) for row in of_framework]).constants
                found += [_residual(row, fold, "fold", constants) for row in left]
            found += [_residual(row, fold, "framework", Constants()) for row in left]
    return found


def fold_of(row: MeasuredRow) -> str:
    """Return the fold of a row: rows of one fold are left out together."""
    return row.cells.get("fold") or f"{row.cells.get('dataset', '')}/{row.cells.get('model', '')}"


def _is_evidence(row: MeasuredRow) -> bool:
    return row.case is not None and not row.case.kernels.float8


def _by_framework(rows: Sequence[MeasuredRow]) -> dict[str, list[MeasuredRow]]:
    found: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        found.setdefault(row.cells.get("stack", ""), []).append(row)
    return found


def _with_constants(row: MeasuredRow, constants: Constants) -> MeasuredRow:
    assert row.case is not None
    return row._replace(case=with_constants(row.case, constants))


def _residual(row: MeasuredRow, fold: str, left_out: Literal["fold", "framework"], constants: Constants) -> Residual:
    case = _with_constants(row, constants).case
    assert case is not None
    prediction = predict(case)
    time = math.log(row.seconds / prediction.step) if row.seconds else None
    memory = case.hardware.memory
    peak = None
    if row.cells.get("peak_memory_gib") and not row.out_of_memory:
        measured = float(row.cells["peak_memory_gib"]) * 2**30
        peak = (measured - counted(prediction.memory, case.software)) / memory
    return Residual(row, fold, left_out, time, peak, prediction.memory.total / memory)


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
