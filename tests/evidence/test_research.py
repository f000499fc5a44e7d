"""How the planner is judged by rows that it was not fitted to: left-out folds, intervals, picks, first runs."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from evidence.coverage import (
    TITLES,
    CheckedStep,
    binomial_test,
    checked_steps,
    coverage_lines,
    coverage_of,
    score_intervals,
)
from evidence.cross_validation import (
    Residual,
    cross_validate,
    leave_out,
    left_out_residuals,
    step_errors,
)
from evidence.measurements import MeasuredRow, read_row
from evidence.peak import counted
from evidence.picks import picks, score_picks
from tests.evidence.tables import case_of, made, named, with_cells, write_rows
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.step_errors import EVERY_STEP, KNOWLEDGE

# -- folds and frameworks that are left out


def test_a_fold_is_predicted_from_the_others_of_its_framework_and_a_framework_with_speed_one() -> None:
    """All of the first two folds were made with one slow framework, of which the other fold's times tell."""
    first, second = named(made(speed=0.85), "ours/one"), named(made(speed=0.85), "ours/two")
    errors = leave_out(first + second, "fold")
    assert [(error.name, error.rows) for error in errors] == [
        ("ours/one", 18),
        ("ours/two", 18),
        ("ours, all folds", 36),
    ]
    assert max(error.mean for error in errors) < 0.02
    _, slow = leave_out(named(made(), "ours/one") + named(made(speed=0.85), "slow/two"), "framework")
    assert slow.fitted < 0.03
    assert slow.mean > 0.1
    assert slow.bias == pytest.approx(-slow.mean)


@pytest.mark.exhaustive
def test_a_row_that_is_not_fitted_has_a_residual_of_constants_without_its_fold() -> None:
    """The assumed row is the first one of the slow fold, which is predicted too fast from the other fold."""
    slow = made(speed=0.85)
    assumed = with_cells(slow[0], assumed="act_ckpt=none")
    residuals = left_out_residuals(named(made(), "ours/one") + named([*slow, assumed], "ours/two"))
    first, last = residuals[18], residuals[36]
    assert (first.is_fitted, last.is_fitted) == (True, False)
    assert first.time is not None
    assert last.time == pytest.approx(first.time)
    assert last.time > 0.05


def test_errors_of_steps_are_of_one_kind_and_know_what_is_left_out_with_them() -> None:
    first, second, *_ = made()
    residuals = left_out_residuals(named([first, second], "ours/one") + named([first], "ours/two"))
    errors = step_errors(residuals, "fold")
    assert [error.unit for error in errors] == ["ours/one", "ours/one", "ours/two"]
    assert errors[0].gpu == "A100"
    assert [error.unit for error in step_errors(residuals, "framework")] == ["ours"] * 3


def test_a_residual_of_memory_is_a_share_of_the_gpu_and_in_float8_there_is_none() -> None:
    row = made(cluster="dgx_h100", gpu="H100-80GB")[0]
    case = case_of(row)
    memory, capacity = predict(case).memory, case.hardware.memory
    peak = counted(memory, case.software) + 0.1 * capacity
    fuller = with_cells(row, peak_memory_gib=repr(peak / 2**30))
    residual, _ = left_out_residuals([fuller])
    assert residual.peak == pytest.approx(0.1)
    float8 = replace(case, kernels=case.kernels._replace(float8=True))
    residual, _ = left_out_residuals([fuller._replace(case=float8)])
    assert residual.peak is None


# -- intervals


def steps_with(fold: str, errors: list[float]) -> list[CheckedStep]:
    """Check the steps of six folds of a framework, and of another one with these errors."""
    row = made()[0]
    usual = case_of(row)
    residuals = []
    folds = {f"a/{number}": [0.1, -0.1, 0.05, -0.02] for number in range(6)}
    for name, errors_of_fold in {**folds, fold: errors}.items():
        case = replace(usual, software=replace(usual.software, name="a"))
        for knowledge, error in product(KNOWLEDGE, errors_of_fold):
            time = error if knowledge == "fold" else 10 * error
            residuals.append(Residual(row, case, name, knowledge, time, True, {EVERY_STEP: 1.0}, None))
    return checked_steps(residuals, "fold")


