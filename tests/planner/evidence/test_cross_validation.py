"""What is left out is not fitted to."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.evidence.test_calibrate import made
from torchllm.planner.evidence.cross_validation import cross_validate, fold_of, leave_out, left_out_residuals
from torchllm.planner.evidence.measurements import MeasuredRow
from torchllm.planner.memory import counted
from torchllm.planner.predict import predict


def named(rows: list[MeasuredRow], fold: str) -> list[MeasuredRow]:
    return [row._replace(cells={**row.cells, "fold": fold}) for row in rows]


def test_a_fold_is_predicted_from_the_others_of_its_framework() -> None:
    """All were made with one slow framework, of which the other fold's times tell."""
    rows = named(made(speed=0.85), "ours/one") + named(made(speed=0.85), "ours/two")
    found = leave_out(rows, "fold")
    assert [(one.name, one.rows) for one in found] == [("ours/one", 18), ("ours/two", 18), ("ours, all folds", 36)]
    assert all(one.mean < 0.02 for one in found)


def test_a_framework_that_is_left_out_has_speed_one() -> None:
    rows = named(made(), "ours/one") + named(made(speed=0.85), "theirs/two")
    _, theirs = leave_out(rows, "framework")
    assert theirs.fitted < 0.03 < 0.1 < theirs.mean
    assert theirs.bias == pytest.approx(-theirs.mean)


def test_a_row_under_an_assumption_is_not_fitted() -> None:
    rows = named(made(), "ours/one")
    assumed = [row._replace(cells={**row.cells, "assumed": "recompute none"}) for row in named(made(), "ours/two")]
    assert [one.name for one in leave_out(rows + assumed, "fold")] == ["ours/one", "ours, all folds"]


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
    found = left_out_residuals(rows)
    assert [one.row for one in found] == [*rows, *rows]
    assert [one.left_out for one in found] == ["fold"] * len(rows) + ["framework"] * len(rows)
    worst = max(one.time for one in found if one.fold == "b/three" and one.time is not None)
    assert worst > 0.3  # measured is more than predicted


def test_a_residual_of_memory_is_a_share_of_the_gpu() -> None:
    row = made()[0]
    assert row.case
    peak = counted(predict(row.case).memory, row.case.software)
    fuller = row._replace(cells={**row.cells, "peak_memory_gib": repr((peak + 0.1 * row.case.hardware.memory) / 2**30)})
    of, _ = left_out_residuals([fuller])
    assert of.peak == pytest.approx(0.1)
    assert of.share == pytest.approx(predict(row.case).memory.total / row.case.hardware.memory)


def test_float8_is_no_evidence_and_a_fold_is_the_model_where_none_is_said() -> None:
    row = made()[0]
    assert row.case
    float8 = row._replace(case=replace(row.case, kernels=row.case.kernels._replace(float8=True)))
    assert left_out_residuals([float8]) == []
    assert fold_of(row) == f"{row.cells['dataset']}/{row.cells['model']}"
    assert fold_of(row._replace(cells={**row.cells, "fold": "a/b"})) == "a/b"
