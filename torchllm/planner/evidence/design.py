"""Choose the runs of a job to measure, so that the constants calibrated to them predict its other runs best. No torch.

Calibration is linear near the constants that it starts from (`fit`): with the slopes S of the log of a step by the log
of each constant, their priors P and the noise n, errors e of some runs move the constants by K e,

    K = (S^T S / n^2 + P)^-1 S^T / n^2.

Of all runs the chosen ones are those with the least expected squared error after calibration: an I-optimal design
(Atkinson, Donev and Tobias 2007, Optimum Experimental Designs, section 10.6), chosen one by one. A run is not wrong by
its constants alone, though. Runs that spend their steps alike err alike: of rows of one fold, the errors (in deviations
of `step_errors`) are correlated by `ALIKE`, falling to a third of that at a distance of `FALL`. So what is taken as
known of errors before any run is a covariance with that correlation, beside `NOISE`, and runs that stand for many
others are preferred to runs that are only extreme.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchllm.planner.evidence.fit import NOISE, FitProblem, Linear, solve

ALIKE = 0.5
"""correlation of the errors of runs that spend their steps nearly alike, measured over the rows of folds"""
FALL = 0.4
"""difference of two runs' shares, of at most 2, over which that correlation falls by the factor e"""


class Candidate(NamedTuple):
    """A run that may be measured."""

    slopes: list[float]
    """derivative of the log of its step by the log of each constant that is calibrated"""
    shares: Mapping[str, float]
    """of its step, by what they are spent on"""
    deviation: float
    """of its error, as a logarithm"""


def candidates_of(near: Linear, shares: Sequence[Mapping[str, float]], deviations: Sequence[float]) -> list[Candidate]:
    """Return runs near the constants from which calibration starts."""
    candidates = []
    for place, (share, deviation) in enumerate(zip(shares, deviations, strict=True)):
        slopes = [near.slopes[name][place] for name in near.point]
        candidates.append(Candidate(slopes, share, deviation))
    return candidates


def unlike(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Return how differently two steps are spent: the sum of the differences of their terms' shares, from 0 to 2."""
    return sum(abs(first.get(term, 0.0) - second.get(term, 0.0)) for term in dict.fromkeys([*first, *second]))


def covariance(first: Candidate, second: Candidate) -> float:
    """Return the covariance of the errors of two runs, less the noise that each has of its own."""
    correlation = ALIKE * math.exp(-unlike(first.shares, second.shares) / FALL)
    return first.deviation * second.deviation * correlation


class Design:
    """What calibrating to some of the candidates gains."""

    def __init__(self, candidates: Sequence[Candidate], trusts: Sequence[float]) -> None:
        """trusts: what the square of each constant's distance from its prior counts (`FitProblem.trust`)."""
        self.candidates = candidates
        self.trusts = trusts
        self.constants = range(len(trusts))
        self.errors = [[covariance(first, second) for second in candidates] for first in candidates]
        for place, row in enumerate(self.errors):
            row[place] += NOISE**2
        self.products = [[self._sum_of_slopes(row, column) for column in self.constants] for row in self.constants]
        self.pulls = [[self._shared_error(place, row) for row in self.constants] for place in range(len(candidates))]

    def _sum_of_slopes(self, row: int, column: int) -> float:
        return sum(candidate.slopes[row] * candidate.slopes[column] for candidate in self.candidates)

    def _shared_error(self, place: int, row: int) -> float:
        """Return the covariance of a run's error with those of all runs, times their slopes."""
        total = 0.0
        for error, candidate in zip(self.errors[place], self.candidates, strict=True):
            total += error * candidate.slopes[row]
        return total

    def gains(self, chosen: Sequence[int]) -> list[list[float]]:
        """Return by how much each constant moves with the error of each chosen run, negated: K^T."""
        matrix = [[0.0] * len(self.trusts) for _ in self.trusts]
        for row in self.constants:
            for column in self.constants:
                for place in chosen:
                    slopes = self.candidates[place].slopes
                    matrix[row][column] += slopes[row] * slopes[column] / NOISE**2
            matrix[row][row] += self.trusts[row]
        gains = []
        for place in chosen:
            gains.append(solve(matrix, [slope / NOISE**2 for slope in self.candidates[place].slopes]))
        return gains

    def change(self, chosen: Sequence[int]) -> float:
        """Return the expected change of the sum of squared errors of all runs, by calibrating to the chosen ones."""
        gains = self.gains(chosen)
        total = 0.0
        for place, gain in zip(chosen, gains, strict=True):
            for row in self.constants:
                total -= 2 * gain[row] * self.pulls[place][row]
        for first, first_gain in zip(chosen, gains, strict=True):
            for second, second_gain in zip(chosen, gains, strict=True):
                total += self.errors[first][second] * self._moved(first_gain, second_gain)
        return total

    def _moved(self, first: Sequence[float], second: Sequence[float]) -> float:
        """Return the sum over all runs of the product of two changes of their predictions."""
        total = 0.0
        for row in self.constants:
            for column in self.constants:
                total += first[row] * self.products[row][column] * second[column]
        return total


def most_telling(candidates: Sequence[Candidate], problem: FitProblem, count: int) -> list[int]:
    """Return the places of the `count` candidates to measure, the first one first; all of them if there are fewer.

    problem: of the calibration; its `middle` has the constants, in the order of the candidates' slopes.
    """
    design = Design(candidates, [problem.trust(name) for name in problem.middle])
    chosen: list[int] = []
    remaining = set(range(len(candidates)))
    while remaining and len(chosen) < count:
        best = min(sorted(remaining), key=lambda place: design.change([*chosen, place]))
        chosen.append(best)
        remaining.remove(best)
    return chosen