def test_no_row_of_a_fold_decides_its_own_interval() -> None:
    """Of two folds that differ in nothing but their errors, both have the interval of the six others and each other."""
    quiet = steps_with("a/odd", [0.0])[-1]
    wild = steps_with("a/odd", [1.0])[-1]
    assert quiet.half == pytest.approx(wild.half)
    assert (quiet.is_covered, wild.is_covered) == (True, False)


def test_the_binomial_test() -> None:
    """Five of ten at a chance of one half are the likeliest; none or all of them has 2 / 1024."""
    for hits, trials, chance, probability in [
        (5, 10, 0.5, 1.0),
        (0, 10, 0.5, 2 / 1024),
        (10, 10, 0.5, 2 / 1024),
        (0, 2, 0.9, 0.01),
        (1, 2, 0.9, 0.19),
        (2700, 3000, 0.9, 1.0),
    ]:
        assert binomial_test(hits, trials, chance) == pytest.approx(probability), (hits, trials)


def step(error: float, half: float) -> CheckedStep:
    return CheckedStep("first", "scored", error, half)


def test_what_is_counted_of_intervals() -> None:
    line = coverage_of("first", "scored", [step(0.1, 0.2), step(-0.3, 0.2), step(0.0, 0.4)])
    assert (line.rows, line.covered) == (3, 2)
    assert line.half_width == pytest.approx((math.exp(0.2) - math.exp(-0.2)) / 2)
    assert line.error == pytest.approx((1 - math.exp(-0.1) + math.exp(0.3) - 1) / 3)
    assert line.constant == pytest.approx(2 / 3)
    assert line.is_plausible
    assert line.is_narrow
    assert not coverage_of("first", "scored", [step(0.1, 0.3)]).is_narrow
    missed = coverage_of("first", "scored", [step(0.3, 0.1)] * 3)
    assert not missed.is_plausible
    words = coverage_lines([missed])[1].split()
    assert (words[:4], words[-1]) == (["first", "scored", "3", "0.0"], "coverage")


# -- picks


def in_group(rows: list[MeasuredRow], fold: str, group: str) -> list[MeasuredRow]:
    return [with_cells(row, group=group) for row in named(rows, fold)]


def seconds_of(row: MeasuredRow) -> float:
    assert row.seconds is not None
    return row.seconds


@pytest.mark.exhaustive
def test_the_regret_is_that_of_the_layout_predicted_fastest() -> None:
    """Times are the planner's own, but for the fastest layout, which took twice as long, or ran out of memory."""
    fastest, second, *slower = sorted(made(), key=seconds_of)
    slowed = with_cells(fastest, step_time_s=repr(2 * seconds_of(fastest)))
    lost = read_row({**fastest.cells, "status": "oom", "step_time_s": ""})
    rows = []
    for group, first in {"even": fastest, "odd": slowed, "lost": lost}.items():
        rows += in_group([first, second, *slower], f"ours/{group}", group)
    even, odd, without = picks(rows)
    assert even.regret == pytest.approx(0)
    assert odd.regret == pytest.approx(2 * seconds_of(fastest) / seconds_of(second) - 1)
    assert (odd.rows, odd.told_right, odd.comparable) == (18, 18, 18)
    assert (without.ran_out_of_memory, without.regret) == (True, None)
    assert without.told_right == without.comparable - 1


# -- first runs


@pytest.mark.exhaustive
def test_each_judgment_is_a_table_and_json(tmp_path: Path) -> None:
    rows = in_group(made(), "ours/large", "even") + named(made()[:5], "ours/small")
    files = [write_rows(tmp_path / "rows.csv", rows)]
    heading, *folds = cross_validate(files, "fold", as_json=False).splitlines()
    assert heading.split() == ["left", "out", "rows", "fitted", "mean", "median", "bias"]
    assert [line.split()[:2] for line in folds] == [["ours/large", "18"], ["ours/small", "5"], ["ours,", "all"]]
    text = score_intervals(files, as_json=False)
    assert all(title in text for title in TITLES.values())
    all_rows = [line for line in text.splitlines() if line.startswith("pooled") and " all " in line]
    assert all_rows[0].split()[2] == "23"
    assert json.loads(score_intervals(files, as_json=True))["fold"][0]["rows"] == 23
    assert score_picks(files, as_json=False).splitlines()[1].split()[0] == "even"
    assert json.loads(score_picks(files, as_json=True))[0]["rows"] == 18
