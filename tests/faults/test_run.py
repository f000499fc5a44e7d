"""The table of the fault tests."""

from pathlib import Path

import pytest

from tests.faults.run import BEGIN, END, PAGE, Recorder, rows_of_other_parts, table, table_row, write_table

TESTS = """
import pytest

@pytest.mark.parametrize("victim", ["rank 0", "rank 1"])
def test_a_killed_rank_ends_the_job(victim, trials):
    assert victim == "rank 0"

def test_a_full_disk_ends_nothing():
    pass

def test_a_power_cut_loses_nothing():
    pytest.skip("needs a loop device")
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Recorder:
    """What is noted of three faults with two trials each."""
    (tmp_path / "conftest.py").write_text("import pytest\n\n@pytest.fixture\ndef trials():\n    return 2\n")
    (tmp_path / "test_machine.py").write_text(TESTS)
    recorder = Recorder(trials=2)
    pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)], plugins=[recorder])
    return recorder


def test_a_row_has_the_trials_and_the_outcome_of_a_fault(recorded: Recorder) -> None:
    rows = [table_row(fault) for fault in recorded.faults.values()]
    assert rows == [
        "| machine | a killed rank ends the job | 4 | **failed**: rank 1 |",
        "| machine | a full disk ends nothing | 1 | as it should be |",
        "| machine | a power cut loses nothing | 0 | not tried: needs a loop device |",
    ]


def test_the_table_is_put_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    write_table(page, "new\n")
    assert page.read_text() == f"before\n{BEGIN}new\n{END}after\n"


def test_rows_of_parts_that_are_not_tried_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    rows = ["| data | a fault | 1 | fine |", "| lease | another one | 2 | fine |"]
    page.write_text(f"before\n{BEGIN}heading\n\n{table(rows)}{END}after\n")
    assert rows_of_other_parts(page, ["data"]) == rows[1:]


def test_the_page_has_the_marks() -> None:
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
