"""Errors of the system, at each place where a program may meet one."""

import os
import subprocess
import sys

import pytest

from tests.faults.injected_errors import PROGRAMS
from tests.patience import patience
from tests.tiny_run import ROOT

PARTS = 4
"""of the faults of a program: at night each is a case of a few minutes"""


def try_faults(name: str, part: int, parts: int) -> str:
    """Return the table of some faults, tried in a process that forks: it must have no other threads."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.injected_errors", name, f"--part={part}/{parts}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(900),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_launcher_with_an_error_of_the_system_goes_on_or_ends_with_one_line() -> None:
    assert "| launch |" in try_faults("launch", part=3, parts=9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_an_error_of_the_system_goes_on_or_ends_with_one_line(name: str, part: int) -> None:
    print(try_faults(name, part, PARTS))
