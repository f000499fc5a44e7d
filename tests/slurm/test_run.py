"""The table of the Slurm trials."""

from pathlib import Path

import pytest

from tests.faults.run import PAGE
from tests.slurm.run import BEGIN, END, Recorder, table

TESTS = """
import pytest

@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_lost_node_is_replaced(node, record_property):
    record_property("observed", "it ended after 3 s")
    record_property("observed", "it went on after 20 s")
    assert node == "node1"

def test_it_trains():
    pass
"""


def test_a_row_has_what_was_seen_of_a_trial(tmp_path: Path) -> None:
    (tmp_path / "test_trials.py").write_text(TESTS)
    recorder = Recorder()
    pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)], plugins=[recorder])
    _, _, *rows = table(recorder.trials).splitlines()
    assert rows == [
        "| a lost node is replaced: node1 | it ended after 3 s, it went on after 20 s | as it should be |",
        "| a lost node is replaced: node2 | it ended after 3 s, it went on after 20 s | **failed** |",
        "| it trains |  | as it should be |",
    ]


def test_the_page_has_the_marks() -> None:
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
