"""The runs to measure are those to which a calibration predicts the others best."""

import random

import numpy as np
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
    chosen, others = [1, 4], [0, 2, 3, 5]
    slopes = np.array([candidate.slopes for candidate in candidates])
    normal = np.random.default_rng(1).normal(size=(20000, 6))
    errors = normal @ np.linalg.cholesky(np.array(design.errors)).T
    corrections = errors[:, chosen] @ np.array(design.gains(chosen))  # of the constants
    calibrated = errors[:, others] - corrections @ slopes[others].T
    sums = (calibrated**2).sum(1)
    standard_error = sums.std() / len(sums) ** 0.5
    assert design.error_of_others(chosen) == pytest.approx(sums.mean(), abs=4 * standard_error)


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
