"""What tests on rows of measurements share: their cases, and tables of them as files."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evidence.measurements import MeasuredRow, read_row
from tests.tools.planner.calibration import sweeps
from tests.tools.planner.calibration.sweeps import write_cells
from torchllm.tools.planner.case import Case


def case_of(row: MeasuredRow) -> Case:
    assert row.case is not None, row.problem
    return row.case


def with_cells(row: MeasuredRow, **cells: str) -> MeasuredRow:
    """Return the row with other cells; its case stays."""
    return row._replace(cells=row.cells | cells)


def write_rows(file: Path, rows: Iterable[MeasuredRow]) -> str:
    """Write measured rows as a table; return the file's name."""
    return write_cells(file, [row.cells for row in rows])


def read_table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def named(rows: list[MeasuredRow], fold: str) -> list[MeasuredRow]:
    return [with_cells(row, fold=fold) for row in rows]


def made(**options: Any) -> list[MeasuredRow]:
    """A sweep whose times are those of other constants, as rows of evidence."""
    return sweeps.made(read=read_row, **options)
