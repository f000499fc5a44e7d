"""Choose the runs of a job to measure, so that the constants calibrated to them predict its other runs best. No torch.

Calibration is linear near the constants that it starts from (`fit`): with the slopes S of the log of a step by the log
of each constant, their priors P and the noise n, errors e of some runs move the constants by K e,

    K = (S^T S / n^2 + P)^-1 S^T / n^2.

The chosen runs are those that leave the least expected squared error of all others after calibration: an I-optimal
design (Atkinson, Donev and Tobias 2007, Optimum Experimental Designs, section 10.6), chosen one by one. FOOTGUN: with
the error of the chosen ones in the sum, the least certain ones would be chosen. A run's error has other causes than
the constants, too. Runs with similar terms have similar errors: within a fold, the errors (in deviations of
`step_errors`) are correlated by `ALIKE`, falling to a third at a distance of `FALL`. So the prior of the errors
is a covariance with that correlation, plus `NOISE`, and runs that stand for many others are preferred to runs
that are only extreme.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchllm.tools.planner.evidence.fit import NOISE, FitProblem, Linear, solve

ALIKE = 0.5
"""correlation of the errors of runs with nearly the same shares of terms, measured over the rows of folds"""
FALL = 0.4
"""difference of two runs' shares, of at most 2, over which that correlation falls by the factor e"""


Vector = Sequence[float]
Shares = Mapping[str, float]
"""share of a step by term"""


class Candidate(NamedTuple):
    """A run that may be measured."""

    slopes: list[float]
    """derivative of the log of its step by the log of each constant that is calibrated"""
    shares: Shares
    deviation: float
    """of its error, as a logarithm"""


def candidates_of(near: Linear, shares: Sequence[Shares], deviations: Vector) -> list[Candidate]:
    """Return runs near the constants that calibration starts from."""
    candidates = []
    for index, deviation in enumerate(deviations):
        slopes = [near.slopes[name][index] for name in near.point]
        candidates.append(Candidate(slopes, shares[index], deviation))
    return candidates


def unlike(first: Shares, second: Shares) -> float:
    """Return how differently two steps are spent: the sum of the differences of their terms' shares, from 0 to 2."""
    total = 0.0
    for term in dict.fromkeys([*first, *second]):
        difference = first.get(term, 0.0) - second.get(term, 0.0)
        total += abs(difference)
    return total


def covariance(first: Candidate, second: Candidate) -> float:
    """Return the covariance of the errors of two runs, without the independent noise of each."""
    distance = unlike(first.shares, second.shares)
    correlation = ALIKE * math.exp(-distance / FALL)
    return correlation * first.deviation * second.deviation


def dot(first: Vector, second: Vector) -> float:
    """Return the sum of products."""
    pairs = zip(first, second, strict=True)
    return sum(x * y for x, y in pairs)


def columns_of(rows: Sequence[Vector]) -> list[Vector]:
    """Return the columns of a matrix."""
    return list(zip(*rows, strict=True))


class Design:
    """The gain of calibrating to some of the candidates."""

    def __init__(self, candidates: Sequence[Candidate], trusts: Vector) -> None:
        """trusts: weight of the squared distance of each constant from its prior (`FitProblem.trust`)."""
        self.candidates = candidates
        self.trusts = trusts
        self.errors = self.error_covariances()
        columns = columns_of([candidate.slopes for candidate in candidates])
        self.products: list[Vector] = []
        """of the slopes by each two constants, summed over the runs"""
        for row in columns:
            self.products.append([dot(column, row) for column in columns])
        self.pulls: list[Vector] = []
        """covariance of a run's error with the errors of all runs, times their slopes"""
        for errors in self.errors:
            self.pulls.append([dot(errors, column) for column in columns])

    def error_covariances(self) -> list[list[float]]:
        """Return the covariances of the candidates' errors before any is measured."""
        matrix: list[list[float]] = []
        for candidate in self.candidates:
            row = [covariance(candidate, column) for column in self.candidates]
            row[len(matrix)] += NOISE**2
            matrix.append(row)
        return matrix

    def gains(self, chosen: Sequence[int]) -> list[list[float]]:
        """Return how far the constants move against the error of each chosen run: the columns of K."""
        matrix: list[list[float]] = []
        slopes_of_runs = [self.candidates[index].slopes for index in chosen]
        columns = columns_of(slopes_of_runs)
        for row, trust in zip(columns, self.trusts, strict=True):
            information = [dot(row, column) / NOISE**2 for column in columns]
            information[len(matrix)] += trust
            matrix.append(information)
        gains = []
        for slopes in slopes_of_runs:
            right = [slope / NOISE**2 for slope in slopes]
            gains.append(solve(matrix, right))
        return gains

    def error_of_others(self, chosen: Sequence[int]) -> float:
        """Return the expected sum of the squared errors of all other runs, after calibrating to the chosen ones."""
        gains = self.gains(chosen)
        total = self.change(chosen, gains)
        for index, errors in enumerate(self.errors):
            if index not in chosen:
                total += errors[index]
        for index in chosen:
            total -= self.change_of_run(index, chosen, gains)
        return total

    def change_of_run(self, run: int, chosen: Sequence[int], gains: Sequence[Vector]) -> float:
        """Return the expected change of the squared error of one run, by calibrating to the chosen ones."""
        slopes = self.candidates[run].slopes
        weights = [dot(slopes, gain) for gain in gains]
        total = 0.0
        for index, weight in zip(chosen, weights, strict=True):
            total -= 2 * weight * self.errors[run][index]
            for second_index, second_weight in zip(chosen, weights, strict=True):
                total += weight * second_weight * self.errors[index][second_index]
        return total

    def change(self, chosen: Sequence[int], gains: Sequence[Vector]) -> float:
        """Return the sum of `change_of_run` over all runs, in fewer operations."""
        total = 0.0
        for index, gain in zip(chosen, gains, strict=True):
            total -= 2 * dot(gain, self.pulls[index])
            moved = [dot(gain, row) for row in self.products]
            errors = self.errors[index]
            for second_index, second_gain in zip(chosen, gains, strict=True):
                total += errors[second_index] * dot(moved, second_gain)
        return total


def most_telling(candidates: Sequence[Candidate], problem: FitProblem, count: int) -> list[int]:
    """Return the indices of the `count` candidates to measure, the first one first; all of them if there are fewer.

    problem: of the calibration; its `middle` has the constants, in the order of the candidates' slopes.
    """
    trusts = [problem.trust(name) for name in problem.middle]
    design = Design(candidates, trusts)
    chosen: list[int] = []
    remaining = list(range(len(candidates)))
    while remaining and len(chosen) < count:
        errors = [design.error_of_others([*chosen, index]) for index in remaining]
        best = errors.index(min(errors))
        chosen.append(remaining.pop(best))
    return chosen
