"""What is known of the errors of steps: deviations are found again, and intervals hold as many rows as they say."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.test_predict import case
from torchllm.planner.evidence import step_errors
from torchllm.planner.evidence.step_errors import (
    ACROSS_NODES,
    DEGREES,
    EVERY_STEP,
    EXPERTS,
    FLOAT8,
    PRIOR_OF_TERM,
    RARELY_MEASURED,
    WHOLE_STEP,
    ErrorModel,
    StepError,
    covering_size,
    effective_number,
    fit_error_models,
    fit_errors,
    read_error_models,
    shares_of,
    weighted_quantile,
    wider_than_normal,
    write_error_models,
)
from torchllm.planner.predict import predict


def drawn(folds: int, rows: int, deviation: float, framework: str = "first", share: float = 0.5) -> list[StepError]:
    """Errors of Student's t distribution, whose deviation is that of the term "wait" times its share of the step."""
    generator = random.Random(f"{framework} {deviation}")
    errors = []
    for number in range(folds):
        fold = f"{framework}/{number}"
        for _ in range(rows):
            part = share * generator.random()
            tail = math.sqrt(generator.gammavariate(DEGREES / 2, 2) / DEGREES)
            error = generator.gauss(0, math.hypot(part * deviation, 0.01)) / tail
            errors.append(StepError(error, {EVERY_STEP: 1.0, "wait": part}, fold, framework, "H100", fold))
    return errors


def test_deviations_are_found_again() -> None:
    model = fit_errors(drawn(folds=20, rows=50, deviation=0.6), with_factors=False)
    assert 0.005 < model.deviation(EVERY_STEP) < 0.02
    assert model.deviation("wait") == pytest.approx(0.6, rel=0.2)
    assert model.deviation("a term that no row has") == PRIOR_OF_TERM
    assert (model.rows, model.folds) == (1000, 20)


def test_without_errors_the_priors_are_all_that_is_known() -> None:
    interval = fit_errors([], with_factors=True).interval({EVERY_STEP: 1.0, "wait": 0.5}, "first", "H100")
    whole = math.hypot(WHOLE_STEP[EVERY_STEP], WHOLE_STEP[RARELY_MEASURED])
    assert interval.half == pytest.approx(1.64485 * math.hypot(whole, 0.5 * PRIOR_OF_TERM), rel=1e-4)


def test_an_interval_is_as_wide_as_what_the_step_is_spent_on_is_unknown() -> None:
    model = fit_errors(drawn(folds=20, rows=50, deviation=0.6), with_factors=False)
    quiet = model.interval({EVERY_STEP: 1.0, "wait": 0.01}, "first", "H100")
    noisy = model.interval({EVERY_STEP: 1.0, "wait": 0.4}, "first", "H100")
    assert noisy.half > 10 * quiet.half
    assert (quiet.widest, noisy.widest) == (EVERY_STEP, "wait")
    assert noisy.bounds == (-noisy.half, noisy.half)


def test_intervals_hold_nine_tenths_of_other_rows() -> None:
    errors = drawn(folds=40, rows=50, deviation=0.6)
    model = fit_errors(errors[:1000], with_factors=False)
    covered = 0
    for error in errors[1000:]:
        covered += abs(error.error) <= model.interval(error.shares, "first", "H100").half
    assert 0.87 <= covered / 1000 <= 0.96


def test_a_framework_that_is_often_wrong_has_wider_intervals() -> None:
    errors = drawn(8, 30, 0.2, "careful") + drawn(8, 30, 0.8, "odd") + drawn(1, 30, 0.8, "seldom seen")
    model = fit_errors(errors, with_factors=True)
    assert model.factors["careful"] < 1 < model.factors["seldom seen"] < model.factors["odd"]
    shares = {EVERY_STEP: 1.0, "wait": 0.4}
    assert model.interval(shares, "careful", "H100").half < model.interval(shares, "odd", "H100").half
    assert model.interval(shares, "never seen", "H100").factor == 1
    assert fit_errors(errors, with_factors=False).factors == {}


def test_a_gpu_of_few_folds_is_a_source_of_its_own() -> None:
    model = fit_errors(drawn(folds=20, rows=5, deviation=0.6), with_factors=False)
    interval = model.interval({EVERY_STEP: 1.0}, "first", "B300")
    assert interval.widest == RARELY_MEASURED
    assert interval.half > model.interval({EVERY_STEP: 1.0}, "first", "H100").half


