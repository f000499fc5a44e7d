"""What is said of a prediction: an interval and a risk, of the rows most like it, and which those are."""

import math
from dataclasses import replace

import pytest

from tests.planner.test_predict import LLAMA, case
from torchllm.planner.evidence import residuals
from torchllm.planner.evidence.residuals import ANY, LEVELS, NATIVE, RowClass, Spread, own_class
from torchllm.planner.memory import Memory
from torchllm.planner.predict import predict
from torchllm.planner.search import validity
from torchllm.planner.search.validity import (
    UNMEASURED_LIMIT,
    described,
    is_measured,
    judge,
    memory_limit,
    out_of_memory,
    spread_of,
    spread_of_pair,
)


def spread(rows: int, half: float, of: RowClass, quantity: str = "step time", folds: int = 3) -> Spread:
    """Residuals whose 90 % interval is -half to half."""
    quantiles = tuple(half * (2 * level - 1) / 0.9 for level in LEVELS)
    return Spread(quantity, "framework", of, rows, folds, quantiles)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str, RowClass], Spread]:
    """Return the table that `validity` reads, with a row for everything else only."""
    found = {}
    for quantity, half in (("step time", 0.5), ("peak memory", 0.1), ("ratio of two layouts", 0.4)):
        of = RowClass(ANY, ANY, ANY)
        found[quantity, "framework", of] = spread(1000, half, of, quantity)
    of = RowClass(ANY, ANY, "H100")
    found["repeated peak", "framework", of] = spread(17, 0.01, of, "repeated peak")
    monkeypatch.setattr(validity, "read_spreads", lambda: found)
    return found


def test_the_closest_class_with_rows_enough_is_taken(table: dict[tuple[str, str, RowClass], Spread]) -> None:
    layout = case(dp_shard=16)
    step = predict(layout).step
    assert judge(layout, predict(layout)).seconds == pytest.approx((step * math.exp(-0.5), step * math.exp(0.5)))
    of = RowClass(NATIVE, "data only", "A100")
    table["step time", "framework", of] = spread(40, 0.1, of)
    verdict = judge(layout, predict(layout))
    assert verdict.seconds == pytest.approx((step * math.exp(-0.1), step * math.exp(0.1)))
    assert verdict.evidence == (
        "from 40 rows of torch-native with data only on A100 (torchllm is not measured on A100)"
    )
    assert judge(case(tp=2), predict(case(tp=2))).evidence == (
        "from 1000 rows of all frameworks (torchllm is not measured on A100, too few rows have tp, too few are of A100)"
    )


@pytest.mark.parametrize(("rows", "folds"), [(14, 3), (15, 2)])
def test_a_closer_class_with_few_rows_widens_the_broader_one(
    table: dict[tuple[str, str, RowClass], Spread], rows: int, folds: int
) -> None:
    of = RowClass(NATIVE, "data only", "A100")
    table["step time", "framework", of] = spread(rows, 0.9, of, folds=folds)
    found = spread_of(case(), "step time")
    assert found.of == RowClass(ANY, ANY, ANY)
    assert found.interval == pytest.approx((-0.9, 0.9))
    table["step time", "framework", of] = spread(rows, 0.1, of, folds=folds)
    assert spread_of(case(), "step time").interval == pytest.approx((-0.5, 0.5))


def test_pairs_are_those_with_the_same_axis_added(table: dict[tuple[str, str, RowClass], Spread]) -> None:
    of = RowClass(NATIVE, "+tp", ANY)
    table["ratio of two layouts", "framework", of] = spread(40, 0.2, of)
    assert spread_of_pair(case(), case(tp=2)).interval == pytest.approx((-0.2, 0.2))
    assert spread_of_pair(case(), case(pp=2)).interval == pytest.approx((-0.4, 0.4))


def test_a_measured_framework_has_residuals_of_fits_to_its_other_folds_if_there_are_some(
    table: dict[tuple[str, str, RowClass], Spread],
) -> None:
    layout = case(stack="llm-foundry-2023")
    table["step time", "framework", own_class(layout)] = spread(100, 0.3, own_class(layout))
    assert spread_of(layout, "step time").interval == pytest.approx((-0.5, 0.5))
    of = RowClass(NATIVE, "data only", ANY)
    table["step time", "fold", of] = spread(100, 0.05, of)
    assert spread_of(layout, "step time").interval == pytest.approx((-0.05, 0.05))
    assert spread_of(case(), "step time").interval == pytest.approx((-0.5, 0.5))


def test_a_calibrated_machine_is_a_measured_one() -> None:
    layout = case()
    assert not is_measured(layout)
    constants = replace(layout.hardware.constants, launch=9e-6)
    assert is_measured(replace(layout, hardware=replace(layout.hardware, constants=constants)))
    assert is_measured(case(stack="llm-foundry-2023"))


@pytest.mark.parametrize(("share", "fits"), [(0.5, "fits"), (0.97, "may fit"), (1.01, "does not fit")])
def test_will_fit_and_may_fit_are_different_words(share: float, fits: str) -> None:
    layout = case(model=LLAMA)
    memory = Memory(weights=share * layout.hardware.memory)
    found = predict(layout)._replace(memory=memory, fits=share <= 1)
    assert judge(layout, found).fits == fits


def test_the_risk_grows_with_the_memory_and_is_small_at_the_limit() -> None:
    layout = case()
    shares = [0.5, 0.85, 0.95, 1.0, 1.05, 1.3]
    risks = [out_of_memory(layout, Memory(weights=share * layout.hardware.memory)) for share in shares]
    assert risks == sorted(risks)
    assert risks[0] < 1e-6
    assert risks[-1] > 0.999
    assert out_of_memory(layout, Memory(weights=memory_limit(layout))) <= 0.05
    assert memory_limit(layout) <= UNMEASURED_LIMIT * layout.hardware.memory


def test_outcomes_of_the_framework_itself_come_before_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = residuals.Outcomes("megatron-2021", 0.9, 1.0, rows=8, ran_out=1)
    monkeypatch.setattr(validity, "read_outcomes", lambda: [outcome])
    layout = case(stack="megatron-2021")
    assert out_of_memory(layout, Memory(weights=0.95 * layout.hardware.memory)) == pytest.approx(2 / 10)


def test_float8_is_said() -> None:
    layout = case()
    other = replace(layout, kernels=layout.kernels._replace(float8=True))
    assert "none is of float8" in described(other, spread_of(other, "step time"))
