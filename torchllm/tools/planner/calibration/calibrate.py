"""Fit the constants of one machine to a few runs on it. No torch.

Only constants of a machine are fitted (`fit.OF_A_MACHINE`): the speed of its kernels, the part that does
not overlap, the waiting for messages, the slowdown of collectives over nodes. Priors decide where rows are silent.
The reported error is of rows that were not fitted: each is left out in turn, or each twentieth of more than twenty.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from torchllm.tools.config.named_base import name_base
from torchllm.tools.planner.calibration.fit import (
    OF_A_MACHINE,
    UNITS,
    FitProblem,
    Linear,
    Point,
    Timed,
    constants_at,
    fit,
    left_out,
    log_error,
)
from torchllm.tools.planner.calibration.rows import OwnRow, read_rows
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import FOLDER
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.software import Constants
from torchllm.tools.resources import find_config

MACHINE = "machine"
"""name of the speed that is fitted"""
PARTS = 20
"""parts into which rows are split to leave one out at a time; fewer rows: each is a part"""
WAITS = ("wait", "message")
"""constants that are thousands of times larger between processes of a CPU than between GPUs"""


class Calibrated(NamedTuple):
    """Constants of a machine."""

    constants: Constants
    rows: int
    """number of runs that were fitted"""
    uncalibrated: float
    """mean error of their steps with the constants that the rows had"""
    left_out: float | None
    """mean error of steps that were left out of a fit; None of a single run, without which nothing can be fitted"""


def calibrate(rows: Sequence[OwnRow]) -> Calibrated:
    """Return the fitted constants. ValueError if no row is timed."""
    timed: list[Timed] = []
    for row in rows:
        if row.case is not None and row.seconds:
            timed.append(run_of(row.case, row.seconds, len(timed)))
    if not timed:
        problems = "; ".join(dict.fromkeys(row.problem for row in rows if row.problem))
        raise ValueError(f"no row has a step time that can be predicted{problems and f' ({problems})'}")
    problem = problem_of(timed)
    near = fit_machine(problem)
    start = timed[0].case.software.constants
    constants = constants_at(near.point, MACHINE, start)
    allocator = fitted_allocator(rows) or start.allocator
    error = mean_error(log_error(row, problem.middle) for row in timed)
    return Calibrated(replace(constants, allocator=allocator), len(timed), error, left_out_error(problem, near))


def run_of(case: Case, seconds: float, number: int) -> Timed:
    """Return a run on the machine: no fold has two, for none errs as another does."""
    return Timed(case, seconds, fold=str(number), framework=MACHINE)


def problem_of(timed: Sequence[Timed]) -> FitProblem:
    """Return the problem of fitting to runs on one machine, starting from the first run's constants."""
    start = timed[0].case.software.constants
    middle = {MACHINE if name == "speed" else name: math.log(getattr(start, name)) for name in OF_A_MACHINE}
    return FitProblem(timed, middle, timed[0].case.hardware.is_gpu)


def fit_machine(problem: FitProblem) -> Linear:
    """Return the best of the fits from all `starts`."""
    fits = [fit(problem, start) for start in starts(problem)]
    return min(fits, key=lambda near: mean_error(near.errors))


def starts(problem: FitProblem) -> list[Point]:
    """Return where fits begin. Processes of a CPU wait thousands of times longer, which no step from here tells."""
    if problem.is_gpu:
        return [problem.middle]
    points = []
    for factor in (1.0, 1e2, 1e4):
        point = dict(problem.middle)
        for name in WAITS:
            point[name] += math.log(factor)
        points.append(point)
    return points


def left_out_error(problem: FitProblem, near: Linear) -> float | None:
    """Return the mean error of rows with constants fitted to the others; None if there are no others."""
    if len(problem.rows) == 1:
        return None
    parts = [str(number % PARTS) for number in range(len(problem.rows))]
    logs: list[float] = []
    for part_logs in left_out(problem, near, parts).values():
        logs += part_logs
    return mean_error(logs)


def mean_error(logs: Iterable[float]) -> float:
    """Return the mean of |predicted / measured - 1|, as `score` counts it."""
    return mean(abs(math.expm1(log)) for log in logs)


def fitted_allocator(rows: Sequence[OwnRow]) -> float | None:
    """Return the ratio of reserved to used bytes in the middle of the rows; None if they have no peaks."""
    ratios = []
    for row in rows:
        if row.case is None or not row.cells.get("peak_memory_gib"):
            continue
        memory = predict(row.case).memory
        peak = float(row.cells["peak_memory_gib"]) * 2**30
        ratios.append(1 + (peak - memory.live) / max(memory.under_way, 1.0))
    if not ratios:
        return None
    middle = sorted(ratios)[len(ratios) // 2]
    return max(1.0, middle)


def calibrate_file(source: str, target: str, cluster: str) -> str:
    """Fit constants to a CSV file and write a cluster file with them, based on `cluster`. Return a line on the errors.

    cluster: a name or a file; empty: the one that most rows name. OSError or ValueError if
    there is no such file or cluster, or no row is timed.
    """
    rows = read_rows(source, cluster)
    calibrated = calibrate(rows)
    if not cluster:
        names = Counter(row.cells["cluster"] for row in rows if row.case is not None)
        cluster = names.most_common(1)[0][0]
    base = Path(find_config(cluster)) if cluster.endswith(".toml") else FOLDER / f"{cluster}.toml"
    errors = f"mean error of a step {calibrated.uncalibrated:.1%} before, "
    if calibrated.left_out is None:
        errors += "unknown after: a single run cannot be left out of the fit"
    else:
        errors += f"{calibrated.left_out:.1%} on runs left out of the fit"
    lines = [
        f"# {cluster} with the constants of torchllm fitted to {calibrated.rows} runs of {source}:",
        f"# {errors}.",
    ]
    lines += [f'base = "{name_base(str(base), str(Path(target).parent))}"', "", "[constants]"]
    for key in fields(Constants):
        lines.append(f"{key.name} = {getattr(calibrated.constants, key.name):.6g}  # {UNITS[key.name]}")
    Path(target).write_text("\n".join(lines) + "\n")
    return f"{calibrated.rows} runs: {errors}; written to {target}"
