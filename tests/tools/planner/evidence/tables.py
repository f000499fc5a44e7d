"""What tests on rows of measurements share: their cases, and tables of them as files."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torchllm.tools.planner.case import Case
from torchllm.tools.planner.evidence.measurements import MeasuredRow


def case_of(row: MeasuredRow) -> Case:
    assert row.case is not None, row.problem
    return row.case


def with_cells(row: MeasuredRow, **cells: str) -> MeasuredRow:
    """Return the row with other cells; its case stays."""
    return row._replace(cells=row.cells | cells)


def write_cells(file: Path, rows: Sequence[Mapping[str, str]]) -> str:
    """Write a table with the columns of all rows, empty where a row has none; return the file's name."""
    columns: dict[str, None] = {}
    for cells in rows:
        columns |= dict.fromkeys(cells)
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(columns), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return str(file)


def write_rows(file: Path, rows: Iterable[MeasuredRow]) -> str:
    """Write measured rows as a table; return the file's name."""
    return write_cells(file, [row.cells for row in rows])


def read_table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def named(rows: list[MeasuredRow], fold: str) -> list[MeasuredRow]:
    return [with_cells(row, fold=fold) for row in rows]
