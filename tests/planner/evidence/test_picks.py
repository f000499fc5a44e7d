"""The pick of a group is made with constants that were not fitted to it."""

import csv
import json
from pathlib import Path

import pytest

from tests.planner.evidence.test_calibrate import made
from tests.planner.evidence.test_cross_validation import named
from torchllm.planner.evidence.measurements import MeasuredRow, read_row
from torchllm.planner.evidence.picks import GroupPick, picks, regret_lines, score_picks


def grouped(rows: list[MeasuredRow], group: str) -> list[MeasuredRow]:
    return [row._replace(cells={**row.cells, "group": group}) for row in rows]


def test_the_regret_is_that_of_the_layout_predicted_fastest() -> None:
    """Times are the planner's own, but for the fastest layout, which took twice as long."""
    rows = made()
    fastest = min(rows, key=lambda row: row.seconds or 0)
    slowed = []
    for row in rows:
        seconds = row.seconds or 0
        slowed.append(row._replace(cells={**row.cells, "step_time_s": repr(seconds * (2 if row is fastest else 1))}))
    second = sorted(row.seconds or 0 for row in rows)[1]
    results = picks([*grouped(named(rows, "ours/one"), "even"), *grouped(named(slowed, "ours/two"), "odd")])
    even, odd = results
    assert even.regret == pytest.approx(0)
    assert odd.regret == pytest.approx(2 * (fastest.seconds or 0) / second - 1)
    assert (odd.rows, odd.told_right, odd.comparable) == (18, 18, 18)


def test_constants_are_not_those_of_the_fold() -> None:
    rows = [*grouped(named(made(), "ours/one"), "even"), *grouped(named(made(speed=0.85), "others/two"), "slow")]
    _, slow = picks(rows)
    assert slow.error is not None
    assert slow.error > 0.1


def test_a_pick_that_ran_out_of_memory() -> None:
    rows = made()
    fastest = min(rows, key=lambda row: row.seconds or 0)
    lost = read_row({**fastest.cells, "status": "oom", "step_time_s": ""})
    members = [row for row in rows if row is not fastest]
    [pick] = picks(grouped(named([*members, lost], "ours/one"), "lost"))
    assert pick.ran_out_of_memory
    assert pick.regret is None
    assert pick.told_right == pick.comparable - 1


def test_lines() -> None:
    good, lost = GroupPick("good", 10, 0.05, 9, 10, False, 0.02), GroupPick("lost", 10, None, 10, 10, True, None)
    _, first, second, total = regret_lines([good, lost])
    assert first.split() == ["good", "10", "5.0", "90.0", "2.0"]
    assert second.split() == ["lost", "10", "-", "100.0", "OOM"]
    assert total == "2 picks, 1 out of memory; 95.0% of 20 rows told right; regret mean 2.0%, worst 2.0%"


def test_the_command(tmp_path: Path) -> None:
    rows = grouped(named(made(), "ours/one"), "even")
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0].cells))
        writer.writeheader()
        writer.writerows(row.cells for row in rows)
    assert score_picks([str(file)], as_json=False).splitlines()[1].split()[0] == "even"
    assert json.loads(score_picks([str(file)], as_json=True))[0]["rows"] == 18
