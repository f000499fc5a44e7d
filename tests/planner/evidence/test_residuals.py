"""The table of residuals: which rows are alike, their quantiles, and what is read back."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.evidence.test_score import ROW
from tests.planner.test_predict import case
from torchllm.planner.evidence import residuals
from torchllm.planner.evidence.cross_validation import Residual
from torchllm.planner.evidence.measurements import read_row
from torchllm.planner.evidence.residuals import (
    ANY,
    LEVELS,
    MEGATRON,
    NATIVE,
    Outcomes,
    RowClass,
    Spread,
    added_axes,
    classes_of,
    outcomes,
    read_outcomes,
    read_spreads,
    spreads,
    write_outcomes,
    write_spreads,
)

EVEN = tuple(2 * level - 1 for level in LEVELS)
"""quantiles of values spread evenly from -1 to 1"""


def made(values: list[float], left_out: str = "framework", **cells: str) -> list[Residual]:
    """One residual each, on one layout."""
    row = read_row({**ROW, "stack": "torchtitan", **cells})
    assert row.case, row.problem
    return [Residual(row, f"fold {n % 3}", left_out, value, None, 0.5) for n, value in enumerate(values)]  # type: ignore[arg-type]


def test_classes_have_the_same_axes_first() -> None:
    first, *rest, last = classes_of(case(tp=2, pp=2))
    assert first == RowClass("torchllm", "tp+pp", "A100")
    assert RowClass(NATIVE, "tp+pp", ANY) in rest
    assert all(of.axes == "tp+pp" for of in rest)
    assert last == RowClass(ANY, ANY, ANY)
    assert next(iter(classes_of(case(stack="megatron-2021")))).axes == "data only"
    assert RowClass(MEGATRON, "data only", ANY) in classes_of(case(stack="megatron-2021"))


def test_experts_are_a_class_of_their_own() -> None:
    sparse = replace(case(), model=replace(case().model, experts=8))
    assert {of.axes for of in classes_of(sparse)} == {"experts", ANY}
    assert added_axes(sparse, replace(sparse, parallel=replace(sparse.parallel, ep=2))) == "+ep"


def test_added_axes() -> None:
    assert added_axes(case(tp=2), case(tp=4)) == "the same"
    assert added_axes(case(tp=2), case(pp=2, tp=2)) == "+pp"
    assert added_axes(case(), case(pp=2, tp=2)) == "+tp+pp"


def test_quantiles_of_a_class() -> None:
    found = {(one.quantity, one.of): one for one in spreads(made([n / 100 for n in range(99)]))}
    times = found["step time", RowClass("torchtitan", "data only", "A100")]
    assert (times.rows, times.folds) == (99, 3)
    assert times.quantiles == pytest.approx([level - 0.01 for level in LEVELS])


def test_a_class_of_few_rows_is_not_shown() -> None:
    assert not [one for one in spreads(made([0.1] * 9)) if one.quantity == "step time"]
    assert [one for one in spreads(made([0.1] * 10)) if one.quantity == "step time"]


def test_pairs_are_of_one_job() -> None:
    """Two layouts of each of ten jobs: tp was slower than predicted by 0.2 each time, whatever the job's own error."""
    found = []
    for number in range(10):
        found += made([0.1 * number], group=str(number))
        found += made([0.1 * number + 0.2], group=str(number), tp="2", dp="4")
    [added] = [one for one in spreads(found) if one.of == RowClass(NATIVE, "+tp", ANY)]
    assert added.rows == 10
    assert added.quantiles == pytest.approx([0.2] * len(LEVELS))


def test_pairs_of_like_layouts_count_both_ways() -> None:
    found = [*made([0.0] * 5), *made([0.3] * 5, micro_batch="2")]
    [alike] = [
        one for one in spreads([one._replace(fold="a") for one in found]) if one.of == RowClass(NATIVE, "the same", ANY)
    ]
    assert alike.interval[0] == -alike.interval[1]


def test_the_share_above() -> None:
    of = Spread("step time", "fold", RowClass(ANY, ANY, ANY), 100, 5, EVEN)
    for value in (-0.85, -0.3, 0.0, 0.4, 0.89):
        assert of.share_above(value) == pytest.approx((1 - value) / 2)
    assert of.share_above(EVEN[-1]) == pytest.approx(0.05)
    assert of.share_above(EVEN[0]) == pytest.approx(0.95)
    assert 0 < of.share_above(2.0) < 0.01
    assert of.mean == pytest.approx(0, abs=1e-12)
    constant = of._replace(quantiles=(0.1,) * len(LEVELS))
    assert constant.share_above(0.2) < 1e-6 < 0.999999 < constant.share_above(0.0)


def test_a_table_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = spreads(made([n / 100 for n in range(99)]))
    write_spreads(str(tmp_path / "table.csv"), written)
    monkeypatch.setattr(residuals, "TABLE", tmp_path / "table.csv")
    read = read_spreads.__wrapped__()
    assert [(one.of, one.rows) for one in read.values()] == [(one.of, one.rows) for one in written]
    for one, other in zip(read.values(), written, strict=True):
        assert one.quantiles == pytest.approx(other.quantiles, abs=5e-4)  # three decimals


def test_outcomes_by_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit, [oom] = made([0.0] * 99), made([0.0], status="oom", step_time_s="")
    found = list(outcomes([*fit, oom, *made([0.0], left_out="fold")]))
    [low] = [one for one in found if one.rows]
    assert (low.framework, low.share_from, low.rows, low.ran_out) == ("torchtitan", 0.0, 100, 1)
    assert low.risk == pytest.approx(2 / 102)
    assert list(outcomes([*fit, *fit])) == []  # nobody says what did not fit
    assert list(outcomes([*fit[1:], oom])) == []  # too few
    write_outcomes(str(tmp_path / "outcomes.csv"), found)
    monkeypatch.setattr(residuals, "OUTCOMES", tmp_path / "outcomes.csv")
    assert read_outcomes.__wrapped__() == found
    assert found[-1] == Outcomes("torchtitan", 1.5, math.inf, 0, 0)


def test_what_ships_has_a_class_for_everything_and_none_of_few_rows() -> None:
    table = read_spreads()
    for quantity in ("step time", "peak memory", "ratio of two layouts"):
        assert (quantity, "framework", RowClass(ANY, ANY, ANY)) in table
    assert min(one.rows for one in table.values()) >= residuals.SHOWN_FROM
    assert all(list(one.quantiles) == sorted(one.quantiles) for one in table.values())
