"""Fit the constants of software to measured steps. No torch.

The fit minimizes the errors of log(predicted / measured) in units of `NOISE`, or of their scatter if that is larger,
plus the distance of each constant from its prior in units of the prior's spread. The larger an error relative to the
typical one, the less its row weighs, as in a fit of Student's t: an outlier, e.g. a run that waited for a
timeout, decides nothing. The descent is Gauss-Newton's: logs of steps are nearly linear in the logs of constants.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np

from torchllm.tools.planner.case import Case
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.software import Constants

SHARED = ("launch", "host", "traffic", "exposed", "wait", "message", "fall")
"""constants that are the same for all frameworks"""
NOISE = 0.05
"""error of a step, as a logarithm, that a row may well have: repeats and versions of software differ by as much"""
STEP = 0.05
"""step of the numerical derivatives, in a constant's logarithm"""
LEAP = 1.5
"""largest change of a logarithm from one round to the next: far away the errors are not linear"""
CLOSE = 0.01
"""largest change of a logarithm after which a fit ends"""
ELSEWHERE = 5.0
"""factor by which priors are wider for a CPU than for a GPU"""
ROUNDS = 12
"""most rounds of a fit"""


class Prior(NamedTuple):
    """The knowledge of a constant before the fit."""

    middle: float
    low: float
    high: float
    """physical bounds: no fit leaves them"""
    unit: str
    spread: float
    """natural logarithm of a plausible factor between the constant and the middle"""


PRIORS = {
    "launch": Prior(5e-6, 3e-6, 1.5e-5, "s", 0.5),
    "host": Prior(5e-5, 5e-6, 1.5e-4, "s", 0.7),
    "traffic": Prior(1.2, 1.0, 2.0, "x", 0.2),
    "exposed": Prior(0.5, 0.05, 1.0, "x", 1.0),
    "wait": Prior(3e-5, 3e-6, 3e-4, "s", 1.0),
    "message": Prior(5e-5, 3e-6, 5e-4, "s", 1.5),
    "fall": Prior(0.05, 0.01, 1.0, "x", 0.7),
    "speed": Prior(1.0, 0.7, 1.3, "x", 0.1),
    "allocator": Prior(1.17, 1.0, 1.5, "x", 0.1),
}
"""for each of the constants; unit x: a ratio.

launch: time that CUDA needs between two kernels. host: PyTorch needs some 10 us for an operation that is not
compiled, and a kernel that the formulas count stands for several. traffic: no kernel moves less than its operands
once. wait: a collective's ramp too, and its slowest rank; no table of them was found, so that the prior is wide.
message: from one kernel's launch to a host that waits for each message. fall: a full fat tree does not fall; a
network that does, like EFA, has its own in the cluster file.
"""
UNITS = {name: prior.unit for name, prior in PRIORS.items()}
"""unit of each constant; x: a ratio"""
OF_A_MACHINE = ("speed", "exposed", "wait", "message", "fall")
"""constants that a few runs on one machine tell"""


class Timed(NamedTuple):
    """A row to fit."""

    case: Case
    seconds: float
    fold: str
    """unit of cross-validation: framework/model"""
    framework: str


Point = dict[str, float]
"""the logarithm of each constant by its name; a framework's speed has the name of the framework"""


class Linear(NamedTuple):
    """The errors of rows near a point."""

    point: Point
    errors: list[float]
    """log of predicted over measured time"""
    slopes: dict[str, list[float]]
    """derivative of each row's error by each constant"""


class FitProblem(NamedTuple):
    """Rows, and the prior knowledge of the constants."""

    rows: Sequence[Timed]
    middle: Point
    """the constants that are fitted, where their priors have them"""
    is_gpu: bool = True
    """False: the bounds of `PRIORS`, which are a GPU's, do not hold, and their spreads are `ELSEWHERE` times as wide"""

    def counts(self) -> list[float]:
        """Return the weight of each row: n rows of a fold weigh sqrt(n) together, because their errors are similar."""
        sizes = Counter(row.fold for row in self.rows)
        return [sizes[row.fold] ** -0.5 for row in self.rows]

    def trust(self, name: str) -> float:
        """Return the weight of the squared distance of a constant from its middle."""
        spread = prior_of(name).spread
        if not self.is_gpu:
            spread *= ELSEWHERE
        return spread**-2

    def bounded(self, name: str, value: float) -> float:
        """Return the logarithm of a constant, or the bound that it exceeds."""
        prior = prior_of(name)
        if not self.is_gpu:
            return min(value, 0.0) if name == "exposed" else value
        return min(math.log(prior.high), max(math.log(prior.low), value))


def prior_of(name: str) -> Prior:
    """Return the prior of a constant, or of a framework's speed."""
    return PRIORS[name if name in SHARED else "speed"]


def constants_at(point: Point, framework: str, start: Constants) -> Constants:
    """Return the constants of a framework. Those missing in `point` stay; an unknown framework has speed 1."""
    shared = {name: math.exp(point[name]) for name in SHARED if name in point}
    return replace(start, **shared, speed=math.exp(point.get(framework, 0.0)))


