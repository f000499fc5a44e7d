"""The exhaustive tests run in parts: what has passed is not run again, and nothing begins after the end of a part."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import night
from tests.night import DONE, END, RECORD, Night, Outcome, read_outcomes

CASES = """
import os, pathlib
def test_good(): pass
def test_fixed(): assert pathlib.Path("fixed").exists()
def test_dies(): os._exit(1) if not pathlib.Path("fixed").exists() else None
"""


def run(folder: Path, record: Path, seconds: float = 3600) -> None:
    done = folder / "done"
    done.write_text("\n".join(Night(read_outcomes(record)).done))
    variables = {RECORD: str(record), DONE: str(done), END: str(time.time() + seconds)}
    path = f"{night.ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.night",
        "-n",
        "1",
        "--rootdir",
        str(folder),
        "cases.py",
    ]
    subprocess.run(
        command, cwd=folder, env=os.environ | variables | {"PYTHONPATH": path}, capture_output=True, check=False
    )


@pytest.mark.exhaustive
def test_a_night_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    record = tmp_path / "record.jsonl"
    run(tmp_path, record, seconds=-1)
    assert read_outcomes(record) == []
    assert record.with_suffix(".cases").read_text().split() == [
        f"cases.py::test_{name}" for name in ("good", "fixed", "dies")
    ]
    run(tmp_path, record)
    assert {(case, outcome) for case, outcome, _ in read_outcomes(record)} == {
        ("cases.py::test_good", "passed"),
        ("cases.py::test_fixed", "failed"),
        ("cases.py::test_dies", "failed"),
    }
    (tmp_path / "fixed").touch()
    run(tmp_path, record)
    tries = Night(read_outcomes(record)).tries
    assert [len(tries[f"cases.py::test_{name}"]) for name in ("good", "fixed", "dies")] == [1, 2, 2]
    assert len(Night(read_outcomes(record)).done) == 3


def test_the_report_names_what_failed_and_what_passed_at_a_later_try() -> None:
    outcomes = [("a", "failed", 30.0), ("b", "failed", 60.0), ("c", "skipped", 0.0), ("a", "passed", 30.0)]
    report = Night(Outcome(*outcome) for outcome in outcomes).report(cases=5)
    assert report.splitlines() == [
        "failed: b",
        "passed at try 2: a",
        "night: 1 passed, 1 failed, 1 skipped, 2 left; 2 minutes of tests",
    ]


def test_a_record_that_was_cut_off_loses_its_last_case_alone(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text('["a", "passed", 1.0]\n["b", "pas')
    assert [outcome.case for outcome in read_outcomes(record)] == ["a"]


@pytest.mark.parametrize(("outcomes", "cases", "status"), [("passed", 1, 0), ("failed", 1, 1), ("passed", 2, 3)])
def test_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: str, cases: int, status: int
) -> None:
    def part(record: Path, minutes: float, paths: list[str]) -> int:
        record.write_text(f'["case0", "{outcomes}", 1.0]\n')
        record.with_suffix(".cases").write_text("\n".join(f"case{number}" for number in range(cases)))
        return 0

    monkeypatch.setattr(night, "run_part", part)
    monkeypatch.setattr(night, "ROOT", tmp_path)
    monkeypatch.setattr(night, "tree_state", lambda: "state")
    monkeypatch.setattr(sys, "argv", ["night"])
    assert night.main() == status
