"""What is known of the errors of steps: deviations are found again, and intervals hold as many rows as they say."""

import math
import random
from pathlib import Path

import pytest

from evidence.fit_step_errors import (
    DEGREES,
    StepError,
    covering_size,
    fit_error_models,
    fit_errors,
    weighted_quantile,
    wider_than_normal,
    write_error_models,
)
from tests.tools.planner.test_predict import case
from torchllm.tools.planner import step_errors
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.step_errors import (
    ACROSS_NODES,
    EVERY_STEP,
    EXPERTS,
    FLOAT8,
    PRIOR_OF_TERM,
    RARELY_MEASURED,
    WHOLE_STEP,
    ErrorModel,
    read_error_models,
    shares_of,
)


def spent(**shares: float) -> dict[str, float]:
    """Return the sources of a step's error: the whole step, and these shares of it."""
    return {EVERY_STEP: 1.0, **shares}


def drawn(folds: int, rows: int, deviation: float, framework: str = "first", share: float = 0.5) -> list[StepError]:
    """Errors of Student's t distribution, whose deviation is that of the term "wait" times its share of the step."""
    generator = random.Random(f"{framework} {deviation}")
    errors = []
    for number in range(folds):
        fold = f"{framework}/{number}"
        for _ in range(rows):
            part = share * generator.random()
            tail = math.sqrt(generator.gammavariate(DEGREES / 2, 2) / DEGREES)
            expected = math.hypot(part * deviation, 0.01)
            error = generator.gauss(0, expected) / tail
            errors.append(StepError(error, spent(wait=part), fold, framework, "H100", unit=fold))
    return errors


@pytest.fixture(scope="module")
def model() -> ErrorModel:
    """The model of a thousand errors of steps that wait for a while."""
    return fit_errors(drawn(folds=20, rows=50, deviation=0.6), with_factors=False)


def test_deviations_are_found_again(model: ErrorModel) -> None:
    assert 0.005 < model.deviation(EVERY_STEP) < 0.02
    assert model.deviation("wait") == pytest.approx(0.6, rel=0.2)
    assert model.deviation("a term that no row has") == PRIOR_OF_TERM
    assert model.rows == 1000
    assert model.folds == 20


def test_without_errors_the_priors_are_all_that_is_known() -> None:
    priors = fit_errors([], with_factors=True)
    interval = priors.interval(spent(wait=0.5), "first", "H100")
    whole = math.hypot(WHOLE_STEP[EVERY_STEP], WHOLE_STEP[RARELY_MEASURED])
    deviation = math.hypot(whole, 0.5 * PRIOR_OF_TERM)
    assert interval.half == pytest.approx(1.64485 * deviation, rel=1e-4)


def test_an_interval_is_as_wide_as_what_the_step_is_spent_on_is_unknown(model: ErrorModel) -> None:
    quiet = model.interval(spent(wait=0.01), "first", "H100")
    noisy = model.interval(spent(wait=0.4), "first", "H100")
    assert noisy.half > 10 * quiet.half
    assert quiet.widest == EVERY_STEP
    assert noisy.widest == "wait"
    assert noisy.bounds == (-noisy.half, noisy.half)


def test_intervals_hold_nine_tenths_of_other_rows() -> None:
    errors = drawn(folds=40, rows=50, deviation=0.6)
    model = fit_errors(errors[:1000], with_factors=False)
    covered = 0
    for error in errors[1000:]:
        interval = model.interval(error.shares, "first", "H100")
        covered += abs(error.error) <= interval.half
    assert 0.87 <= covered / 1000 <= 0.96


def test_a_framework_that_is_often_wrong_has_wider_intervals() -> None:
    errors = careful_and_odd() + drawn(1, 30, 0.8, "seldom seen")
    model = fit_errors(errors, with_factors=True)
    factors = model.factors
    assert factors["careful"] < 1
    assert 1 < factors["seldom seen"] < factors["odd"]
    careful = model.interval(spent(wait=0.4), "careful", "H100")
    odd = model.interval(spent(wait=0.4), "odd", "H100")
    unseen = model.interval(spent(wait=0.4), "never seen", "H100")
    assert careful.half < odd.half
    assert careful.half / factors["careful"] == pytest.approx(unseen.half)
    assert fit_errors(errors, with_factors=False).factors == {}


