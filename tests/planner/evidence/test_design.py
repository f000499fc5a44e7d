"""The runs to measure are those to which a calibration predicts the others best."""

import random
from statistics import mean, stdev

import pytest

from tests.planner.evidence.test_calibrate import made
from torchllm.planner.evidence.calibrate import problem_of, run_of
from torchllm.planner.evidence.design import ALIKE, Candidate, Design, candidates_of, covariance, most_telling, unlike
from torchllm.planner.evidence.fit import NOISE, FitProblem, linearize

TRUSTS = [1 / 0.1**2, 1.0]


def drawn(count: int) -> list[Candidate]:
    """Runs with random slopes and shares."""
    generator = random.Random(0)
    candidates = []
    for _ in range(count):
        share = generator.random()
        slopes = [-1.0, 0.1 * generator.random()]
        candidates.append(Candidate(slopes, {"matmul": share, "fsdp": 1 - share}, 0.1))
    return candidates


def two_constants() -> FitProblem:
    return FitProblem([], {"speed": 0.0, "exposed": 0.0})


def test_how_unlike_two_steps_are() -> None:
    assert unlike({"matmul": 0.7, "fsdp": 0.3}, {"matmul": 0.7, "fsdp": 0.3}) == 0
    assert unlike({"matmul": 1.0}, {"fsdp": 1.0}) == 2
    alike = Candidate([-1.0], {"matmul": 1.0}, 0.2)
    assert covariance(alike, alike) == pytest.approx(ALIKE * 0.2**2)
    assert covariance(alike, Candidate([-1.0], {"fsdp": 1.0}, 0.2)) < 0.01 * covariance(alike, alike)


def test_the_expected_change_is_that_of_random_errors() -> None:
    """Errors are drawn with the covariance that is assumed, and calibrated to, many times."""
    candidates = drawn(6)
    design = Design(candidates, TRUSTS)
    chosen = [1, 4]
    gains = design.gains(chosen)
    generator = random.Random(1)
    roots = cholesky(design.errors)
    changes = []
    for _ in range(20000):
        normal = [generator.gauss(0, 1) for _ in candidates]
        errors = [sum(root * value for root, value in zip(row, normal, strict=True)) for row in roots]
        uncalibrated = sum(error**2 for error in errors)
        calibrated = 0.0
        for error, candidate in zip(errors, candidates, strict=True):
            for index, gain in zip(chosen, gains, strict=True):
                error -= errors[index] * sum(g * slope for g, slope in zip(gain, candidate.slopes, strict=True))
            calibrated += error**2
        changes.append(calibrated - uncalibrated)
    assert design.change(chosen) == pytest.approx(mean(changes), abs=4 * stdev(changes) / len(changes) ** 0.5)
    assert design.change(chosen) < 0


def cholesky(matrix: list[list[float]]) -> list[list[float]]:
    """Return the lower triangle whose product with itself is the matrix."""
    roots = [[0.0] * len(matrix) for _ in matrix]
    for row in range(len(matrix)):
        for column in range(row + 1):
            value = matrix[row][column]
            for index in range(column):
                value -= roots[row][index] * roots[column][index]
            roots[row][column] = value**0.5 if row == column else value / roots[column][column]
    return roots


def test_gains_are_those_of_the_fit() -> None:
    """One constant with slope -1: the error of one run moves it by as much as its prior lets it."""
    design = Design([Candidate([-1.0], {"matmul": 1.0}, 0.1)], [1 / 0.1**2])
    [[gain]] = design.gains([0])
    assert gain == pytest.approx(-(1 / NOISE**2) / (1 / NOISE**2 + 1 / 0.1**2))


def test_the_first_run_stands_for_most_others() -> None:
    """Nine runs are alike and one is not: measuring that one says little of the nine."""
    common = Candidate([-1.0], {"matmul": 1.0}, 0.1)
    odd = Candidate([-1.0], {"fsdp": 1.0}, 0.1)
    problem = FitProblem([], {"speed": 0.0})
    assert most_telling([odd, *[common] * 9], problem, 1) != [0]
    assert most_telling([common, *[odd] * 9], problem, 1) != [0]


def test_each_run_is_the_best_addition_and_named_once() -> None:
    candidates = drawn(12)
    chosen = most_telling(candidates, two_constants(), 5)
    assert len(set(chosen)) == 5
    design = Design(candidates, [two_constants().trust(name) for name in two_constants().middle])
    for count in range(1, 5):
        added = design.change(chosen[: count + 1])
        for index in set(range(12)) - set(chosen[:count]):
            assert added <= design.change([*chosen[:count], index]) + 1e-12
    assert sorted(most_telling(candidates[:3], two_constants(), 5)) == [0, 1, 2]


def test_slopes_are_in_the_order_of_the_constants() -> None:
    runs = []
    for row in made()[:4]:
        assert row.case
        runs.append(run_of(row.case, 1.0, len(runs)))
    problem = problem_of(runs)
    near = linearize(runs, problem.middle)
    candidates = candidates_of(near, [{}] * 4, [0.1] * 4)
    speed = list(problem.middle).index("machine")
    for index, candidate in enumerate(candidates):
        assert candidate.slopes[speed] == near.slopes["machine"][index] < 0
