"""Fit the error model of steps (`step_errors.py`) to steps that were left out, and write its table. No torch.

The deviations are fitted by maximum likelihood under a Student's t distribution (Lange, Little and Taylor 1989, J. Am.
Stat. Assoc. 84), found by minorization (Zhou, Hu, Zhou and Lange 2019, J. Comput. Graph. Stat. 28). The 90 % interval
is a quantile of |error| / deviation over the rows (split conformal prediction; Lei et al. 2018, J. Am. Stat. Assoc.
113), widened because so few independent units are a small sample: errors within a fold are similar.
"""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist, mean
from typing import NamedTuple

from torchllm.tools.planner.step_errors import HEADER, ErrorModel, ErrorModels, Knowledge, prior_deviation

PRIOR_ROWS = 1.0
"""rows, each the first of its fold, as which the prior of a source counts"""
DEGREES = 4.0
"""degrees of freedom of Student's t distribution: errors have heavier tails than a normal distribution's"""
ROUNDS, CLOSE = 60, 1e-3
"""limits of a fit: the number of rounds, and the relative change of a deviation that ends it"""
SMALL = 0.1
"""standardized error below which a row says no more of its framework's factor: no run is exactly as predicted"""
PRIOR_FOLDS = 1.0
"""weight of the factor 1 against the folds of a framework, in folds"""
COVERED = 0.9
"""share of the steps that an interval shall hold"""
NORMAL_EDGE = NormalDist().inv_cdf((1 + COVERED) / 2)
"""half of that interval of a normal distribution, in deviations"""


class StepError(NamedTuple):
    """The error of one step, and its possible sources."""

    error: float
    """log of measured over predicted seconds"""
    shares: Mapping[str, float]
    """share of the predicted step by source"""
    fold: str
    framework: str
    gpu: str
    """generation"""
    unit: str
    """unit of cross-validation: errors of rows from different units are independent"""


def fit_errors(errors: Sequence[StepError], with_factors: bool, start: ErrorModel | None = None) -> ErrorModel:
    """Return the maximum-likelihood model of these errors.

    with_factors: whether frameworks get a factor, which needs other folds of the same framework. start: a model of
    nearly the same errors, which makes the fit faster. Without errors the priors are returned.
    """
    if not errors:
        return ErrorModel({}, {}, {}, NORMAL_EDGE, 0, 0)
    folds = {error.fold for error in errors}
    gpus_of_folds = {(error.fold, error.gpu) for error in errors}
    folds_of_gpu = dict(Counter(gpu for _, gpu in gpus_of_folds))
    model = ErrorModel(start.deviations if start else {}, {}, folds_of_gpu, 1.0, len(errors), len(folds))
    counts = fold_counts(errors)
    sources = [model.sources(error.shares, error.gpu) for error in errors]
    model = model._replace(deviations=fit_deviations(errors, sources, counts, model))
    if with_factors:
        model = model._replace(factors=fit_factors(errors, counts, model))
    sizes = [abs(error.error) / deviation_of(model, error) for error in errors]
    return model._replace(covering=covering_size(sizes, counts, errors))


def fit_error_models(errors: Mapping[Knowledge, Sequence[StepError]], start: ErrorModels | None = None) -> ErrorModels:
    """Return the model of steps of known frameworks, and the one of unknown frameworks."""
    models: ErrorModels = {}
    for knowledge, of_kind in errors.items():
        models[knowledge] = fit_errors(of_kind, knowledge == "fold", start[knowledge] if start else None)
    return models


def deviation_of(model: ErrorModel, error: StepError) -> float:
    """Return the deviation that a row's error was to be expected to have."""
    return model.interval(error.shares, error.framework, error.gpu).deviation


def fold_counts(errors: Sequence[StepError]) -> list[float]:
    """Return how much each row counts: a fold of n rows as the square root of n, as where constants are fitted."""
    sizes = Counter(error.fold for error in errors)
    return [sizes[error.fold] ** -0.5 for error in errors]


