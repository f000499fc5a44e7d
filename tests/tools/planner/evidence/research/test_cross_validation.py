"""What is left out is not fitted to."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.planner.evidence.tables import case_of, with_cells, write_rows
from tests.tools.planner.evidence.test_calibrate import made
from torchllm.tools.planner.evidence.fit import fold_of
from torchllm.tools.planner.evidence.measurements import MeasuredRow
from torchllm.tools.planner.evidence.research.cross_validation import (
    cross_validate,
    leave_out,
    left_out_residuals,
    step_errors,
)
from torchllm.tools.planner.peak import counted
from torchllm.tools.planner.predict import predict


def named(rows: list[MeasuredRow], fold: str) -> list[MeasuredRow]:
    return [with_cells(row, fold=fold) for row in rows]


def test_a_fold_is_predicted_from_the_others_of_its_framework() -> None:
    """All were made with one slow framework, of which the other fold's times tell."""
    first = named(made(speed=0.85), "ours/one")
    second = named(made(speed=0.85), "ours/two")
    errors = leave_out(first + second, "fold")
    rows_by_name = {error.name: error.rows for error in errors}
    assert list(rows_by_name) == ["ours/one", "ours/two", "ours, all folds"]
    assert list(rows_by_name.values()) == [18, 18, 36]
    assert max(error.mean for error in errors) < 0.02


def test_a_framework_that_is_left_out_has_speed_one() -> None:
    usual_rows = named(made(), "ours/one")
    slow_rows = named(made(speed=0.85), "slow/two")
    _, slow = leave_out(usual_rows + slow_rows, "framework")
    assert slow.fitted < 0.03
    assert slow.mean > 0.1
    assert slow.bias == pytest.approx(-slow.mean)


def test_it_is_a_table(tmp_path: Path) -> None:
    rows = named(made(), "ours/one") + named(made(), "ours/two")
    file = write_rows(tmp_path / "rows.csv", rows)
    text = cross_validate([file], "fold", as_json=False)
    header, *lines = text.splitlines()
    assert header.split() == ["left", "out", "rows", "fitted", "mean", "median", "bias"]
    first_words = [line.split()[:2] for line in lines]
    assert first_words == [["ours/one", "18"], ["ours/two", "18"], ["ours,", "all"]]


def test_a_row_that_is_not_fitted_has_a_residual_of_constants_without_its_fold() -> None:
    """The assumed row is the first one of the slow fold, which is predicted too fast from the other fold."""
    slow = made(speed=0.85)
    assumed = with_cells(slow[0], assumed="act_ckpt=none")
    rows = named(made(), "ours/one") + named([*slow, assumed], "ours/two")
    residuals = left_out_residuals(rows)
    first, last = residuals[18], residuals[36]
    assert first.is_fitted
    assert not last.is_fitted
    assert first.time is not None
    assert last.time == pytest.approx(first.time)
    assert last.time > 0.05


def test_errors_of_steps_are_of_one_kind_and_know_what_is_left_out_with_them() -> None:
    first, second, *_ = made()
    rows = named([first, second], "ours/one") + named([first], "ours/two")
    residuals = left_out_residuals(rows)
    errors = step_errors(residuals, "fold")
    assert [error.unit for error in errors] == ["ours/one", "ours/one", "ours/two"]
    assert errors[0].gpu == "A100"
    errors = step_errors(residuals, "framework")
    assert [error.unit for error in errors] == ["ours"] * 3


def test_a_residual_of_memory_is_a_share_of_the_gpu() -> None:
    row = made()[0]
    case = case_of(row)
    memory = predict(case).memory
    capacity = case.hardware.memory
    peak = counted(memory, case.software) + 0.1 * capacity
    fuller = with_cells(row, peak_memory_gib=repr(peak / 2**30))
    residual, _ = left_out_residuals([fuller])
    assert residual.peak == pytest.approx(0.1)
    assert residual.memory_share == pytest.approx(memory.total / capacity)


def test_peaks_in_float8_are_no_evidence() -> None:
    first, *_ = made(cluster="dgx_h100", gpu="H100-80GB")
    row = with_cells(first, peak_memory_gib="50")
    residual, _ = left_out_residuals([row])
    assert residual.peak is not None
    case = case_of(row)
    kernels = case.kernels._replace(float8=True)
    float8 = row._replace(case=replace(case, kernels=kernels))
    residual, _ = left_out_residuals([float8])
    assert residual.peak is None


def test_a_fold_is_framework_and_model_where_none_is_said() -> None:
    row = made()[0]
    stack, model = row.cells["stack"], row.cells["model"]
    assert fold_of(row) == f"{stack}/{model}"
    assert fold_of(with_cells(row, fold="a/b")) == "a/b"
