"""The exit status of `.ci/run`, with stand-ins for the programs that it calls; the tests that `.ci/sample` names."""

import os
import re
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tiny_run import ROOT

PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo "Python 3.11"; exit; fi
mkdir -p "$3/bin"  # python3 -m venv FOLDER
touch "$3/bin/activate"
ln -sf "$(type -P pip)" "$3/bin/pip"
"""
PYTEST = """#!/usr/bin/env bash
[ "$1" = -o ] && shift 2  # where pytest's cache is
echo "pytest $*"
case "$*" in
    *--last-failed*) exit "$ALONE" ;;
    *"$FAILS"*) if mkdir failed 2>/dev/null; then exit "$STATUS"; else exit "$ALONE"; fi ;;
esac
"""
HANGS = """#!/usr/bin/env bash
case "$*" in
    *"HANGING"*) touch hangs && sleep 600 ;;
    *"tests/parallel tests/proof") until [ -f hangs ]; do sleep 0.1; done && kill $PPID ;; # the first part
esac
"""
NOTES_BEGIN_AND_END = """#!/usr/bin/env bash
shift 2
case "$*" in *"tests/optim/test_optimizer.py"*) exit ;; esac  # the sample is no part
echo "begin $*" >>notes
sleep 0.2
echo "end $*" >>notes
"""
NOTHING = "#!/usr/bin/env bash\n"

PARTS = {
    "one process": "tests/config tests/dry_run",
    "newest torch": "tests/optim/test_optimizer.py",
    "layouts": "tests/parallel tests/proof",
    "checkpoints": "tests/checkpoint tests/models",
    "data and optimizers": "tests/data tests/optim",
    "waiting": "tests/faults tests/runtime",
    "the rest": "--ignore=",
    "durations": "tests/adapt/test_adapter.py tests/recipes/test_benchmark.py",
}
"""part of the suite -> what only its command line has"""


def run_ci(
    folder: Path,
    fails: str = "no such argument",
    status: int = 1,
    alone: int = 1,
    pytest_program: str = PYTEST,
    open_file: int = 1,
) -> subprocess.CompletedProcess[str]:
    """Run a copy of `.ci/run` whose `pytest` ends with `status` where its arguments have `fails` in them.

    alone: the status when what failed runs once more. Every process that it starts inherits `open_file`, a file
    descriptor.
    """
    programs = folder / "programs"
    programs.mkdir()
    for name in ("pip", "ruff", "mypy"):
        (programs / name).write_text(NOTHING)
    (programs / "python3").write_text(PYTHON)
    (programs / "pytest").write_text(pytest_program)
    for program in programs.iterdir():
        program.chmod(0o755)
    (folder / ".ci").mkdir()
    for name in ("run", "sample", "versions"):
        shutil.copy(ROOT / ".ci" / name, folder / ".ci" / name)
    (folder / "temporary").mkdir()
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TMPDIR": str(folder / "temporary"),
        "FAILS": fails,
        "STATUS": str(status),
        "ALONE": str(alone),
    }
    return subprocess.run(
        ["bash", ".ci/run"], cwd=folder, env=environment, capture_output=True, text=True, pass_fds=[open_file]
    )


def test_a_run_whose_tests_pass_ends_with_status_0(tmp_path: Path) -> None:
    result = run_ci(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("pytest ") == len(PARTS)
    assert not list((tmp_path / "temporary").iterdir()), "the environment stays"


@pytest.mark.parametrize("part", PARTS)
def test_a_failure_in_any_part_is_the_exit_status(tmp_path: Path, part: str) -> None:
    result = run_ci(tmp_path, fails=PARTS[part])
    assert result.returncode == 1
    assert result.stdout.count("pytest ") == len(PARTS) + 1, "a failure hides the parts after it"


@pytest.mark.parametrize("part", PARTS)
def test_what_failed_beside_other_tests_runs_once_more_alone(tmp_path: Path, part: str) -> None:
    result = run_ci(tmp_path, fails=PARTS[part], alone=0)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("once more") == 1
    assert result.stdout.count("pytest ") == len(PARTS) + 1


@pytest.mark.parametrize("part", [part for part in PARTS if part != "newest torch"])
def test_tests_that_cannot_be_collected_do_not_run_once_more(tmp_path: Path, part: str) -> None:
    result = run_ci(tmp_path, fails=PARTS[part], status=2, alone=0)
    assert result.returncode == 1
    assert "once more" not in result.stdout


def test_two_parts_run_at_a_time_and_each_once(tmp_path: Path) -> None:
    result = run_ci(tmp_path, pytest_program=NOTES_BEGIN_AND_END)
    assert result.returncode == 0, result.stdout + result.stderr
    running: set[str] = set()
    together = [0]
    for line in (tmp_path / "notes").read_text().splitlines():
        event, _, part = line.partition(" ")
        assert (part in running) == (event == "end")
        running ^= {part}
        together.append(len(running))
    assert len(together) == 1 + 2 * (len(PARTS) - 1)
    assert max(together) == 2
    assert together[-3:] == [0, 1, 0], "something runs beside the tests that compare durations"


def test_every_test_is_in_one_part(tmp_path: Path) -> None:
    result = run_ci(tmp_path)
    calls = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("pytest ")]
    of_suite = [words for words in calls if sample()[0] not in words]
    named = [word for words in of_suite for word in words if word.startswith("tests/")]
    [left_to_others] = [words for words in calls if words[0].startswith("--ignore=")]
    assert sorted(word.partition("=")[2] for word in left_to_others) == sorted(named)
    for word in named:
        path, _, test = word.partition("::")
        assert f"def {test}" in (ROOT / path).read_text() if test else (ROOT / path).exists()


@pytest.mark.parametrize("part", ["one process", "newest torch"])
def test_a_run_that_is_killed_ends_what_runs_beside_it(tmp_path: Path, part: str) -> None:
    read_end, write_end = os.pipe()
    program = HANGS.replace("HANGING", PARTS[part])
    assert run_ci(tmp_path, pytest_program=program, open_file=write_end).returncode != 0
    os.close(write_end)
    ended, _, _ = select.select([read_end], [], [], 10.0)  # once no process has the other end
    os.close(read_end)
    assert ended


def test_the_newest_torch_is_the_bound() -> None:
    newest = re.search(r"^newest=2\.(\d+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    bound = re.search(r'"torch>=2\.11,<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert newest
    assert bound
    assert int(newest[1]) + 1 == int(bound[1])


def sample() -> list[str]:
    """Return the lines of `.ci/sample` that name tests."""
    return [line for line in (ROOT / ".ci/sample").read_text().splitlines() if line.startswith("tests/")]


def test_the_sample_names_tests_that_exist() -> None:
    tests = sample()
    assert tests
    for test in tests:
        path, _, name = test.partition("::")
        function = name.split("[")[0]
        assert f"def {function}" in (ROOT / path).read_text(), test
