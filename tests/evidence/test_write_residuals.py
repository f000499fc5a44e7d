"""Which rows are evidence, the quantiles of their classes, and that the tables are read back."""

from dataclasses import replace
from pathlib import Path

import pytest

from evidence.cross_validation import Residual
from evidence.measurements import read_row
from evidence.write_residuals import (
    points,
    repeated_peaks,
    spreads,
    write_residuals,
    write_spreads,
)
from tests.evidence.tables import case_of
from tests.tools.planner.calibration.sweeps import ROW, write_cells
from torchllm.tools.planner import residuals
from torchllm.tools.planner.residuals import (
    ANY,
    LEVELS,
    NATIVE,
    SAME,
    RowClass,
    Spread,
    read_spreads,
)
from torchllm.tools.planner.step_errors import Knowledge

HUNDREDTHS = [number / 100 for number in range(99)]
RATIO = "ratio of two layouts"


def made(values: list[float], left_out: Knowledge = "framework", **cells: str) -> list[Residual]:
    row = read_row({**ROW, "stack": "torchtitan", **cells})
    case = case_of(row)
    made_up = []
    for number, value in enumerate(values):
        fold = f"fold {number % 3}"
        residual = Residual(row, case, fold, left_out, time=value, is_fitted=True, shares={}, peak=value)
        made_up.append(residual)
    return made_up


def spreads_of(rows: list[Residual], quantity: str) -> dict[RowClass, Spread]:
    by_class = {}
    for spread in spreads(rows):
        if spread.quantity == quantity:
            by_class[spread.row_class] = spread
    return by_class


def quantities(rows: list[Residual]) -> set[str]:
    return {spread.quantity for spread in spreads(rows)}


def test_quantiles_of_a_class_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = made(HUNDREDTHS, stack="torchllm")
    times = spreads_of(rows, "step time")[RowClass("torchllm", ANY, "A100")]
    assert times.quantiles == pytest.approx([level - 0.01 for level in LEVELS])
    assert "step time" in quantities(rows[:10])
    assert "step time" not in quantities(rows[:9])  # too few to be shown

    file = tmp_path / "table.csv"
    written = spreads(rows)
    write_spreads(str(file), written)
    monkeypatch.setattr(residuals, "TABLE", file)
    for spread, original in zip(read_spreads.__wrapped__().values(), written, strict=True):
        assert (spread.row_class, spread.rows) == (original.row_class, original.rows)
        assert spread.quantiles == pytest.approx(original.quantiles, abs=5e-4)  # three decimals


def test_a_row_that_is_not_fitted_or_in_float8_is_no_evidence_of_times() -> None:
    (residual,) = made([0.1], stack="torchllm")
    kernels = residual.case.kernels._replace(float8=1.0)
    unfitted = residual._replace(is_fitted=False)
    float8 = residual._replace(case=replace(residual.case, kernels=kernels))
    assert quantities([unfitted] * 10) == {"peak memory"}
    assert quantities([float8] * 10) == {"peak memory"}


def test_peaks_and_steps_are_torchllms_and_pairs_of_kinds() -> None:
    assert quantities(made([0.1] * 10)) == {RATIO}
    for stack, frameworks in (("torchtitan", {NATIVE, ANY}), ("nemo", {ANY})):
        classes = spreads_of(made([0.1] * 10, stack=stack), RATIO)
        assert {row_class.framework for row_class in classes} == frameworks


def test_a_peak_that_is_repeated_is_compared_with_the_median() -> None:
    fold = [residual._replace(fold="a") for residual in made([0.1, 0.2, 0.4])]
    distances = [change for _, change in repeated_peaks(fold)]
    assert distances == pytest.approx([-0.1, 0.0, 0.2])
    assert not repeated_peaks(fold[:1])


def test_errors_of_peaks_are_own_ones_with_every_change_between_versions() -> None:
    """Ten own errors, all of different layouts, and a layout of another framework that was measured twice."""
    repeated = [residual._replace(fold="a") for residual in made([0.1, 0.3])]
    own = [residual._replace(fold=str(number)) for number, residual in enumerate(made([0.05] * 10, stack="torchllm"))]
    errors = [point.value for point in points([*own, *repeated]) if point.quantity == "peak memory"]
    assert errors == pytest.approx([-0.05, 0.15] * 10)


def test_pairs_are_of_one_job() -> None:
    """Two layouts of each of 20 jobs: tp was slower than predicted by 0.2 each time, whatever the job's own error."""
    rows = []
    for number in range(20):
        group = str(number)
        error = 0.1 * number
        plain = made([error], group=group)
        with_tp = made([error + 0.2], group=group, tp="2", dp="4")
        rows += plain + with_tp if number % 2 else with_tp + plain
    ratios = spreads_of(rows, RATIO)
    added = ratios[RowClass(NATIVE, "+tp", ANY)]
    assert added.rows == 20
    assert added.quantiles == pytest.approx([0.2] * len(LEVELS))
    assert RowClass(NATIVE, SAME, ANY) not in ratios  # taking an axis away is no question of its own


def test_the_command_writes_the_tables(tmp_path: Path) -> None:
    folder, target = tmp_path / "measured", tmp_path / "tables"
    folder.mkdir()
    target.mkdir()
    cells = {**ROW, "stack": "torchtitan", "peak_memory_gib": "20"}
    rows = [cells | {"step_time_s": str(seconds)} for seconds in range(1, 11)]
    write_cells(folder / "rows.csv", rows)
    (folder / "notes.csv").write_text("a,b\n1,2\n")
    printed = write_residuals([str(folder)], str(target))
    assert "rows.csv: 10 rows" in printed
    assert "skipped: " in printed
    assert "errors of 10 steps" in printed
    names = {file.name for file in target.iterdir()}
    assert names == {"residuals.csv", "step_errors.csv"}
    assert "fold,rows,,10" in (target / "step_errors.csv").read_text()
