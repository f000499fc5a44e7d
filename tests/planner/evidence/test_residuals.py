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
    SAME,
    Outcomes,
    RowClass,
    Spread,
    added_axes,
    classes_of,
    outcomes,
    read_outcomes,
    read_spreads,
    repeated_peaks,
    spreads,
    write_outcomes,
    write_residuals,
    write_spreads,
)
from torchllm.planner.evidence.step_errors import Knowledge

EVEN = tuple(2 * level - 1 for level in LEVELS)
"""quantiles of values spread evenly from -1 to 1"""


def made(values: list[float], left_out: Knowledge = "framework", **cells: str) -> list[Residual]:
    """One residual each, on one layout."""
    row = read_row({**ROW, "stack": "torchtitan", **cells})
    assert row.case, row.problem
    rows = []
    for number, value in enumerate(values):
        rows.append(Residual(row, row.case, f"fold {number % 3}", left_out, value, True, {}, value, 0.5))
    return rows


def test_classes_have_the_same_axes_first() -> None:
    first, *rest, last = classes_of(case(tp=2, pp=2))
    assert first == RowClass("torchllm", "tp+pp", "A100")
    assert RowClass(NATIVE, "tp+pp", ANY) in rest
    assert all(row_class.axes == "tp+pp" for row_class in rest)
    assert last == RowClass(ANY, ANY, ANY)
    assert next(iter(classes_of(case(stack="megatron-2021")))).axes == "data only"
    assert RowClass(MEGATRON, "data only", ANY) in classes_of(case(stack="megatron-2021"))


def test_experts_are_a_class_of_their_own() -> None:
    sparse = replace(case(), model=replace(case().model, experts=8))
    assert {row_class.axes for row_class in classes_of(sparse)} == {"experts", ANY}
    assert added_axes(sparse, replace(sparse, parallel=replace(sparse.parallel, ep=2))) == "+ep"


def test_added_axes() -> None:
    assert added_axes(case(tp=2), case(tp=4)) == "the same"
    assert added_axes(case(tp=2), case(pp=2, tp=2)) == "+pp"
    assert added_axes(case(), case(pp=2, tp=2)) == "+tp+pp"


def test_quantiles_of_a_class() -> None:
    table = {
        (spread.quantity, spread.row_class): spread for spread in spreads(made([number / 100 for number in range(99)]))
    }
    peaks = table["peak memory", RowClass("torchtitan", "data only", "A100")]
    assert (peaks.rows, peaks.folds) == (99, 3)
    assert peaks.quantiles == pytest.approx([level - 0.01 for level in LEVELS])
    times = table["step time", RowClass("torchtitan", ANY, "A100")]
    assert times.quantiles == peaks.quantiles


def test_a_row_that_is_not_fitted_or_in_float8_is_no_evidence_of_times() -> None:
    residual = made([0.1])[0]
    float8 = replace(residual.case, kernels=residual.case.kernels._replace(float8=1.0))
    for odd in (residual._replace(is_fitted=False), residual._replace(case=float8)):
        quantities = {spread.quantity for spread in spreads([odd] * 10)}
        assert quantities == {"peak memory", "repeated peak"}


def test_peaks_of_torchllm_are_no_evidence_for_others() -> None:
    classes = {
        spread.row_class for spread in spreads(made([0.1] * 10, stack="torchllm")) if spread.quantity == "peak memory"
    }
    assert classes == {RowClass("torchllm", ANY, ANY)}


def test_a_class_of_few_rows_is_not_shown() -> None:
    assert "step time" not in {spread.quantity for spread in spreads(made([0.1] * 9))}
    assert "step time" in {spread.quantity for spread in spreads(made([0.1] * 10))}


def test_a_peak_that_is_repeated_is_compared_with_the_median() -> None:
    fold = [residual._replace(fold="a") for residual in made([0.1, 0.2, 0.4])]
    assert [point.value for point in repeated_peaks(fold)] == pytest.approx([-0.1, 0.0, 0.2])
    assert not list(repeated_peaks(fold[:1]))


def test_pairs_are_of_one_job() -> None:
    """Two layouts of each of 20 jobs: tp was slower than predicted by 0.2 each time, whatever the job's own error."""
    rows = []
    for number in range(20):
        plain = made([0.1 * number], group=str(number))
        with_tp = made([0.1 * number + 0.2], group=str(number), tp="2", dp="4")
        rows += plain + with_tp if number % 2 else with_tp + plain
    ratios = {spread.row_class: spread for spread in spreads(rows) if spread.quantity == "ratio of two layouts"}
    added = ratios[RowClass(NATIVE, "+tp", ANY)]
    assert added.rows == 20
    assert added.quantiles == pytest.approx([0.2] * len(LEVELS))
    assert RowClass(NATIVE, SAME, ANY) not in ratios  # taking an axis away is no question of its own


