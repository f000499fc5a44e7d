"""What is left out is not fitted to."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.evidence.test_calibrate import made
from torchllm.planner.evidence.cross_validation import cross_validate, leave_out, left_out_residuals, step_errors
from torchllm.planner.evidence.fit import fold_of
from torchllm.planner.evidence.measurements import MeasuredRow
from torchllm.planner.memory import counted
from torchllm.planner.predict import predict


def named(rows: list[MeasuredRow], fold: str) -> list[MeasuredRow]:
    return [row._replace(cells={**row.cells, "fold": fold}) for row in rows]


def test_a_fold_is_predicted_from_the_others_of_its_framework() -> None:
    """All were made with one slow framework, of which the other fold's times tell."""
    rows = named(made(speed=0.85), "ours/one") + named(made(speed=0.85), "ours/two")
    errors = leave_out(rows, "fold")
    assert [(error.name, error.rows) for error in errors] == [
        ("ours/one", 18),
        ("ours/two", 18),
        ("ours, all folds", 36),
    ]
    assert all(error.mean < 0.02 for error in errors)


def test_a_framework_that_is_left_out_has_speed_one() -> None:
    rows = named(made(), "ours/one") + named(made(speed=0.85), "slow/two")
    _, slow = leave_out(rows, "framework")
    assert slow.fitted < 0.03 < 0.1 < slow.mean
    assert slow.bias == pytest.approx(-slow.mean)


def test_a_row_under_an_assumption_is_not_fitted() -> None:
    rows = named(made(), "ours/one")
    assumed = [row._replace(cells={**row.cells, "assumed": "recompute none"}) for row in named(made(), "ours/two")]
    assert [error.name for error in leave_out(rows + assumed, "fold")] == ["ours/one", "ours, all folds"]


def test_it_is_a_table(tmp_path: Path) -> None:
    rows = [*named(made(), "ours/one"), *named(made(), "ours/two")]
    with open(tmp_path / "rows.csv", "w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0].cells))
        writer.writeheader()
        writer.writerows(row.cells for row in rows)
    header, *lines = cross_validate([str(tmp_path / "rows.csv")], "fold", as_json=False).splitlines()
    assert header.split() == ["left", "out", "rows", "fitted", "mean", "median", "bias"]
    assert [line.split()[:2] for line in lines] == [["ours/one", "18"], ["ours/two", "18"], ["ours,", "all"]]


def test_a_residual_is_of_constants_that_were_not_fitted_to_its_fold() -> None:
    """Of three folds two have the planner's own times; what they give away is wrong for the third."""
    rows = [*named(made(), fold="a/one"), *named(made(), fold="a/two"), *named(made(launch=2.5e-4), fold="b/three")]
    residuals = left_out_residuals(rows)
    assert [residual.row for residual in residuals] == [*rows, *rows]
    assert [residual.left_out for residual in residuals] == ["fold"] * len(rows) + ["framework"] * len(rows)
    times = [residual.time for residual in residuals if residual.fold == "b/three" and residual.time is not None]
    assert max(times) > 0.3  # measured is more than predicted


def test_a_row_that_is_not_fitted_has_a_residual_of_constants_without_its_fold() -> None:
    """The assumed row is the first one of the slow fold, which is predicted too fast from the other fold."""
    slow = made(speed=0.85)
    assumed = slow[0]._replace(cells={**slow[0].cells, "assumed": "act_ckpt=none"})
    rows = [*named(made(), "ours/one"), *named(slow, "ours/two"), *named([assumed], "ours/two")]
    residuals = left_out_residuals(rows)
    first, last = residuals[18], residuals[36]
    assert (first.is_fitted, last.is_fitted) == (True, False)
    assert first.time is not None
    assert last.time == pytest.approx(first.time)
    assert last.time > 0.05


def test_errors_of_steps_are_of_one_kind_and_know_what_is_left_out_with_them() -> None:
    residuals = left_out_residuals([*named(made()[:2], "ours/one"), *named(made()[:1], "ours/two")])
    assert [error.unit for error in step_errors(residuals, "fold")] == ["ours/one", "ours/one", "ours/two"]
    assert [error.unit for error in step_errors(residuals, "framework")] == ["ours"] * 3
    assert step_errors(residuals, "fold")[0].gpu == "A100"


def test_a_residual_of_memory_is_a_share_of_the_gpu() -> None:
    row = made()[0]
    assert row.case
    peak = counted(predict(row.case).memory, row.case.software)
    fuller = row._replace(cells={**row.cells, "peak_memory_gib": repr((peak + 0.1 * row.case.hardware.memory) / 2**30)})
    residual, _ = left_out_residuals([fuller])
    assert residual.peak == pytest.approx(0.1)
    assert residual.memory_share == pytest.approx(predict(row.case).memory.total / row.case.hardware.memory)


def test_peaks_in_float8_are_no_evidence() -> None:
    row = made(cluster="dgx_h100", gpu="H100-80GB")[0]
    assert row.case
    float8 = replace(row.case, kernels=row.case.kernels._replace(float8=True))
    cells = {**row.cells, "peak_memory_gib": "50"}
    for case, is_evidence in ((row.case, True), (float8, False)):
        residual, _ = left_out_residuals([row._replace(case=case, cells=cells)])
        assert (residual.peak is not None) == is_evidence


def test_a_fold_is_framework_and_model_where_none_is_said() -> None:
    row = made()[0]
    assert fold_of(row) == f"{row.cells['stack']}/{row.cells['model']}"
    assert fold_of(row._replace(cells={**row.cells, "fold": "a/b"})) == "a/b"
