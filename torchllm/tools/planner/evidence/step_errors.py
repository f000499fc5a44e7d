"""How wrong a predicted step may be: a spread that each of its terms has, fitted to steps that were left out. No torch.

The error of a step is log(measured / predicted). Its terms are known unequally well: a matrix product to a few per
cent, the waiting of kernels for each other to a factor. So an error's variance is taken as a sum over sources,

    variance = (factor of the framework)^2 x sum over sources of (share of the step x deviation of the source)^2

where a source is a term of the prediction, or something that concerns the whole step (`WHOLE_STEP`). The deviations are
fitted by maximum likelihood under a Student's t distribution (Lange, Little and Taylor 1989, J. Am. Stat.
Assoc. 84), found by minorization (Zhou, Hu, Zhou and Lange 2019, J. Comput. Graph. Stat. 28). The 90 % interval is a
quantile of |error| / deviation over the rows (split conformal prediction; Lei et al. 2018, J. Am. Stat. Assoc. 113),
widened because so few independent units are a small sample: errors within a fold are similar.
"""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, mean
from typing import Literal, NamedTuple

from torchllm.tools.planner.case import Case
from torchllm.tools.planner.predict import Prediction

TABLE = Path(__file__).with_name("step_errors.csv")
HEADER = ("left_out", "what", "name", "value")
Knowledge = Literal["fold", "framework"]
"""rows that the constants were not fitted to"""
KNOWLEDGE: tuple[Knowledge, ...] = ("fold", "framework")

EVERY_STEP = "every step"
FLOAT8 = "float8"
EXPERTS = "experts"
RARELY_MEASURED = "a GPU that is rarely measured"
WHOLE_STEP = {EVERY_STEP: 0.03, FLOAT8: 0.2, EXPERTS: 0.5, RARELY_MEASURED: 0.15}
"""sources that are no term of a prediction, and the deviation that each may well have"""
ACROSS_NODES = "tensor parallel across nodes"
PRIOR_ACROSS_NODES = 1.0
PRIOR_OF_TERM = 0.3
"""deviation that a term of a prediction may well have: 30 % of its seconds"""
PRIOR_ROWS = 1.0
"""rows, each the first of its fold, as which the prior of a source counts"""
RARELY_FOLDS = 6
"""folds of a generation of GPUs below which it is rarely measured"""
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


class StepInterval(NamedTuple):
    """The interval that holds 90 % of the errors of steps like one, as logarithms of measured over predicted."""

    half: float
    deviation: float
    rows: int
    folds: int
    factor: float
    """size of the framework's errors relative to other frameworks; 1 if it was not measured"""
    widest: str
    """source that adds most to the variance"""

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of the interval."""
        return -self.half, self.half


class ErrorModel(NamedTuple):
    """The error model: left-out errors predict the error of another step."""

    deviations: dict[str, float]
    """by source"""
    factors: dict[str, float]
    """by framework"""
    folds_of_gpu: dict[str, int]
    """by generation of GPUs"""
    covering: float
    """half of the interval, in deviations of a step"""
    rows: int
    folds: int

    def interval(self, shares: Mapping[str, float], framework: str, gpu: str) -> StepInterval:
        """Return the interval of a step. shares: as `shares_of`."""
        sources = self.sources(shares, gpu)
        factor = self.factors.get(framework, 1.0)
        parts = {}
        for source, share in sources.items():
            parts[source] = (share * self.deviation(source)) ** 2
        deviation = factor * math.sqrt(sum(parts.values()))
        half = self.covering * deviation
        widest = max(parts, key=parts.__getitem__)
        return StepInterval(half, deviation, self.rows, self.folds, factor, widest)

    def sources(self, shares: Mapping[str, float], gpu: str) -> dict[str, float]:
        """Return the shares with one for the GPU, if hardly any fold is of its generation."""
        is_rarely = self.folds_of_gpu.get(gpu, 0) < RARELY_FOLDS
        return {**shares, RARELY_MEASURED: 1.0} if is_rarely else dict(shares)

    def deviation(self, source: str) -> float:
        """Return the deviation of a source; of a term that no row has, its prior."""
        return self.deviations.get(source, prior_deviation(source))


ErrorModels = dict[Knowledge, ErrorModel]
"""by kind of left-out rows"""


def prior_deviation(source: str) -> float:
    """Return the deviation that a source may well have."""
    if source == ACROSS_NODES:
        return PRIOR_ACROSS_NODES
    return WHOLE_STEP.get(source, PRIOR_OF_TERM)


def shares_of(case: Case, prediction: Prediction) -> dict[str, float]:
    """Return the shares of a predicted step by source; the GPU's generation is not judged here."""
    shares = {EVERY_STEP: 1.0}
    for term, seconds in prediction.terms.items():
        if seconds > 0:
            shares[term] = seconds / prediction.step
    if case.parallel.tp > case.hardware.gpus_per_node:
        shares[ACROSS_NODES] = shares.get("tensor parallel", 0.0)
    if case.kernels.float8:
        shares[FLOAT8] = 1.0
    if case.model.experts:
        shares[EXPERTS] = 1.0
    return shares


def generation(gpu: str) -> str:
    """Return the generation of a GPU: "H100" of "H100-SXM5-80GB"."""
    return gpu.split("-")[0]


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


@lru_cache(maxsize=1)
def read_error_models() -> ErrorModels:
    """Return the table that comes with torchllm."""
    with TABLE.open(newline="") as opened:
        lines = list(csv.DictReader(opened))
    models: ErrorModels = {}
    for knowledge in KNOWLEDGE:
        models[knowledge] = error_model_of([cells for cells in lines if cells["left_out"] == knowledge])
    return models


def error_model_of(lines: Iterable[Mapping[str, str]]) -> ErrorModel:
    """Return the model that some lines of the table have."""
    numbers: dict[str, dict[str, float]] = {}
    for cells in lines:
        of_part = numbers.setdefault(cells["what"], {})
        of_part[cells["name"]] = float(cells["value"])
    folds_of_gpu = {gpu: int(folds) for gpu, folds in numbers["folds_of_gpu"].items()}
    covering = numbers["covering"][""]
    rows = int(numbers["rows"][""])
    folds = int(numbers["folds"][""])
    return ErrorModel(numbers["deviations"], numbers.get("factors", {}), folds_of_gpu, covering, rows, folds)