def careful_and_odd() -> list[StepError]:
    """Errors of a framework that is rarely far off, and of one that often is."""
    return drawn(8, 30, 0.2, "careful") + drawn(8, 30, 0.8, "odd")


def covering_size_of(folds: int) -> float:
    """Return the size that covers errors of as many folds, whose sizes are 1, 2, 3 ..."""
    errors = drawn(folds=folds, rows=1, deviation=0.5)
    sizes = [float(number) for number in range(1, folds + 1)]
    return covering_size(sizes, [1.0] * folds, errors)


def test_the_unseen_fold_may_be_the_worst_of_all() -> None:
    """Of ten folds of one row the level is 0.9 x 11 / 10: above the middle of the largest, which is at 0.95."""
    assert covering_size_of(10) == pytest.approx(10 * wider_than_normal(9))
    quantile = 0.9 * 91 / 90 * 90 + 0.5
    assert covering_size_of(90) == pytest.approx(quantile * wider_than_normal(89))


def test_students_quantiles() -> None:
    """Abramowitz and Stegun 1964, table 26.10; the expansion is 0.4 % too low at 5 degrees."""
    for degrees, quantile in [(10, 1.812), (30, 1.697), (10**6, 1.645)]:
        assert 1.64485 * wider_than_normal(degrees) == pytest.approx(quantile, rel=1e-3), degrees


def test_weights_count_in_a_quantile() -> None:
    assert weighted_quantile([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 0.5) == pytest.approx(2.0)
    part = (0.5 - 0.25) / (2 / 3 - 0.25)
    assert weighted_quantile([3.0, 1.0, 2.0], [4.0, 1.0, 1.0], 0.5) == pytest.approx(2.0 + part)
    assert weighted_quantile([3.0, 1.0], [1.0, 1.0], 0.01) == 1.0
    assert weighted_quantile([3.0, 1.0], [1.0, 1.0], 1.0) == 3.0


def test_what_a_step_is_spent_on() -> None:
    dense = case(tp=2)
    shares = shares_of(dense, predict(dense))
    assert shares.pop(EVERY_STEP) == 1
    assert sum(shares.values()) == pytest.approx(1)
    assert {FLOAT8, EXPERTS, ACROSS_NODES}.isdisjoint(shares)


def test_a_table_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = careful_and_odd()
    models = fit_error_models({"fold": errors, "framework": errors})
    assert list(models["fold"].factors) == ["careful", "odd"]
    assert models["framework"].factors == {}
    file = tmp_path / "table.csv"
    write_error_models(str(file), models)
    monkeypatch.setattr(step_errors, "TABLE", file)
    for knowledge, model in read_error_models.__wrapped__().items():
        original = models[knowledge]
        assert model.rows == original.rows
        assert model.folds_of_gpu == {"H100": 16}
        interval = model.interval(spent(wait=0.4), "odd", "H100")
        original_interval = original.interval(spent(wait=0.4), "odd", "H100")
        assert interval.half == pytest.approx(original_interval.half, rel=1e-2)


def test_what_ships_knows_frameworks_and_gpus() -> None:
    models = read_error_models()
    assert models["fold"].factors
    assert not models["framework"].factors
    for model in models.values():
        assert isinstance(model, ErrorModel)
        for gpu in ("A100", "H100"):
            assert model.folds_of_gpu[gpu] > step_errors.RARELY_FOLDS
    shares = spent(matmul=0.6)
    measured = models["fold"].interval(shares, "llm-foundry-2023", "A100")
    left_out = models["framework"].interval(shares, "llm-foundry-2023", "A100")
    assert measured.half < left_out.half
