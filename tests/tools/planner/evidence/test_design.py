"""The runs to measure are those to which a calibration predicts the others best."""

import random
from statistics import mean, stdev

import pytest

from tests.tools.planner.evidence.tables import case_of
from tests.tools.planner.evidence.test_calibrate import made
from torchllm.tools.planner.evidence.calibrate import problem_of, run_of
from torchllm.tools.planner.evidence.design import Candidate, Design, candidates_of, most_telling
from torchllm.tools.planner.evidence.fit import FitProblem, linearize

TRUSTS = [1 / 0.1**2, 1.0]


def drawn(count: int) -> list[Candidate]:
    """Runs with random slopes and shares."""
    generator = random.Random(0)
    candidates = []
    for _ in range(count):
        share = generator.random()
        slopes = [-1.0, 0.1 * generator.random()]
        shares = {"matmul": share, "fsdp": 1 - share}
        candidates.append(Candidate(slopes, shares, deviation=0.1))
    return candidates


def test_the_expected_error_of_others_is_that_of_random_errors() -> None:
    """Errors are drawn with the covariance that is assumed, and calibrated to, many times."""
    candidates = drawn(6)
    design = Design(candidates, TRUSTS)
    chosen = [1, 4]
    gains = design.gains(chosen)
    generator = random.Random(1)
    roots = cholesky(design.errors)
    sums = []
    for _ in range(20000):
        normal = [generator.gauss(0, 1) for _ in candidates]
        errors = [dot(row, normal) for row in roots]
        total = 0.0
        for run in (0, 2, 3, 5):
            calibrated = errors[run]
            for index, gain in zip(chosen, gains, strict=True):
                calibrated -= errors[index] * dot(gain, candidates[run].slopes)
            total += calibrated**2
        sums.append(total)
    standard_error = stdev(sums) / len(sums) ** 0.5
    assert design.error_of_others(chosen) == pytest.approx(mean(sums), abs=4 * standard_error)


def dot(first: list[float], second: list[float]) -> float:
    """Return the sum of products."""
    total = 0.0
    for x, y in zip(first, second, strict=True):
        total += x * y
    return total


def cholesky(matrix: list[list[float]]) -> list[list[float]]:
    """Return the lower triangle whose product with itself is the matrix."""
    roots = [[0.0] * len(matrix) for _ in matrix]
    for number, row in enumerate(roots):
        for column, pivot in enumerate(roots[:number]):
            value = matrix[number][column] - dot(row[:column], pivot[:column])
            row[column] = value / pivot[column]
        square = matrix[number][number] - dot(row[:number], row[:number])
        row[number] = square**0.5
    return roots


def test_each_run_is_the_best_addition_and_named_once() -> None:
    candidates = drawn(12)
    problem = FitProblem([], {"speed": 0.0, "exposed": 0.0})
    chosen = most_telling(candidates, problem, 5)
    assert len(set(chosen)) == 5
    trusts = [problem.trust(name) for name in problem.middle]
    design = Design(candidates, trusts)
    for count in range(1, 5):
        earlier = chosen[:count]
        best = design.error_of_others(chosen[: count + 1])
        for index in set(range(12)) - set(earlier):
            assert best <= design.error_of_others([*earlier, index]) + 1e-12


def test_slopes_are_in_the_order_of_the_constants() -> None:
    runs = []
    for row in made()[:4]:
        run = run_of(case_of(row), 1.0, len(runs))
        runs.append(run)
    problem = problem_of(runs)
    near = linearize(runs, problem.middle)
    candidates = candidates_of(near, [{}] * 4, [0.1] * 4)
    speed = list(problem.middle).index("machine")
    for candidate, slope in zip(candidates, near.slopes["machine"], strict=True):
        assert candidate.slopes[speed] == slope
        assert slope < 0
