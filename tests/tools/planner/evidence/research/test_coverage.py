"""Intervals are checked with residuals that know nothing of the row, and counted by data set and class."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.tools.planner.evidence.research.test_cross_validation import named
from tests.tools.planner.evidence.tables import case_of, write_rows
from tests.tools.planner.evidence.test_calibrate import made
from torchllm.tools.planner.evidence.research import coverage
from torchllm.tools.planner.evidence.research.coverage import (
    CheckedStep,
    binomial_test,
    checked_steps,
    coverage_lines,
    coverage_of,
    score_intervals,
)
from torchllm.tools.planner.evidence.research.cross_validation import Residual
from torchllm.tools.planner.evidence.step_errors import EVERY_STEP, KNOWLEDGE, Knowledge


def residuals(errors: dict[str, list[float]], kind: Knowledge = "fold") -> list[Residual]:
    """One residual for each error of a fold. The framework of a case is that of its fold."""
    row = made()[0]
    usual = case_of(row)
    made_up = []
    for fold, errors_of_fold in errors.items():
        framework = fold.split("/")[0]
        case = replace(usual, software=replace(usual.software, name=framework))
        for knowledge, error in product(KNOWLEDGE, errors_of_fold):
            time = error if knowledge == kind else 10 * error
            residual = Residual(row, case, fold, knowledge, time, True, {EVERY_STEP: 1.0}, None, 0.5)
            made_up.append(residual)
    return made_up


FOLDS = {f"a/{number}": [0.1, -0.1, 0.05, -0.02] for number in range(6)}


def steps_with(fold: str, errors: list[float]) -> list[CheckedStep]:
    return checked_steps(residuals({**FOLDS, fold: errors}), "fold")


def test_no_row_of_a_fold_decides_its_own_interval() -> None:
    """Of two folds that differ in nothing but their errors, both have the interval of the six others and each other."""
    quiet = steps_with("a/odd", [0.0])[-1]
    wild = steps_with("a/odd", [1.0])[-1]
    assert quiet.half == pytest.approx(wild.half)
    assert quiet.is_covered
    assert not wild.is_covered


def test_the_binomial_test() -> None:
    """Five of ten at a chance of one half are the likeliest; none or all of them has 2 / 1024."""
    assert binomial_test(5, 10, 0.5) == pytest.approx(1)
    assert binomial_test(0, 10, 0.5) == pytest.approx(2 / 1024)
    assert binomial_test(10, 10, 0.5) == pytest.approx(2 / 1024)
    assert binomial_test(0, 2, 0.9) == pytest.approx(0.01)
    assert binomial_test(1, 2, 0.9) == pytest.approx(0.19)
    assert binomial_test(900, 1000, 0.9) == pytest.approx(1)
    assert binomial_test(2700, 3000, 0.9) == pytest.approx(1)


def step(error: float, half: float, dataset: str = "first", row_class: str = "scored") -> CheckedStep:
    return CheckedStep(dataset, row_class, error, half)


def test_what_is_counted() -> None:
    steps = [step(0.1, 0.2), step(-0.3, 0.2), step(0.0, 0.4)]
    line = coverage_of("first", "scored", steps)
    assert line.rows == 3
    assert line.covered == 2
    width = math.exp(0.2) - math.exp(-0.2)
    assert line.half_width == pytest.approx(width / 2)
    first_error = 1 - math.exp(-0.1)
    second_error = math.exp(0.3) - 1
    assert line.error == pytest.approx((first_error + second_error) / 3)
    assert line.constant == pytest.approx(2 / 3)
    assert line.is_plausible
    assert line.is_narrow
    wide = coverage_of("first", "scored", [step(0.1, 0.3)])
    assert not wide.is_narrow
    missed = coverage_of("first", "scored", [step(0.3, 0.1)] * 3)
    assert not missed.is_plausible


def test_a_line_says_what_is_not_covered() -> None:
    missed = coverage_of("first", "scored", [step(0.3, 0.1)] * 3)
    line = coverage_lines([missed])[1]
    assert line.endswith("coverage")
    assert line.split()[:4] == ["first", "scored", "3", "0.0"]


def test_the_command_prints_both_kinds(tmp_path: Path) -> None:
    rows = []
    for number in range(3):
        rows += named(made()[:3], f"ours/{number}")
    file = write_rows(tmp_path / "rows.csv", rows)
    text = score_intervals([file], as_json=False)
    for title in coverage.TITLES.values():
        assert title in text
    all_rows = [line for line in text.splitlines() if line.startswith("pooled") and " all " in line]
    assert all_rows[0].split()[2] == "9"
    result = json.loads(score_intervals([file], as_json=True))
    assert result["fold"][0]["rows"] == 9
