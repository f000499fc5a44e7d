"""What is left out is not fitted to."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.evidence.test_calibrate import made
from torchllm.planner.evidence.cross_validation import (
    cross_validate,
    fold_of,
    leave_out_datasets,
    leave_out_models,
    left_out_residuals,
)
from torchllm.planner.evidence.measurements import MeasuredRow
from torchllm.planner.memory import counted
from torchllm.planner.predict import predict


def named(rows: list[MeasuredRow], **cells: str) -> list[MeasuredRow]:
    return [row._replace(cells={**row.cells, **cells}) for row in rows]


def test_a_model_is_predicted_from_the_others() -> None:
    """Both were made with the same constants, which the other one's times give away."""
    rows = named(made(launch=2.5e-5), model="one") + named(made(launch=2.5e-5), model="two")
    found = leave_out_models(rows)
    assert [(one.name, one.rows) for one in found] == [("made up one", 18), ("made up two", 18)]
    assert all(one.fitted > 0.05 > 0.01 > one.mean for one in found)


def test_it_is_a_table(tmp_path: Path) -> None:
    rows = [*named(made(), model="one"), *named(made(), model="two")]
    with open(tmp_path / "rows.csv", "w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0].cells))
        writer.writeheader()
        writer.writerows(row.cells for row in rows)
    header, *lines = cross_validate([str(tmp_path / "rows.csv")], "model", as_json=False).splitlines()
    assert header.split() == ["left", "out", "rows", "fitted", "mean", "median"]
    assert [line.split() for line in lines] == [
        ["made", "up", name, "18", "0.0", "0.0", "0.0"] for name in ("one", "two")
    ]


def test_a_data_set_that_is_unlike_the_others_is_missed() -> None:
    rows = named(made(), dataset="one") + named(made(), dataset="two") + named(made(launch=1e-4), dataset="three")
    found = {one.name: one for one in leave_out_datasets(rows)}
    assert found["three"].mean > 0.1
    assert found["three"].mean == pytest.approx(found["three"].fitted, rel=0.2)


def test_a_residual_is_of_constants_that_were_not_fitted_to_its_fold() -> None:
    """Of three folds two were made with the same constants; what they give away is wrong for the third."""
    rows = [*named(made(launch=2.5e-5), fold="one"), *named(made(launch=2.5e-5), fold="two")]
    found = left_out_residuals([*rows, *named(made(launch=2.5e-4), fold="three")])
    assert len(found) == 2 * 3 * 18
    errors: dict[tuple[str, str], float] = {}
    for one in found:
        assert one.time is not None
        errors[one.fold, one.left_out] = max(errors.get((one.fold, one.left_out), 0.0), abs(one.time))
    assert errors["three", "fold"] > 0.5
    assert errors["one", "framework"] == pytest.approx(errors["two", "framework"])
    assert {one.left_out for one in left_out_residuals(rows, fits=False)} == {"framework"}
    [alone, *_] = left_out_residuals(named(made(launch=2.5e-5), fold="one"))
    assert alone.left_out == "framework"  # there is nothing to fit to


def test_a_residual_of_memory_is_a_share_of_the_gpu() -> None:
    row = made()[0]
    assert row.case
    peak = counted(predict(row.case).memory, row.case.software)
    fuller = row._replace(cells={**row.cells, "peak_memory_gib": repr((peak + 0.1 * row.case.hardware.memory) / 2**30)})
    [of] = left_out_residuals([fuller])
    assert of.peak == pytest.approx(0.1)
    assert of.share == pytest.approx(predict(row.case).memory.total / row.case.hardware.memory)


def test_float8_is_no_evidence_and_a_fold_is_the_model_where_none_is_said() -> None:
    row = made()[0]
    assert row.case
    float8 = row._replace(case=replace(row.case, kernels=row.case.kernels._replace(float8=True)))
    assert left_out_residuals([float8]) == []
    assert fold_of(row) == f"{row.cells['dataset']}/{row.cells['model']}"
    assert fold_of(row._replace(cells={**row.cells, "fold": "a/b"})) == "a/b"
