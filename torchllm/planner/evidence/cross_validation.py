"""Compute errors on data that the constants were not fitted to: one model or data set is left out at a time. No torch.

A model is predicted with constants fitted to its data set's other models, a data set with constants fitted to all other
data sets, whatever their framework. Facts about frameworks and the cluster files stay.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Literal, NamedTuple

from torchllm.planner.evidence.calibrate import calibrate, with_constants
from torchllm.planner.evidence.measurements import MeasuredRow, read_rows
from torchllm.planner.memory import counted
from torchllm.planner.predict import predict
from torchllm.spec.software import Constants


class LeftOut(NamedTuple):
    """The errors of what was left out."""

    name: str
    rows: int
    fitted: float
    """mean error with the constants of `STACKS`"""
    mean: float
    """mean error with constants fitted without it"""
    median: float


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
                constants = calibrate([_with_constants(row, Constants()) for row in of_framework])[0]
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


def cross_validate(files: Sequence[str], what: Literal["model", "dataset"], as_json: bool) -> str:
    """Return the errors of whole files as text; takes minutes. OSError or ValueError if a file is no such table."""
    rows = [row for file in files for row in read_rows(file)]
    found = leave_out_models(rows) if what == "model" else leave_out_datasets(rows)
    if as_json:
        return json.dumps([one._asdict() for one in found], indent=1)
    lines = [f"{'left out':40s}{'rows':>6s}{'fitted':>8s}{'mean':>8s}{'median':>8s}"]
    for one in found:
        shares = "".join(f"{100 * share:8.1f}" for share in one[2:])
        lines.append(f"{one.name:40s}{one.rows:6d}{shares}")
    return "\n".join(lines)


def leave_out_models(rows: Sequence[MeasuredRow]) -> list[LeftOut]:
    """Leave out each model of each data set that has other models."""
    found = []
    for dataset, of_set in _by(rows, "dataset").items():
        models = _by(of_set, "model")
        for model, left in models.items():
            rest = [row for name, other in models.items() if name != model for row in other]
            if rest:
                found.append(_left_out(f"{dataset} {model}", left, calibrate(rest)[0]))
    return found


def leave_out_datasets(rows: Sequence[MeasuredRow]) -> list[LeftOut]:
    """Leave out each data set."""
    sets = _by(rows, "dataset")
    found = []
    for dataset, left in sets.items():
        rest = [row for name, other in sets.items() if name != dataset for row in other]
        found.append(_left_out(dataset, left, calibrate(rest)[0]))
    return found


def _left_out(name: str, rows: Sequence[MeasuredRow], constants: Constants) -> LeftOut:
    before, after = [], []
    for row in rows:
        if row.case is None or not row.seconds:
            continue
        before.append(abs(predict(row.case).step / row.seconds - 1))
        other = replace(row.case, software=replace(row.case.software, constants=constants))
        after.append(abs(predict(other).step / row.seconds - 1))
    return LeftOut(name, len(after), mean(before), mean(after), median(after))


def _by(rows: Sequence[MeasuredRow], key: str) -> dict[str, list[MeasuredRow]]:
    found: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        if row.case is not None and row.seconds:
            found.setdefault(row.cells.get(key, "") or "-", []).append(row)
    return found
