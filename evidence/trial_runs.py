"""Compare the runs that are named to be measured first with random ones, on published runs. No torch.

A fold's rows are the runs of a job. Constants are fitted without the fold, calibrated to six of its rows, and tried on
the rest: to the six that `design.most_telling` names before any is measured, and to random sixes.
"""

import json
import math
import random
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from evidence.folds import joint_problem, timed_rows
from torchllm.tools.planner.evidence.calibrate import fit_machine, mean_error, problem_of, run_of
from torchllm.tools.planner.evidence.design import candidates_of, most_telling
from torchllm.tools.planner.evidence.fit import (
    Point,
    Timed,
    constants_at,
    fit,
    left_out_points,
    linearize,
    log_error,
    with_constants,
)
from torchllm.tools.planner.evidence.measurements import MeasuredRow, read_rows
from torchllm.tools.planner.evidence.step_errors import shares_of
from torchllm.tools.planner.evidence.validity import step_deviation
from torchllm.tools.planner.predict import predict

RUNS = 6
ENOUGH_ROWS = 20
"""rows of a fold from which it is tried"""
RANDOM_CHOICES = 100
SEED = 0


class FoldTrial(NamedTuple):
    """Errors of the rows of a fold that were not calibrated to."""

    fold: str
    rows: int
    uncalibrated: float
    """mean error of all its rows without calibration"""
    named: float
    """mean error after calibrating to the named runs"""
    random: float
    """the same of random runs: the median of the choices"""
    beaten: float
    """share of the random choices that are worse than the named one"""

    @property
    def is_better(self) -> bool:
        """Whether the named runs lower the error more than the median of the random ones."""
        return self.named < self.random


def trials(rows: Sequence[MeasuredRow]) -> list[FoldTrial]:
    """Try each fold that has rows enough; takes minutes."""
    timed = timed_rows(rows)
    problem = joint_problem(timed)
    points = left_out_points(problem, fit(problem), [row.fold for row in timed])
    results = []
    for fold, point in points.items():
        members = [row for row in timed if row.fold == fold]
        if len(members) >= ENOUGH_ROWS:
            results.append(trial_of(fold, runs_at(members, point)))
    return results


def runs_at(rows: Sequence[Timed], point: Point) -> list[Timed]:
    """Return the rows as runs on one machine, with the constants of a point."""
    runs: list[Timed] = []
    for row in rows:
        constants = constants_at(point, row.framework, row.case.software.constants)
        runs.append(run_of(with_constants(row.case, constants), row.seconds, len(runs)))
    return runs


def trial_of(fold: str, runs: Sequence[Timed]) -> FoldTrial:
    """Return the errors of a fold's rows, calibrated to the named runs and to random ones."""
    start = problem_of(runs).middle
    uncalibrated = mean_error(log_error(run, start) for run in runs)
    named = error_of_rest(runs, named_runs(runs))
    generator = random.Random(SEED)
    errors = []
    for _ in range(RANDOM_CHOICES):
        chosen = generator.sample(range(len(runs)), RUNS)
        errors.append(error_of_rest(runs, chosen))
    worse = sum(error > named for error in errors)
    return FoldTrial(fold, len(runs), uncalibrated, named, median(errors), worse / len(errors))


def named_runs(runs: Sequence[Timed]) -> list[int]:
    """Return the indices of the runs to measure first, from predictions alone."""
    as_predicted, shares, deviations = [], [], []
    for run in runs:
        prediction = predict(run.case)
        as_predicted.append(run._replace(seconds=prediction.step))
        shares.append(shares_of(run.case, prediction))
        deviations.append(step_deviation(run.case, prediction))
    problem = problem_of(as_predicted)
    near = linearize(problem.rows, problem.middle)
    candidates = candidates_of(near, shares, deviations)
    return most_telling(candidates, problem, RUNS)


def error_of_rest(runs: Sequence[Timed], chosen: Sequence[int]) -> float:
    """Return the mean error of the runs that are not chosen, with constants calibrated to the chosen ones."""
    calibration = problem_of([runs[index] for index in chosen])
    near = fit_machine(calibration)
    rest = [run for index, run in enumerate(runs) if index not in chosen]
    return mean_error(log_error(run, near.point) for run in rest)


HEADER = f"{'fold':48s}{'rows':>6s}{'before':>8s}{'named':>8s}{'random':>8s}{'beaten':>8s}"
LEGEND = (
    f"mean errors in %: before calibration; of the rest after calibrating to the {RUNS} named runs, and to random",
    f"ones (median of {RANDOM_CHOICES} choices); beaten: % of the random choices that are worse than the named one",
)


def trial_lines(results: Sequence[FoldTrial]) -> list[str]:
    """Return one line of text for each fold, and how many are better than the median."""
    lines = [HEADER]
    for trial in results:
        numbers = (trial.uncalibrated, trial.named, trial.random, trial.beaten)
        columns = "".join(f"{100 * number:8.1f}" for number in numbers)
        remark = "" if trial.is_better else "  not better"
        lines.append(f"{trial.fold:48s}{trial.rows:6d}{columns}{remark}")
    better = sum(trial.is_better for trial in results)
    if results:
        logs = [math.log(trial.named / trial.random) for trial in results]
        ratio = math.exp(sum(logs) / len(logs))
        lines.append(f"better on {better} of {len(results)} folds; {ratio:.3f} of the random error, geometric mean")
    return lines


def score_first_runs(files: Sequence[str], as_json: bool) -> str:
    """Return the trials of the folds in some files as text; takes minutes. Errors as `read_rows`."""
    rows: list[MeasuredRow] = []
    for file in files:
        rows += read_rows(file)
    results = trials(rows)
    if as_json:
        return json.dumps([trial._asdict() for trial in results], indent=1)
    return "\n".join([*trial_lines(results), "", *LEGEND])
