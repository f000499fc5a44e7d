"""Intervals are checked with residuals that know nothing of the row, and counted by data set and class."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.evidence.test_calibrate import made
from tests.planner.evidence.test_cross_validation import named
from torchllm.planner.evidence import coverage
from torchllm.planner.evidence.coverage import (
    CheckedStep,
    binomial_test,
    checked_steps,
    coverage_lines,
    coverage_of,
    coverages,
    score_intervals,
)
from torchllm.planner.evidence.cross_validation import Residual
from torchllm.planner.evidence.step_errors import EVERY_STEP, Knowledge


def residuals(errors: dict[str, list[float]], kind: Knowledge = "fold") -> list[Residual]:
    """One residual for each error of a fold. The framework of a case is that of its fold."""
    row = made()[0]
    assert row.case
    made_up = []
    for fold, of_fold in errors.items():
        software = replace(row.case.software, name=fold.split("/")[0])
        case = replace(row.case, software=software)
        for knowledge in ("fold", "framework"):
            for error in of_fold:
                time = error if knowledge == kind else 10 * error
                made_up.append(Residual(row, case, fold, knowledge, time, True, {EVERY_STEP: 1.0}, None, 0.5))
    return made_up


FOLDS = {f"a/{number}": [0.1, -0.1, 0.05, -0.02] for number in range(6)}


def test_no_row_of_a_fold_decides_its_own_interval() -> None:
    """Of two folds that differ in nothing but their errors, both have the interval of the six others and each other."""
    quiet = checked_steps(residuals({**FOLDS, "a/odd": [0.0]}), "fold")[-1]
    wild = checked_steps(residuals({**FOLDS, "a/odd": [1.0]}), "fold")[-1]
    assert quiet.half == pytest.approx(wild.half)
    assert quiet.is_covered
    assert not wild.is_covered


def test_a_framework_without_another_fold_is_an_unknown_one() -> None:
    """Errors without frameworks are ten times as large here: so are the intervals of whom they answer."""
    steps = checked_steps(residuals({**FOLDS, "b/only": [0.1]}), "fold")
    assert steps[-1].half > 5 * steps[0].half


def test_a_framework_is_left_out_with_all_its_folds() -> None:
    folds = {f"{framework}/{number}": [0.1, -0.1] for framework in "bcdef" for number in range(2)}
    calm = checked_steps(residuals({**folds, "odd/1": [0.1], "odd/2": [0.1]}, "framework"), "framework")
    wild = checked_steps(residuals({**folds, "odd/1": [0.1], "odd/2": [2.0]}, "framework"), "framework")
    assert calm[-2].half == pytest.approx(wild[-2].half)
    assert calm[0].half < wild[0].half


def test_the_binomial_test() -> None:
    """Five of ten at a chance of one half are the likeliest; none or all of them has 2 / 1024."""
    assert binomial_test(5, 10, 0.5) == pytest.approx(1)
    assert binomial_test(0, 10, 0.5) == binomial_test(10, 10, 0.5) == pytest.approx(2 / 1024)
    assert binomial_test(0, 2, 0.9) == pytest.approx(0.01)
    assert binomial_test(1, 2, 0.9) == pytest.approx(0.19)
    assert binomial_test(900, 1000, 0.9) == pytest.approx(1)
    assert binomial_test(2700, 3000, 0.9) == pytest.approx(1)


def step(error: float, half: float, dataset: str = "first", row_class: str = "scored") -> CheckedStep:
    return CheckedStep(dataset, row_class, error, half)


def test_what_is_counted() -> None:
    steps = [step(0.1, 0.2), step(-0.3, 0.2), step(0.0, 0.4)]
    line = coverage_of("first", "scored", steps)
    assert (line.rows, line.covered) == (3, 2)
    assert line.half_width == pytest.approx((math.exp(0.2) - math.exp(-0.2)) / 2)
    assert line.error == pytest.approx(((1 - math.exp(-0.1)) + (math.exp(0.3) - 1)) / 3)
    assert line.constant == pytest.approx(2 / 3)
    assert line.is_plausible
    assert line.is_narrow
    assert not coverage_of("first", "scored", [step(0.1, 0.3)]).is_narrow
    assert not coverage_of("first", "scored", [step(0.3, 0.1)] * 3).is_plausible


def test_classes_are_apart_and_pooled() -> None:
    steps = [step(0.1, 0.2), step(0.1, 0.2, "second"), step(0.1, 0.2, "first", "assumed")]
    lines = coverages(steps)
    named_lines = [(line.name, line.row_class, line.rows) for line in lines]
    assert named_lines == [
        ("first", "assumed", 1),
        ("first", "scored", 1),
        ("second", "scored", 1),
        ("pooled", "scored", 2),
        ("pooled", "assumed", 1),
        ("pooled", "all", 3),
    ]
    texts = coverage_lines([coverage_of("first", "scored", [step(0.3, 0.1)] * 3)])
    assert texts[1].endswith("coverage")
    assert texts[1].split()[:4] == ["first", "scored", "3", "0.0"]


def test_the_command_prints_both_kinds(tmp_path: Path) -> None:
    rows = []
    for number in range(3):
        rows += named(made()[:3], f"ours/{number}")
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0].cells))
        writer.writeheader()
        writer.writerows(row.cells for row in rows)
    text = score_intervals([str(file)], as_json=False)
    assert all(title in text for title in coverage.TITLES.values())
    [line] = [line for line in text.splitlines() if line.startswith("pooled") and " all " in line][:1]
    assert line.split()[2] == "9"
    assert json.loads(score_intervals([str(file)], as_json=True))["fold"][0]["rows"] == 9
