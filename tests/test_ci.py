"""The exit status of `.ci/run`, with stand-ins for the programs that it calls."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tiny_run import ROOT

PYTHON = """#!/usr/bin/env bash
mkdir -p "$3/bin"  # python3 -m venv FOLDER
touch "$3/bin/activate"
"""
PYTEST = """#!/usr/bin/env bash
echo "pytest $*"
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""
NOTHING = "#!/usr/bin/env bash\n"

PARTS = {"one process": "tests/planner", "waiting": "tests/runtime", "the rest": "--ignore="}
"""part of the suite -> what only its command line has"""


def run_ci(folder: Path, fails: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of `.ci/run` whose `pytest` fails where its arguments have `fails` in them."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("pip", "ruff", "mypy"):
        (programs / name).write_text(NOTHING)
    (programs / "python3").write_text(PYTHON)
    (programs / "pytest").write_text(PYTEST)
    for program in programs.iterdir():
        program.chmod(0o755)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "temporary").mkdir()
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TMPDIR": str(folder / "temporary"),
        "FAILS": fails,
    }
    return subprocess.run(["bash", ".ci/run"], cwd=folder, env=environment, capture_output=True, text=True)


def test_a_run_whose_tests_pass_ends_with_status_0(tmp_path: Path) -> None:
    result = run_ci(tmp_path, fails="no such argument")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("pytest ") == len(PARTS)
    assert not list((tmp_path / "temporary").iterdir()), "the environment stays"


@pytest.mark.parametrize("part", PARTS)
def test_a_failure_in_any_part_is_the_exit_status(tmp_path: Path, part: str) -> None:
    result = run_ci(tmp_path, fails=PARTS[part])
    assert result.returncode == 1
    assert result.stdout.count("pytest ") == len(PARTS), "a failure hides the parts after it"
