"""One row of a table of measurements: its cells, and assumptions for the empty ones.

No torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchllm.tools.planner.calibration.rows import COLUMNS

ASSUMPTION = re.compile(r"(\w+)\s*=\s*(.*?)\s*(?=[;,\s]\s*\w+\s*=|;?\s*$)")
"""one "column=value" of the column `assumed`; several are separated by semicolons, commas or blanks"""


@dataclass(frozen=True)
class Cells:
    """One row."""

    texts: Mapping[str, str]
    """cells by column, those included that the column `assumed` fills"""
    assumed: list[str]
    """assumptions, printed with a score; more are added while the row is read"""

    def text(self, column: str) -> str:
        """Return a cell; "" if it is empty or there is no such column."""
        return self.texts.get(column, "")

    def number(self, column: str) -> int:
        """Return a whole number. ValueError naming the column if the cell is empty or something else."""
        text = self.text(column)
        if not text:
            raise ValueError(f"{column} is missing")
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{column} = {text!r} is not a number") from None
        if value != int(value) or value < 0:
            raise ValueError(f"{column} = {text} is not a whole number")
        return int(value)

    def count(self, column: str) -> int:
        """Return a whole number over 0. ValueError naming the column if the cell has none."""
        number = self.number(column)
        if not number:
            raise ValueError(f"{column} = 0: there is nothing to predict")
        return number

    def number_or(self, column: str, default: int) -> int:
        """Return a whole number, or `default` if the cell is empty."""
        return self.number(column) if self.text(column) else default

    def is_set(self, column: str, default: bool = False) -> bool:
        """Return whether a cell is 1, or `default` if it is empty."""
        return self.text(column) == "1" if self.text(column) else default

    def assume(self, assumption: str) -> None:
        """Note something that the row does not say."""
        self.assumed.append(assumption)


def with_assumptions(texts: Mapping[str, str], assumed: list[str]) -> Cells:
    """Return a row with the cells that its column `assumed` states, which are named in the list `assumed`.

    A stated value replaces another one: tables have columns that mean something else, as the batch of a rank for the
    micro batch of its pipeline. ValueError if the column is not understood.
    """
    column_text = texts.get("assumed", "").strip()
    assumptions = ASSUMPTION.findall(column_text)
    if column_text and not assumptions:
        raise ValueError(f'assumed = {column_text!r} is not "column=value; column=value"')
    filled = dict(texts)
    for column, value in assumptions:
        if column not in COLUMNS:
            raise ValueError(f"assumed names {column!r}, which is no column")
        written = filled.get(column, "")
        filled[column] = value
        replaced = f" instead of {written}" if written not in ("", value) else ""
        assumed.append(f"{column} = {value}{replaced}")
    return Cells(filled, assumed)
