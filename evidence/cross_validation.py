"""Compute errors on data that the constants were not fitted to: a fold or a whole framework is left out at a time.

No torch. A fold is a framework and a model: all lengths, numbers of GPUs and files of it together. Where a framework is
left out its speed is 1, as for a user of an unknown framework. Facts about frameworks and the cluster files
stay.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

from evidence.fit_step_errors import StepError
from evidence.folds import fold_of, framework_of_fold, joint_problem, timed_rows
from evidence.measurements import MeasuredRow, read_rows
from evidence.peak import counted
from torchllm.tools.planner.calibration.fit import (
    Linear,
    Point,
    Timed,
    constants_at,
    fit,
    left_out,
    left_out_points,
    with_constants,
)
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.software import Constants
from torchllm.tools.planner.step_errors import KNOWLEDGE, Knowledge, generation, shares_of


class LeftOut(NamedTuple):
    """The errors of rows that were left out of a fit."""

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
    case: Case
    """the row's"""
    fold: str
    left_out: Knowledge
    """rows that the constants were not fitted to"""
    time: float | None
    """log of measured over predicted step time; None: not timed"""
    is_fitted: bool
    """whether `fit` takes the row: it assumes nothing, is dense, and of a known framework"""
    shares: Mapping[str, float]
    """share of the predicted step by source of errors"""
    peak: float | None
    """measured less predicted peak memory, as a share of the GPU's; None: not measured, or in float8"""

    @property
    def framework(self) -> str:
        """The framework that is left out with the row."""
        return framework_of_fold(self.fold)


def left_out_residuals(rows: Sequence[MeasuredRow]) -> list[Residual]:
    """Predict each row twice, with constants fitted without its fold and without its framework; takes minutes.

    Constants are fitted to the rows that `fit` takes, those in float8 included.
    """
    timed = timed_rows(rows)
    problem = joint_problem(timed)
    near = fit(problem)
    residuals = []
    for kind in KNOWLEDGE:
        points = left_out_points(problem, near, names_of(timed, kind))
        for row in rows:
            if row.case is not None:
                name = fold_of(row) if kind == "fold" else framework_of_fold(fold_of(row))
                point = points.get(name, near.point)
                residuals.append(residual_at(point, row, row.case, kind))
    return residuals


def names_of(timed: Iterable[Timed], kind: Knowledge) -> list[str]:
    """Return the fold of each row, or its framework."""
    return [row.fold if kind == "fold" else row.framework for row in timed]


def residual_at(point: Point, row: MeasuredRow, case: Case, kind: Knowledge) -> Residual:
    """Return how far a row is from its prediction with the constants of a point."""
    fold = fold_of(row)
    constants = constants_at(point, framework_of_fold(fold), case.software.constants)
    prediction = predict(with_constants(case, constants))
    memory = predict(with_constants(case, Constants())).memory
    peak = None
    if row.cells.get("peak_memory_gib") and not row.out_of_memory and not case.kernels.float8:
        measured = float(row.cells["peak_memory_gib"]) * 2**30
        peak = (measured - counted(memory, case.software)) / case.hardware.memory
    time = math.log(row.seconds / prediction.step) if row.seconds else None
    is_fitted = bool(timed_rows([row]))
    return Residual(row, case, fold, kind, time, is_fitted, shares_of(case, prediction), peak)


def step_errors(residuals: Iterable[Residual], kind: Knowledge) -> list[StepError]:
    """Return the errors of the steps that were predicted without their folds, or without their frameworks."""
    errors = []
    for residual in residuals:
        if residual.left_out == kind and residual.time is not None:
            gpu = generation(residual.case.hardware.gpu)
            unit = residual.fold if kind == "fold" else residual.framework
            framework = residual.case.software.name
            errors.append(StepError(residual.time, residual.shares, residual.fold, framework, gpu, unit))
    return errors


def cross_validate(files: Sequence[str], kind: Knowledge, as_json: bool) -> str:
    """Return the errors of whole files as text; takes minutes. OSError or ValueError if a file is no such table."""
    rows: list[MeasuredRow] = []
    for file in files:
        rows += read_rows(file)
    errors = leave_out(rows, kind)
    if as_json:
        return json.dumps([error._asdict() for error in errors], indent=1)
    lines = [f"{'left out':48s}{'rows':>6s}{'fitted':>8s}{'mean':>8s}{'median':>8s}{'bias':>8s}"]
    for error in errors:
        shares = (error.fitted, error.mean, error.median, error.bias)
        columns = "".join(f"{100 * share:8.1f}" for share in shares)
        lines.append(f"{error.name:48s}{error.rows:6d}{columns}")
    return "\n".join(lines)


def leave_out(rows: Sequence[MeasuredRow], kind: Knowledge) -> list[LeftOut]:
    """Leave out each fold or framework. Where folds are left out, a line for each framework has all its folds."""
    timed = timed_rows(rows)
    if not timed:
        return []
    problem = joint_problem(timed)
    near = fit(problem)
    names = names_of(timed, kind)
    logs = left_out(problem, near, names)
    fitted = fitted_errors(names, near)
    errors = [summary_of(name, fitted[name], logs[name]) for name in logs]
    if kind == "framework":
        return errors
    folds_of: dict[str, list[str]] = {}
    for fold in logs:
        folds_of.setdefault(framework_of_fold(fold), []).append(fold)
    for framework, folds in folds_of.items():
        fitted_logs: list[float] = []
        left_out_logs: list[float] = []
        for fold in folds:
            fitted_logs += fitted[fold]
            left_out_logs += logs[fold]
        errors.append(summary_of(f"{framework}, all folds", fitted_logs, left_out_logs))
    return errors


def summary_of(name: str, fitted: Sequence[float], logs: Sequence[float]) -> LeftOut:
    """Return the errors of some rows. fitted: logs of predicted over measured where the rows were fitted, too."""
    errors = [math.expm1(log) for log in logs]
    sizes = [abs(error) for error in errors]
    fitted_mean = mean(abs(math.expm1(log)) for log in fitted)
    return LeftOut(name, len(logs), fitted_mean, mean(sizes), median(sizes), mean(errors))


def fitted_errors(names: Sequence[str], near: Linear) -> dict[str, list[float]]:
    """Return the errors of a fit, by the name that each row has."""
    errors: dict[str, list[float]] = {}
    for name, error in zip(names, near.errors, strict=True):
        errors.setdefault(name, []).append(error)
    return errors