def fit_deviations(
    errors: Sequence[StepError], sources: Sequence[Mapping[str, float]], counts: Sequence[float], start: ErrorModel
) -> dict[str, float]:
    """Return the deviations of the sources that make the errors likeliest, by minorization.

    Each round multiplies the variance of a source by the square root of observed over expected squared errors,
    as far as the source explains them: it never makes the errors less likely.
    """
    names = sorted({name for shares in sources for name in shares})
    variances = {name: start.deviation(name) ** 2 for name in names}
    squares = []
    for shares in sources:
        squares.append([(name, share**2) for name, share in shares.items()])
    for _ in range(ROUNDS):
        observed, expected = {}, {}
        for name in names:
            expected[name] = PRIOR_ROWS / variances[name]
            observed[name] = expected[name] * prior_deviation(name) ** 2 / variances[name]
        for error, parts, count in zip(errors, squares, counts, strict=True):
            variance = sum(square * variances[name] for name, square in parts)
            ratio = error.error**2 / variance
            trust = (DEGREES + 1) / (DEGREES + ratio)  # an error counts less the larger it is
            for name, square in parts:
                weight = count * square / variance
                expected[name] += weight
                observed[name] += weight * trust * ratio
        largest = 0.0
        for name in names:
            change = math.sqrt(observed[name] / expected[name])
            variances[name] *= change
            largest = max(largest, abs(change - 1))
        if largest < CLOSE:
            break
    return {name: math.sqrt(variance) for name, variance in variances.items()}


def fit_factors(errors: Sequence[StepError], counts: Sequence[float], model: ErrorModel) -> dict[str, float]:
    """Return the size of each framework's errors relative to others: the mean of its folds, drawn towards 1.

    The fewer folds there are, the closer the factor is to 1.
    """
    logs = []
    for error in errors:
        size = abs(error.error) / deviation_of(model, error)
        logs.append(math.log(size + SMALL))
    middle = weighted_mean(logs, counts)
    by_fold: dict[str, dict[str, list[float]]] = {}
    for error, log in zip(errors, logs, strict=True):
        by_fold.setdefault(error.framework, {}).setdefault(error.fold, []).append(log)
    factors = {}
    for framework, folds in by_fold.items():
        weights = [math.sqrt(len(of_fold)) for of_fold in folds.values()]
        means = [mean(of_fold) for of_fold in folds.values()]
        distance = weighted_mean(means, weights) - middle
        number = effective_number(weights)
        factors[framework] = math.exp(distance * number / (number + PRIOR_FOLDS))
    return factors


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean of some values."""
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return total / sum(weights)


def effective_number(weights: Iterable[float]) -> float:
    """Return how many equal weights tell as much (Kish 1965, Survey Sampling)."""
    listed = list(weights)
    squares = sum(weight**2 for weight in listed)
    return sum(listed) ** 2 / squares


def covering_size(sizes: Sequence[float], counts: Sequence[float], errors: Sequence[StepError]) -> float:
    """Return the size that 90 % of unseen standardized errors do not exceed.

    The quantile's level is computed for n + 1 folds: the unseen one may be the worst (Lei et al. 2018). The more
    the units are that could be left out, the less the deviations themselves may be wrong: Student's t distribution over
    the normal one.
    """
    folds: dict[str, float] = {}
    units: dict[str, float] = {}
    for error, count in zip(errors, counts, strict=True):
        folds[error.fold] = folds.get(error.fold, 0.0) + count
        units[error.unit] = units.get(error.unit, 0.0) + count
    level = min(1.0, COVERED * (1 + 1 / effective_number(folds.values())))
    independent = effective_number(units.values())
    return weighted_quantile(sizes, counts, level) * wider_than_normal(independent - 1)


def weighted_quantile(values: Sequence[float], weights: Sequence[float], level: float) -> float:
    """Return the value below which a share `level` of the weight lies: linear between the middles of the weights."""
    total, passed = sum(weights), 0.0
    ascending = sorted(zip(values, weights, strict=True))
    lower, lower_value = 0.0, ascending[0][0]
    for value, weight in ascending:
        middle = (passed + weight / 2) / total
        if middle >= level:
            part = (level - lower) / (middle - lower)
            return lower_value + part * (value - lower_value)
        passed += weight
        lower, lower_value = middle, value
    return lower_value


def wider_than_normal(degrees: float) -> float:
    """Return the half width of Student's 90 % interval over the normal one's (Abramowitz and Stegun 1964, 26.7.5)."""
    degrees = max(degrees, 1.0)
    square = NORMAL_EDGE**2
    first = (square + 1) / 4
    second = (5 * square**2 + 16 * square + 3) / 96
    return 1 + first / degrees + second / degrees**2


def write_error_models(target: str, models: ErrorModels) -> None:
    """Write the table of the error model of steps."""
    with open(target, "w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(HEADER)
        for left_out, model in models.items():
            for part in ("deviations", "factors", "folds_of_gpu"):
                for name, value in sorted(getattr(model, part).items()):
                    writer.writerow([left_out, part, name, f"{value:.4g}"])
            for part in ("covering", "rows", "folds"):
                writer.writerow([left_out, part, "", f"{getattr(model, part):.6g}"])
