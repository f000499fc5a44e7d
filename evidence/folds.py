"""The fit of the constants that all frameworks share, and of a speed of each framework, to published measurements.

The shared constants are the defaults of `software.Constants`, the speeds are in `stacks.STACKS`.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from evidence.measurements import MeasuredRow, read_rows
from evidence.stacks import is_known
from torchllm.tools.planner.calibration.fit import PRIORS, SHARED, FitProblem, Timed, fit


def timed_rows(rows: Iterable[MeasuredRow]) -> list[Timed]:
    """Return the rows to fit: timed, dense, of a framework in `STACKS`, and predicted without assumptions."""
    timed = []
    for row in rows:
        if row.case is None or not row.seconds:
            continue
        is_assumed = bool(row.cells.get("assumed"))
        if is_assumed or row.case.model.experts or not is_known(row.cells.get("stack", "")):
            continue
        fold = fold_of(row)
        timed.append(Timed(row.case, row.seconds, fold, framework_of_fold(fold)))
    return timed


def fold_of(row: MeasuredRow) -> str:
    """Return the fold of a row, framework/model: rows of one fold are left out together."""
    framework, model = row.cells.get("stack", ""), row.cells.get("model", "")
    return row.cells.get("fold") or f"{framework}/{model}"


def framework_of_fold(fold: str) -> str:
    """Return the framework of a fold: all its folds are left out together where a framework is."""
    return fold.split("/")[0]


def joint_problem(rows: Sequence[Timed]) -> FitProblem:
    """Return the fit of the constants that all frameworks share, and of a speed of each framework."""
    middle = {name: math.log(PRIORS[name].middle) for name in SHARED}
    for framework in sorted({row.framework for row in rows}):
        middle[framework] = 0.0
    return FitProblem(rows, middle)


def fitted_constants(folders: Sequence[str]) -> str:
    """Return the constants fitted to all tables of some folders, and the number of rows, as text."""
    files: list[Path] = []
    for folder in folders:
        files += sorted(Path(folder).glob("*.csv"))
    rows: list[Timed] = []
    for file in files:
        try:
            rows += timed_rows(read_rows(str(file)))
        except ValueError:
            print(f"{file}: no table of layouts", file=sys.stderr)
    if not rows:
        raise ValueError(f"{', '.join(folders)}: no row of a known framework has a step time")
    near = fit(joint_problem(rows))
    folds = len({row.fold for row in rows})
    error = mean(map(abs, near.errors))
    lines = [f"{len(rows)} rows of {folds} folds: mean error of the log {error:.3f}"]
    for name, value in near.point.items():
        kind = PRIORS[name].unit if name in SHARED else "speed"
        lines.append(f"{name:30s}{math.exp(value):12.4g}  {kind}")
    return "\n".join(lines)
