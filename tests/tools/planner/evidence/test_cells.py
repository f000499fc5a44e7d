"""One row: its cells, and what its column `assumed` states."""

import pytest

from torchllm.tools.planner.evidence.cells import Cells, with_assumptions

NO_NUMBERS = {
    "": "tp is missing",
    "x": "tp = 'x' is not a number",
    "1.5": "tp = 1.5 is not a whole number",
    "-1": "tp = -1 is not a whole number",
}
"""texts of a cell, and why they are no number"""


def test_a_number_that_is_none_is_named() -> None:
    for text in NO_NUMBERS:
        cells = Cells({"tp": text}, [])
        with pytest.raises(ValueError, match=NO_NUMBERS[text]):
            cells.number("tp")


def test_an_empty_cell_is_the_default() -> None:
    cells = Cells({"tp": "", "pp": "2.0", "compile": "0"}, [])
    assert cells.number_or("tp", 4) == 4
    assert cells.number_or("pp", 4) == 2
    assert cells.number_or("cp", 4) == 4
    assert not cells.is_set("compile", default=True)
    assert cells.is_set("tied_emb", default=True)


def test_assumptions_are_applied_and_said() -> None:
    for between in ["; ", ", ", " "]:
        assumed: list[str] = []
        column = between.join(["micro_batch=1", "act_ckpt = selective op", "gpus=8"])
        cells = with_assumptions({"micro_batch": "32", "gpus": "8", "assumed": column}, assumed)
        assert cells.number("micro_batch") == 1, between
        assert cells.text("act_ckpt") == "selective op", between
        assert assumed == ["micro_batch = 1 instead of 32", "act_ckpt = selective op", "gpus = 8"], between


def test_an_assumption_that_is_not_understood_is_said() -> None:
    with pytest.raises(ValueError, match='is not "column=value; column=value"'):
        with_assumptions({"assumed": "as usual"}, [])
    with pytest.raises(ValueError, match="assumed names 'speed', which is no column"):
        with_assumptions({"assumed": "speed=2"}, [])