@pytest.mark.parametrize(
    ("first", "second", "axes"),
    [
        ({}, {"micro_batch": "2"}, {SAME}),
        ({"tp": "2", "dp": "4"}, {"pp": "2", "dp": "4"}, {"+tp", "+pp"}),
    ],
)
def test_pairs_of_which_neither_is_simpler_count_both_ways(
    first: dict[str, str], second: dict[str, str], axes: set[str]
) -> None:
    rows = []
    for residual in (*made([0.0] * 5, **first), *made([0.3] * 5, **second)):
        rows.append(residual._replace(fold="a"))
    ratios = {spread.row_class.axes: spread for spread in spreads(rows) if spread.quantity == "ratio of two layouts"}
    assert axes <= set(ratios)
    both = ratios[ANY]
    assert both.interval[0] == -both.interval[1]


def test_the_share_above() -> None:
    spread = Spread("peak memory", "fold", RowClass(ANY, ANY, ANY), 100, 5, EVEN)
    for value in (-0.85, -0.3, 0.0, 0.4, 0.89):
        assert spread.share_above(value) == pytest.approx((1 - value) / 2)
    assert spread.share_above(EVEN[-1]) == pytest.approx(0.05)
    assert spread.share_above(EVEN[0]) == pytest.approx(0.95)
    assert 0 < spread.share_above(2.0) < 0.01
    assert spread.mean == pytest.approx(0, abs=1e-12)
    constant = spread._replace(quantiles=(0.1,) * len(LEVELS))
    assert constant.share_above(0.2) < 1e-6 < 0.999999 < constant.share_above(0.0)


def test_a_table_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = spreads(made([number / 100 for number in range(99)]))
    write_spreads(str(tmp_path / "table.csv"), written)
    monkeypatch.setattr(residuals, "TABLE", tmp_path / "table.csv")
    read = list(read_spreads.__wrapped__().values())
    assert [(spread.row_class, spread.rows) for spread in read] == [
        (spread.row_class, spread.rows) for spread in written
    ]
    for spread, original in zip(read, written, strict=True):
        assert spread.quantiles == pytest.approx(original.quantiles, abs=5e-4)  # three decimals


def test_outcomes_by_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit, [oom] = made([0.0] * 99), made([0.0], status="oom", step_time_s="")
    table = list(outcomes([*fit, oom, *made([0.0], left_out="fold")]))
    [low] = [outcome for outcome in table if outcome.rows]
    assert (low.framework, low.share_from, low.rows, low.ran_out) == ("torchtitan", 0.0, 100, 1)
    assert low.risk == pytest.approx(2 / 102)
    assert list(outcomes([*fit, *fit])) == []  # nobody says what did not fit
    assert list(outcomes([*fit[1:], oom])) == []  # too few
    write_outcomes(str(tmp_path / "outcomes.csv"), table)
    monkeypatch.setattr(residuals, "OUTCOMES", tmp_path / "outcomes.csv")
    assert read_outcomes.__wrapped__() == table
    assert table[-1] == Outcomes("torchtitan", 1.5, math.inf, 0, 0)


def test_the_command_writes_three_tables(tmp_path: Path) -> None:
    folder, target = tmp_path / "measured", tmp_path / "tables"
    folder.mkdir()
    target.mkdir()
    cells = {**ROW, "stack": "torchtitan", "step_time_s": "1.0", "peak_memory_gib": "20"}
    lines = [",".join(cells)]
    for seconds in range(1, 11):
        lines.append(",".join({**cells, "step_time_s": str(seconds)}.values()))
    (folder / "rows.csv").write_text("\n".join(lines))
    (folder / "notes.csv").write_text("a,b\n1,2\n")
    printed = write_residuals([str(folder)], str(target))
    assert "rows.csv: 10 rows" in printed
    assert "skipped: " in printed
    assert "errors of 10 steps" in printed
    assert sorted(file.name for file in target.iterdir()) == ["out_of_memory.csv", "residuals.csv", "step_errors.csv"]
    assert "fold,rows,,10" in (target / "step_errors.csv").read_text()


def test_what_ships_has_a_class_for_everything_and_none_of_few_rows() -> None:
    table = read_spreads()
    for quantity in ("peak memory", "ratio of two layouts"):
        assert (quantity, "framework", RowClass(ANY, ANY, ANY)) in table
    assert min(spread.rows for spread in table.values()) >= residuals.SHOWN_FROM
    assert all(list(spread.quantiles) == sorted(spread.quantiles) for spread in table.values())
