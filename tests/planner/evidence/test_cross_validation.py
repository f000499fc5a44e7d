"""What is left out is not fitted to."""

import csv
from pathlib import Path

import pytest

from tests.planner.evidence.test_calibrate import made
from torchllm.planner.evidence.cross_validation import cross_validate, leave_out_datasets, leave_out_models
from torchllm.planner.evidence.measurements import MeasuredRow


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