def with_constants(case: Case, constants: Constants) -> Case:
    """Return the case with other constants of its software."""
    return replace(case, software=replace(case.software, constants=constants))


def log_step(case: Case, framework: str, point: Point) -> float:
    """Return the logarithm of the predicted seconds of a step."""
    constants = constants_at(point, framework, case.software.constants)
    prediction = predict(with_constants(case, constants))
    return math.log(prediction.step)


def log_error(row: Timed, point: Point) -> float:
    """Return the logarithm of predicted over measured time."""
    return log_step(row.case, row.framework, point) - math.log(row.seconds)


def linearize(rows: Sequence[Timed], point: Point) -> Linear:
    """Return errors and derivatives. All speeds are moved at once, because each row has one."""
    errors = [log_error(row, point) for row in rows]
    slopes: dict[str, list[float]] = {}
    for name in SHARED:
        if name in point:
            slopes[name] = slopes_towards(rows, errors, {**point, name: point[name] + STEP})
    faster = dict(point)
    for name in point.keys() - set(SHARED):
        faster[name] += STEP
    speed_slopes = slopes_towards(rows, errors, faster)
    for framework in point.keys() - set(SHARED):
        slopes[framework] = []
        for row, slope in zip(rows, speed_slopes, strict=True):
            slopes[framework].append(slope if row.framework == framework else 0.0)
    return Linear(point, errors, slopes)


def slopes_towards(rows: Sequence[Timed], errors: Sequence[float], moved: Point) -> list[float]:
    """Return the derivative of each row's error. moved: the point with a constant's logarithm larger by `STEP`."""
    return [(log_error(row, moved) - error) / STEP for row, error in zip(rows, errors, strict=True)]


def improve(problem: FitProblem, near: Linear, counts: Sequence[float]) -> Point:
    """Return the best point for the errors as they are near a point, at most `LEAP` away from it."""
    point = dict(near.point)
    for _ in range(4):  # an error counts less the larger it is, which the first solution does not know
        errors = errors_at(near, point)
        typical = max(NOISE, median(map(abs, errors)))
        noise = max(NOISE, scatter(errors))
        weights = []
        for count, error in zip(counts, errors, strict=True):
            weights.append(count / noise**2 / (1 + (error / typical) ** 2))
        changes = best_changes(problem, near, point, errors, weights)
        for name, change in changes.items():
            leap = point[name] + change - near.point[name]
            leap = max(-LEAP, min(LEAP, leap))
            point[name] = problem.bounded(name, near.point[name] + leap)
    return point


def scatter(errors: Sequence[float]) -> float:
    """Return the median distance of errors from their median: it does not depend on the framework's speed."""
    middle = median(errors)
    return median(abs(error - middle) for error in errors)


def errors_at(near: Linear, point: Point) -> list[float]:
    """Return the errors at another point, taken as linear."""
    errors = list(near.errors)
    for name, slopes in near.slopes.items():
        change = point[name] - near.point[name]
        if change:
            errors = [error + change * slope for error, slope in zip(errors, slopes, strict=True)]
    return errors


def best_changes(
    problem: FitProblem, near: Linear, point: Point, errors: Sequence[float], weights: Sequence[float]
) -> Point:
    """Return the changes of the constants that minimize the weighted squares of errors and distances from priors."""
    names = list(point)
    slopes = np.array([near.slopes[name] for name in names])
    trust = np.array([problem.trust(name) for name in names])
    distances = np.array([problem.middle[name] - point[name] for name in names])
    information = (slopes * weights) @ slopes.T + np.diag(trust)
    pull = slopes @ (np.array(weights) * errors)
    return dict(zip(names, np.linalg.solve(information, trust * distances - pull).tolist(), strict=True))


def fit(problem: FitProblem, start: Point | None = None) -> Linear:
    """Return the fitted point, with the errors near it. start: where to begin, if not at the priors."""
    near = linearize(problem.rows, start or problem.middle)
    if not problem.rows:
        return near
    for _ in range(ROUNDS):
        point = improve(problem, near, problem.counts())
        changes = [abs(point[name] - near.point[name]) for name in point]
        if max(changes) < CLOSE:
            break
        near = linearize(problem.rows, point)
    return near


def left_out_points(problem: FitProblem, near: Linear, names: Sequence[str]) -> dict[str, Point]:
    """Return, for each name, the constants fitted to the rows of all other names.

    near: the fit to all rows; the other fits start from its linear errors. names: the group of each row.
    """
    points = {}
    for name in dict.fromkeys(names):
        counts = problem.counts()
        for index, row_name in enumerate(names):
            if row_name == name:
                counts[index] = 0.0
        points[name] = improve(problem, near, counts)
    return points


def left_out(problem: FitProblem, near: Linear, names: Sequence[str]) -> dict[str, list[float]]:
    """Return the log errors of the rows of each name with constants as `left_out_points` has them."""
    points = left_out_points(problem, near, names)
    errors: dict[str, list[float]] = {name: [] for name in points}
    for row, name in zip(problem.rows, names, strict=True):
        errors[name].append(log_error(row, points[name]))
    return errors
