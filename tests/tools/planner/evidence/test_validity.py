"""What is said of a prediction: an interval and a risk, of the rows most like it, and which those are."""

import math
from dataclasses import replace

import pytest

from tests.tools.planner.test_predict import LLAMA, case
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.evidence import residuals, validity
from torchllm.tools.planner.evidence.residuals import ANY, LEVELS, NATIVE, RowClass, Spread, own_class
from torchllm.tools.planner.evidence.step_errors import EVERY_STEP, RARELY_MEASURED, ErrorModel
from torchllm.tools.planner.evidence.validity import (
    UNMEASURED_LIMIT,
    is_measured,
    judge,
    memory_limit,
    out_of_memory,
    spread_of,
    spread_of_pair,
)
from torchllm.tools.planner.peak import Memory
from torchllm.tools.planner.predict import predict

Table = dict[tuple[str, str, RowClass], Spread]


def spread(rows: int, half: float, row_class: RowClass, quantity: str = "peak memory", folds: int = 3) -> Spread:
    """Residuals whose 90 % interval is -half to half."""
    quantiles = []
    for level in LEVELS:
        quantiles.append(half * (2 * level - 1) / 0.9)
    return Spread(quantity, "framework", row_class, rows, folds, tuple(quantiles))


EVERYTHING = RowClass(ANY, ANY, ANY)
TORCH_ON_A100 = RowClass(NATIVE, "data only", "A100")


def with_memory(layout: Case, share: float) -> Memory:
    """Return memory of which a layout takes this share of the GPU's."""
    return Memory(weights=share * layout.hardware.memory)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Return the table that `validity` reads, with a row for everything else only."""
    spreads: Table = {}
    for quantity, half in (("peak memory", 0.1), ("ratio of two layouts", 0.4)):
        spreads[quantity, "framework", EVERYTHING] = spread(1000, half, EVERYTHING, quantity)
    monkeypatch.setattr(validity, "read_spreads", lambda: spreads)
    return spreads


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let errors of known frameworks be 0.1 in 9 of 10 cases, times a factor, and those of unknown ones 0.5."""
    deviations = {EVERY_STEP: 1.0, RARELY_MEASURED: 2.0}
    for term in predict(case()).terms:
        deviations[term] = 0.0
    of_known = ErrorModel(deviations, {"llm-foundry-2023": 1.5}, {"A100": 20}, 0.1, 900, 50)
    of_unknown = ErrorModel(deviations, {}, {"A100": 20}, 0.5, 800, 40)
    monkeypatch.setattr(validity, "read_error_models", lambda: {"fold": of_known, "framework": of_unknown})


@pytest.mark.usefixtures("models")
def test_a_known_framework_has_its_own_interval_others_that_of_frameworks_that_were_left_out() -> None:
    for layout, error, evidence in [
        (
            case(stack="llm-foundry-2023"),
            0.15,
            "from 900 steps of 50 models, llm-foundry-2023's 1.5 times as far off as others' "
            "(the least certain term is every step)",
        ),
        (
            case(),
            0.5,
            "from 800 steps of 40 models (torchllm is not measured on A100, the least certain term is every step)",
        ),
    ]:
        prediction = predict(layout)
        verdict = judge(layout, prediction)
        factor = math.exp(error)
        assert verdict.seconds == pytest.approx((prediction.step / factor, prediction.step * factor))
        assert verdict.evidence == evidence


def half_of_interval(layout: Case) -> float:
    """Return half of the interval of the errors of a layout's peak."""
    low, high = spread_of(layout, "peak memory").interval
    assert low == pytest.approx(-high)
    return high


def test_a_calibrated_machine_is_a_measured_one() -> None:
    layout = case()
    fitted = replace(layout.hardware, constants=replace(layout.hardware.constants, launch=9e-6))
    assert not is_measured(layout)
    assert is_measured(replace(layout, hardware=fitted))
    assert is_measured(case(stack="llm-foundry-2023"))


def test_a_closer_class_with_few_rows_widens_the_broader_one(table: Table) -> None:
    for rows, folds in [(14, 3), (15, 2)]:
        table["peak memory", "framework", TORCH_ON_A100] = spread(rows, 0.9, TORCH_ON_A100, folds=folds)
        assert spread_of(case(), "peak memory").row_class == EVERYTHING, rows
        assert half_of_interval(case()) == pytest.approx(0.9), rows
        table["peak memory", "framework", TORCH_ON_A100] = spread(rows, 0.05, TORCH_ON_A100, folds=folds)
        assert half_of_interval(case()) == pytest.approx(0.1), rows


def test_pairs_are_those_with_the_same_axis_added(table: Table) -> None:
    row_class = RowClass(NATIVE, "+tp", ANY)
    table["ratio of two layouts", "framework", row_class] = spread(40, 0.2, row_class)
    adds_tp = spread_of_pair(case(), case(tp=2))
    adds_pp = spread_of_pair(case(), case(pp=2))
    assert adds_tp.interval == pytest.approx((-0.2, 0.2))
    assert adds_pp.interval == pytest.approx((-0.4, 0.4))


def test_a_measured_framework_has_residuals_of_fits_to_its_other_folds_if_there_are_some(table: Table) -> None:
    layout = case(stack="llm-foundry-2023")
    framework = own_class(layout)
    table["step time", "framework", framework] = spread(100, 0.3, framework, "step time")
    assert half_of_interval(layout) == pytest.approx(0.1)
    row_class = RowClass(NATIVE, "data only", ANY)
    table["peak memory", "fold", row_class] = spread(100, 0.05, row_class)
    assert half_of_interval(layout) == pytest.approx(0.05)
    assert half_of_interval(case()) == pytest.approx(0.1)


def test_will_fit_and_may_fit_are_different_words() -> None:
    for share, fits in [(0.5, "fits"), (0.97, "may fit"), (1.01, "does not fit")]:
        layout = case(model=LLAMA)
        memory = with_memory(layout, share)
        prediction = predict(layout)._replace(memory=memory, fits=share <= 1)
        verdict = judge(layout, prediction)
        assert verdict.fits == fits, share


def test_the_risk_grows_with_the_memory_and_is_small_at_the_limit() -> None:
    layout = case()
    risks = []
    for share in (0.5, 0.85, 0.95, 1.0, 1.05, 1.3):
        risks.append(out_of_memory(layout, with_memory(layout, share)))
    assert risks == sorted(risks)
    assert risks[0] < 1e-6
    assert risks[-1] > 0.999
    limit = memory_limit(layout)
    assert out_of_memory(layout, Memory(weights=limit)) <= 0.05
    assert limit <= UNMEASURED_LIMIT * layout.hardware.memory


def test_outcomes_of_the_framework_itself_come_before_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = residuals.Outcomes("megatron-2021", 0.9, 1.0, rows=8, ran_out=1)
    monkeypatch.setattr(validity, "read_outcomes", lambda: [outcome])
    layout = case(stack="megatron-2021")
    risk = out_of_memory(layout, with_memory(layout, 0.95))
    assert risk == pytest.approx(2 / 10)
