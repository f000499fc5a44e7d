"""Compute errors on data that the constants were not fitted to: one model or data set is left out at a time. No torch.

A model is predicted with constants fitted to its data set's other models, a data set with constants fitted to all other
data sets, whatever their framework. Facts about frameworks and the cluster files stay.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Literal, NamedTuple

from torchllm.planner.evidence.calibrate import calibrate
from torchllm.planner.evidence.measurements import MeasuredRow, read_rows
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
