"""Fit the constants of one machine to a few runs on it. No torch.

Only what a machine tells is fitted (`spec.software.OF_A_MACHINE`): the speed of its kernels, what does not overlap,
what messages wait, how collectives slow down over nodes. Priors hold what the rows say nothing of. The error that is
reported is of rows that were not fitted: each is left out in turn, or each twentieth of more than twenty.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from torchllm.planner.evidence.fit import FitProblem, Point, Timed, constants_at, fit, left_out, log_error
from torchllm.planner.evidence.measurements import MeasuredRow, cluster_of_row, read_rows
from torchllm.planner.predict import predict
from torchllm.resources import find_config, name_base
from torchllm.spec.cluster import FOLDER
from torchllm.spec.software import OF_A_MACHINE, UNITS, Constants

MACHINE = "machine"
"""name of the speed that is fitted"""
PARTS = 20
"""parts into which rows are split to leave one out at a time; fewer rows: each is a part"""


class Calibrated(NamedTuple):
    """Constants of a machine."""

    constants: Constants
    rows: int
    """number of runs that were fitted"""
    before: float
    """mean error of their steps with the constants that the rows had"""
    left_out: float
    """mean error of steps that were left out of a fit; with a single run that of `before`"""


def calibrate(rows: Sequence[MeasuredRow]) -> Calibrated:
    """Return the fitted constants. ValueError if no row is timed."""
    timed = [
        Timed(row.case, row.seconds, fold=str(at), framework=MACHINE)
        for at, row in enumerate(rows)
        if row.case is not None and row.seconds
    ]
    if not timed:
        raise ValueError("no row has a step time that can be predicted")
    before = timed[0].case.software.constants
    middle = {name: math.log(getattr(before, name)) for name in OF_A_MACHINE if name != "speed"}
    problem = FitProblem(timed, middle | {MACHINE: math.log(before.speed)}, timed[0].case.hardware.is_gpu)
    near = min((fit(problem, begin) for begin in starts(problem)), key=lambda near: mean_error(near.errors))
    constants = constants_at(near.point, MACHINE, before)
    error = [mean_error(log_error(row, problem.middle) for row in timed)] * 2
    if len(timed) > 1:
        parts = [str(at % PARTS) for at in range(len(timed))]
        error[1] = mean_error(log for logs in left_out(problem, near, parts).values() for log in logs)
    return Calibrated(replace(constants, allocator=fitted_allocator(rows) or before.allocator), len(timed), *error)


def starts(problem: FitProblem) -> list[Point]:
    """Return where fits begin. Processes of a CPU wait thousands of times longer, which no step from here tells."""
    if problem.is_gpu:
        return [problem.middle]
    waits = ("wait", "message")
    return [
        {name: value + math.log(factor) * (name in waits) for name, value in problem.middle.items()}
        for factor in (1.0, 1e2, 1e4)
    ]


def mean_error(logs: Iterable[float]) -> float:
    """Return the mean of |predicted / measured - 1|, as `score` counts it."""
    return mean(abs(math.expm1(log)) for log in logs)


def fitted_allocator(rows: Sequence[MeasuredRow]) -> float | None:
    """Return the ratio of reserved to used bytes in the middle of the rows; None if they have no peaks."""
    ratios = []
    for row in rows:
        if row.case is None or not row.cells.get("peak_memory_gib") or row.case.software.peaks_allocated:
            continue
        memory = predict(row.case).memory
        peak = float(row.cells["peak_memory_gib"]) * 2**30
        ratios.append(1 + (peak - memory.live) / max(memory.under_way, 1.0))
    return max(1.0, sorted(ratios)[len(ratios) // 2]) if ratios else None


def calibrate_file(source: str, target: str, cluster: str) -> str:
    """Fit constants to a CSV file and write a cluster file with them, based on `cluster`. Return a line on the errors.

    cluster: a name or a file; empty: the one that most rows name, or whose GPU they have. OSError or ValueError if
    there is no such file or cluster, or no row is timed.
    """
    rows = read_rows(source, cluster)
    found = calibrate(rows)
    if not cluster:
        names = Counter(cluster_of_row(row.cells) for row in rows if row.case is not None)
        cluster = names.most_common(1)[0][0]
    base = Path(find_config(cluster)) if cluster.endswith(".toml") else FOLDER / f"{cluster}.toml"
    errors = f"mean error of a step {found.before:.1%} before, {found.left_out:.1%} on runs left out of the fit"
    lines = [f"# {cluster} with the constants of torchllm fitted to {found.rows} runs of {source}:", f"# {errors}."]
    lines += [f'base = "{name_base(str(base), str(Path(target).parent))}"', "", "[constants]"]
    for key in fields(Constants):
        lines.append(f"{key.name} = {getattr(found.constants, key.name):.6g}  # {UNITS[key.name]}")
    Path(target).write_text("\n".join(lines) + "\n")
    return f"{found.rows} runs: {errors}; written to {target}"
