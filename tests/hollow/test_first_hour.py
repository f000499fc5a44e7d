"""the first hour on the hollow GPU: its jobs run to their end, and it sees that every number is zero."""

import json
from pathlib import Path

import pytest

from tests.hollow.bed import run

pytestmark = pytest.mark.timeout(1900)

NUMBERS = ["losses", "resume"]
"""stages that compare numbers, which the hollow GPU does not compute"""


def test_the_stages_that_compare_numbers_run_and_find_them_wrong(tmp_path: Path) -> None:
    command = ["python", "-m", "evidence.first_hour", f"--benchmark.only={','.join(NUMBERS)}"]
    done = run([*command, f"--run.folder={tmp_path}"], seconds=1200, OMP_NUM_THREADS="2")
    records = [json.loads(line) for line in (tmp_path / "first_hour.jsonl").read_text().splitlines()]
    outcomes = {record["stage"]: record["outcome"] for record in records}
    assert outcomes == dict.fromkeys(NUMBERS, "FAIL"), done.stdout
    assert done.returncode == 1


def test_the_stages_of_large_models_run(tmp_path: Path) -> None:
    command = ["python", "-m", "evidence.first_hour", "--benchmark.only=matmul,memory"]
    done = run([*command, f"--run.folder={tmp_path}"], seconds=1800)
    records = [json.loads(line) for line in (tmp_path / "first_hour.jsonl").read_text().splitlines()]
    outcomes = {record["stage"]: record["outcome"] for record in records}
    assert "error" not in outcomes.values(), done.stdout
    assert outcomes["memory"] == "pass", done.stdout  # torch's allocator is real
    assert "NVIDIA H100" in (tmp_path / "first_hour.md").read_text()
