"""The pick of a group is made with constants that were not fitted to it."""

import json
from pathlib import Path

import pytest

from tests.tools.planner.evidence.research.test_cross_validation import named
from tests.tools.planner.evidence.tables import with_cells, write_rows
from tests.tools.planner.evidence.test_calibrate import made
from torchllm.tools.planner.evidence.measurements import MeasuredRow, read_row
from torchllm.tools.planner.evidence.research.picks import GroupPick, picks, regret_lines, score_picks


def grouped(rows: list[MeasuredRow], group: str) -> list[MeasuredRow]:
    return [with_cells(row, group=group) for row in rows]


def job(rows: list[MeasuredRow], fold: str, group: str) -> list[MeasuredRow]:
    return grouped(named(rows, fold), group)


def seconds_of(row: MeasuredRow) -> float:
    assert row.seconds is not None
    return row.seconds


def test_the_regret_is_that_of_the_layout_predicted_fastest() -> None:
    """Times are the planner's own, but for the fastest layout, which took twice as long."""
    rows = made()
    fastest, second, *_ = sorted(rows, key=seconds_of)
    doubled = 2 * seconds_of(fastest)
    slowed = []
    for row in rows:
        seconds = doubled if row is fastest else seconds_of(row)
        slowed.append(with_cells(row, step_time_s=repr(seconds)))
    even, odd = picks(job(rows, "ours/one", "even") + job(slowed, "ours/two", "odd"))
    assert even.regret == pytest.approx(0)
    assert odd.regret == pytest.approx(doubled / seconds_of(second) - 1)
    assert odd.rows == 18
    assert odd.told_right == 18
    assert odd.comparable == 18


def test_a_pick_that_ran_out_of_memory() -> None:
    fastest, *slower = sorted(made(), key=seconds_of)
    lost = read_row({**fastest.cells, "status": "oom", "step_time_s": ""})
    (pick,) = picks(job([*slower, lost], "ours/one", "lost"))
    assert pick.ran_out_of_memory
    assert pick.regret is None
    assert pick.told_right == pick.comparable - 1


def test_lines() -> None:
    good = GroupPick("good", 10, 0.05, 9, 10, False, 0.02)
    lost = GroupPick("lost", 10, None, 10, 10, True, None)
    _, first, second, total = regret_lines([good, lost])
    assert first.split() == ["good", "10", "5.0", "90.0", "2.0"]
    assert second.split() == ["lost", "10", "-", "100.0", "OOM"]
    assert total == "2 picks, 1 out of memory; 95.0% of 20 rows told right; regret mean 2.0%, worst 2.0%"


def test_the_command(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.csv", job(made(), "ours/one", "even"))
    text = score_picks([file], as_json=False)
    line = text.splitlines()[1]
    assert line.split()[0] == "even"
    result = json.loads(score_picks([file], as_json=True))
    assert result[0]["rows"] == 18
