"""The exhaustive tests run in parts: what has passed is not run again, and nothing begins after the end of a part."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import night
from tests.night import DONE, END, RECORD, Night, read_outcomes

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