def test_one_large_fold_does_not_decide_alone() -> None:
    """A fold of 2,500 rows counts as 50 rows, as five folds of 100 do together."""
    large, small = drawn(1, 2500, 0.9, "large"), drawn(5, 100, 0.1, "small")
    deviation = fit_errors(large + small, with_factors=False).deviation("wait")
    by_rows = math.sqrt((2500 * 0.9**2 + 500 * 0.1**2) / 3000)
    assert deviation < 0.8 * by_rows


def test_few_independent_folds_widen_the_interval() -> None:
    thirty, three = drawn(30, 20, 0.5), drawn(3, 200, 0.5)
    assert fit_errors(three, with_factors=False).covering > 1.1 * fit_errors(thirty, with_factors=False).covering


def test_the_unseen_fold_may_be_the_worst_of_all() -> None:
    """Of ten folds of one row the level is 0.9 x 11 / 10: above the middle of the largest, which is at 0.95."""
    errors = drawn(folds=10, rows=1, deviation=0.5)
    sizes = [float(number) for number in range(1, 11)]
    assert covering_size(sizes, [1.0] * 10, errors) == pytest.approx(10 * wider_than_normal(9))
    ninety = drawn(folds=90, rows=1, deviation=0.5)
    sizes = [float(number) for number in range(1, 91)]
    quantile = 0.9 * 91 / 90 * 90 + 0.5
    assert covering_size(sizes, [1.0] * 90, ninety) == pytest.approx(quantile * wider_than_normal(89))


@pytest.mark.parametrize(("degrees", "quantile"), [(10, 1.812), (30, 1.697), (10**6, 1.645)])
def test_students_quantiles(degrees: int, quantile: float) -> None:
    """Abramowitz and Stegun 1964, table 26.10; the expansion is 0.4 % too low at 5 degrees."""
    assert 1.64485 * wider_than_normal(degrees) == pytest.approx(quantile, rel=1e-3)


def test_weights_count_in_a_quantile() -> None:
    assert weighted_quantile([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 0.5) == pytest.approx(2.0)
    assert weighted_quantile([3.0, 1.0, 2.0], [4.0, 1.0, 1.0], 0.5) == pytest.approx(
        2.0 + (0.5 - 0.25) / (2 / 3 - 0.25)
    )
    assert weighted_quantile([3.0, 1.0], [1.0, 1.0], 0.01) == 1.0
    assert weighted_quantile([3.0, 1.0], [1.0, 1.0], 1.0) == 3.0
    assert effective_number([1.0, 1.0, 1.0]) == pytest.approx(3)
    assert effective_number([1.0, 1e-6]) == pytest.approx(1, abs=1e-5)


def test_what_a_step_is_spent_on() -> None:
    dense = case(tp=2)
    shares = shares_of(dense, predict(dense))
    assert shares.pop(EVERY_STEP) == 1
    assert sum(shares.values()) == pytest.approx(1)
    assert {FLOAT8, EXPERTS, ACROSS_NODES}.isdisjoint(shares)
    wide = case(tp=16)
    prediction = predict(wide)
    assert shares_of(wide, prediction)[ACROSS_NODES] == prediction.terms["tensor parallel"] / prediction.step
    sparse = replace(dense, model=replace(dense.model, experts=8), kernels=dense.kernels._replace(float8=1.0))
    marked = shares_of(sparse, predict(dense))
    assert marked[EXPERTS] == marked[FLOAT8] == 1


def test_a_table_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = drawn(8, 30, 0.2, "careful") + drawn(8, 30, 0.8, "odd")
    models = fit_error_models({"fold": errors, "framework": errors})
    assert list(models["fold"].factors) == ["careful", "odd"]
    assert models["framework"].factors == {}
    write_error_models(str(tmp_path / "table.csv"), models)
    monkeypatch.setattr(step_errors, "TABLE", tmp_path / "table.csv")
    for knowledge, model in read_error_models.__wrapped__().items():
        assert model.rows == models[knowledge].rows
        assert model.folds_of_gpu == {"H100": 16}
        shares = {EVERY_STEP: 1.0, "wait": 0.4}
        written = models[knowledge].interval(shares, "odd", "H100")
        assert model.interval(shares, "odd", "H100").half == pytest.approx(written.half, rel=1e-2)


def test_what_ships_knows_frameworks_and_gpus() -> None:
    models = read_error_models()
    assert models["fold"].factors
    assert not models["framework"].factors
    for model in models.values():
        assert isinstance(model, ErrorModel)
        assert min(model.folds_of_gpu["A100"], model.folds_of_gpu["H100"]) > step_errors.RARELY_FOLDS
    shares = {EVERY_STEP: 1.0, "matmul": 0.6}
    measured = models["fold"].interval(shares, "llm-foundry-2023", "A100")
    assert measured.half < models["framework"].interval(shares, "llm-foundry-2023", "A100").half
