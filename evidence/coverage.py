"""Count how many measured steps lie in the interval that a user of their job would have been told. No torch.

The interval of a row is from residuals that have no row of its fold: a user of a known framework sees it for a new
model. Or they have no row of its whole framework: a user of an unknown framework sees it. Of intervals of 90 % the
two-sided binomial test says how unlikely such a count is.
"""

import json
import math
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import NamedTuple

from evidence.cross_validation import Residual, left_out_residuals, step_errors
from evidence.fit_step_errors import COVERED, StepError, fit_error_models
from evidence.folds import framework_of_fold
from evidence.measurements import MeasuredRow, read_rows
from torchllm.tools.planner.step_errors import KNOWLEDGE, Knowledge
from torchllm.tools.planner.validity import interval_from

WIDEST = 1.5
"""largest half width of a useful interval, divided by the mean error"""
SIGNIFICANT = 0.01
"""probability of a count below which the intervals are not of 90 %"""
CLASSES = ("scored", "assumed")


class CheckedStep(NamedTuple):
    """A measured step and its interval."""

    dataset: str
    row_class: str
    """scored, or assumed: under a stated assumption"""
    error: float
    """log of measured over predicted seconds"""
    half: float
    """half of the interval of that error"""

    @property
    def is_covered(self) -> bool:
        """Whether the step lies in its interval."""
        return abs(self.error) <= self.half

    @property
    def half_width(self) -> float:
        """Half of the interval of seconds, as a share of the predicted ones."""
        return math.sinh(self.half)

    @property
    def relative_error(self) -> float:
        """Absolute error, as a share of the measured seconds."""
        return abs(math.expm1(-self.error))


class Coverage(NamedTuple):
    """How well the intervals of some rows hold."""

    name: str
    row_class: str
    rows: int
    covered: int
    probability: float
    """of a count as unlikely as this one, if intervals hold 90 %"""
    half_width: float
    """median of the rows"""
    error: float
    """mean of the rows"""
    constant: float
    """share of the rows whose error is at most `WIDEST` of that mean: the coverage of intervals of one width"""

    @property
    def is_plausible(self) -> bool:
        """Whether the test does not reject that the intervals are of 90 %."""
        return self.probability >= SIGNIFICANT

    @property
    def is_narrow(self) -> bool:
        """Whether the intervals are at most `WIDEST` of the mean error wide to each side."""
        return self.half_width <= WIDEST * self.error


def checked_steps(residuals: Sequence[Residual], kind: Knowledge) -> list[CheckedStep]:
    """Return the steps of residuals, each with the interval from those without its fold, or without its framework."""
    errors = {knowledge: step_errors(residuals, knowledge) for knowledge in KNOWLEDGE}
    start = fit_error_models(errors)
    units: dict[str, list[Residual]] = {}
    for residual in residuals:
        if residual.left_out == kind and residual.time is not None:
            units.setdefault(unit_of_fold(residual.fold, kind), []).append(residual)
    steps = []
    for unit, members in units.items():
        remaining = {knowledge: without(errors[knowledge], kind, unit) for knowledge in KNOWLEDGE}
        models = fit_error_models(remaining, start)
        for residual in members:
            assert residual.time is not None
            row_class = "assumed" if residual.row.assumed else "scored"
            half = interval_from(models, residual.case, residual.shares).half
            steps.append(CheckedStep(residual.row.cells.get("dataset", "-"), row_class, residual.time, half))
    return steps


def unit_of_fold(fold: str, kind: Knowledge) -> str:
    """Return the unit that is left out with a fold: the fold, or its framework."""
    return fold if kind == "fold" else framework_of_fold(fold)


def without(errors: Sequence[StepError], kind: Knowledge, unit: str) -> list[StepError]:
    """Return the errors that are of another fold, or of another framework."""
    return [error for error in errors if unit_of_fold(error.fold, kind) != unit]


def coverage_of(name: str, row_class: str, steps: Sequence[CheckedStep]) -> Coverage:
    """Return how well the intervals of some rows hold."""
    covered = sum(step.is_covered for step in steps)
    error = mean(step.relative_error for step in steps)
    in_constant = sum(step.relative_error <= WIDEST * error for step in steps)
    return Coverage(
        name,
        row_class,
        len(steps),
        covered,
        binomial_test(covered, len(steps), COVERED),
        median(step.half_width for step in steps),
        error,
        in_constant / len(steps),
    )


def binomial_test(successes: int, trials: int, chance: float) -> float:
    """Return the probability of counts that are at most as likely as this one: the two-sided exact test."""
    logs = []
    for count in range(trials + 1):
        arrangements = math.log(math.comb(trials, count))
        logs.append(arrangements + count * math.log(chance) + (trials - count) * math.log1p(-chance))
    tolerance = 1e-9  # of logarithms of counts that are equally likely
    return min(1.0, sum(math.exp(log) for log in logs if log <= logs[successes] + tolerance))


def coverages(steps: Sequence[CheckedStep]) -> list[Coverage]:
    """Return the coverage of each data set and class of rows; then of all rows, together and by class."""
    groups: dict[tuple[str, str], list[CheckedStep]] = {}
    for step in steps:
        groups.setdefault((step.dataset, step.row_class), []).append(step)
    lines = [coverage_of(dataset, row_class, group) for (dataset, row_class), group in sorted(groups.items())]
    for row_class in CLASSES:
        of_class = [step for step in steps if step.row_class == row_class]
        if of_class:
            lines.append(coverage_of("pooled", row_class, of_class))
    lines.append(coverage_of("pooled", "all", steps))
    return lines


TITLES = {"fold": "the row's fold left out", "framework": "the row's whole framework left out"}
HEADER = (
    f"{'':28s}{'class':>10s}{'rows':>7s}{'covered':>9s}{'p':>9s}{'half':>8s}{'1.5 x err':>11s}{'constant':>10s}  misses"
)
LEGEND = (
    "covered: % of the rows in their interval; p: two-sided binomial test against 90 %; half: median half width, in %",
    "of the predicted step; 1.5 x err: mean left-out error; constant: % of the rows with errors below that",
)


def coverage_lines(lines: Iterable[Coverage]) -> list[str]:
    """Return one line of text each; the last column names the targets that are missed."""
    texts = [HEADER]
    for line in lines:
        misses = []
        if not line.is_plausible:
            misses.append("coverage")
        if not line.is_narrow:
            misses.append("width")
        texts.append(
            f"{line.name:28s}{line.row_class:>10s}{line.rows:7d}{100 * line.covered / line.rows:9.1f}"
            f"{line.probability:9.2g}{100 * line.half_width:8.1f}{100 * WIDEST * line.error:11.1f}"
            f"{100 * line.constant:10.1f}  {', '.join(misses)}"
        )
    return texts


def score_intervals(files: Sequence[str], as_json: bool) -> str:
    """Return the coverage of the intervals on some files, as text; takes minutes. Errors as `read_rows`."""
    rows: list[MeasuredRow] = []
    for file in files:
        rows += read_rows(file)
    residuals = left_out_residuals(rows)
    texts, plain = [], {}
    for kind in KNOWLEDGE:
        lines = coverages(checked_steps(residuals, kind))
        texts += [TITLES[kind], *coverage_lines(lines), ""]
        plain[kind] = [line._asdict() for line in lines]
    if as_json:
        return json.dumps(plain, indent=1)
    return "\n".join([*texts, *LEGEND])
