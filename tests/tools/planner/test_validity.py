"""What is said of a prediction: an interval and a risk, of the rows most like it, and which those are."""

import math
from dataclasses import replace

import pytest

from tests.tools.planner.test_predict import LLAMA, case
from torchllm.tools.planner import validity
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.peak import Memory
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.residuals import ANY, LEVELS, NATIVE, RowClass, Spread
from torchllm.tools.planner.step_errors import EVERY_STEP, RARELY_MEASURED, ErrorModel
from torchllm.tools.planner.validity import (
    RISK,
    is_measured,
    judge,
    memory_limit,
    out_of_memory,
    spread_of_pair,
)

Table = dict[tuple[str, str, RowClass], Spread]


def spread(rows: int, half: float, row_class: RowClass, folds: int = 3) -> Spread:
    """Residuals whose 90 % interval is -half to half."""
    quantiles = []
    for level in LEVELS:
        quantiles.append(half * (2 * level - 1) / 0.9)
    return Spread(RATIO, "framework", row_class, rows, folds, tuple(quantiles))


EVERYTHING = RowClass(ANY, ANY, ANY)
RATIO = "ratio of two layouts"


def with_memory(layout: Case, share: float) -> Memory:
    """Return memory of which a layout takes this share of the GPU's."""
    return Memory(weights=share * layout.hardware.memory)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Return the table that `validity` reads, with a row for everything else only."""
    spreads: Table = {}
    for knowledge, half in (("framework", 0.4), ("fold", 0.1)):
        spreads[RATIO, knowledge, EVERYTHING] = spread(1000, half, EVERYTHING)
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
            "from 900 steps of 50 models (torchllm is not measured on A100, the least certain term is every step)",
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


def test_a_calibrated_machine_is_a_measured_one() -> None:
    layout = case()
    fitted = replace(layout.hardware, constants=replace(layout.hardware.constants, launch=9e-6))
    assert not is_measured(layout)
    assert is_measured(replace(layout, hardware=fitted))


def test_residuals_of_a_measured_machine_are_of_known_frameworks(table: Table) -> None:
    plain, with_tp = case(), case(tp=2)
    assert spread_of_pair(plain, with_tp).interval == pytest.approx((-0.4, 0.4))
    own = RowClass("torchllm", ANY, "A100")
    table["step time", "framework", own] = spread(100, 0.3, own)
    assert is_measured(with_tp)
    assert spread_of_pair(plain, with_tp).interval == pytest.approx((-0.1, 0.1))


def test_a_closer_class_with_few_rows_widens_the_broader_one(table: Table) -> None:
    added = RowClass(NATIVE, "+tp", ANY)
    for rows, folds in [(14, 3), (15, 2)]:
        for half, interval in [(0.9, (-0.9, 0.9)), (0.05, (-0.4, 0.4))]:
            table[RATIO, "framework", added] = spread(rows, half, added, folds=folds)
            pair = spread_of_pair(case(), case(tp=2))
            assert pair.row_class == EVERYTHING, rows
            assert pair.interval == pytest.approx(interval), rows


def test_pairs_are_those_with_the_same_axis_added(table: Table) -> None:
    row_class = RowClass(NATIVE, "+tp", ANY)
    table[RATIO, "framework", row_class] = spread(40, 0.2, row_class)
    adds_tp = spread_of_pair(case(), case(tp=2))
    adds_pp = spread_of_pair(case(), case(pp=2))
    assert adds_tp.interval == pytest.approx((-0.2, 0.2))
    assert adds_pp.interval == pytest.approx((-0.4, 0.4))


def test_will_fit_and_may_fit_are_different_words() -> None:
    for share, fits in [(0.5, "fits"), (0.99, "may fit"), (1.01, "does not fit")]:
        layout = case(model=LLAMA)
        memory = with_memory(layout, share)
        prediction = predict(layout)._replace(memory=memory, fits=share <= 1)
        verdict = judge(layout, prediction)
        assert verdict.fits == fits, share


def test_the_risk_grows_with_the_memory_and_is_small_at_the_limit() -> None:
    layout = case()
    risks = []
    for share in (0.5, 0.85, 0.95, 1.0, 1.05, 1.3):
        risks.append(out_of_memory(layout.hardware, with_memory(layout, share)))
    assert risks == sorted(risks)
    assert risks[0] < 1e-6
    assert risks[-1] > 0.999
    limit = memory_limit(layout.hardware)
    assert out_of_memory(layout.hardware, Memory(weights=limit)) == pytest.approx(RISK)
    assert limit <= layout.hardware.memory
