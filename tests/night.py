"""Runs the exhaustive tests in parts, and goes on where the last part stopped.

python -m tests.night                   # a part of 45 minutes; the same command again runs the cases that are left
python -m tests.night --minutes=340     # a longer part
python -m tests.night tests/parallel    # a folder

The outcomes are kept in .night/, one file for each state of the tree: a changed tree starts anew. A case that failed
runs again in the next part, and is named as one that passed at a later try.
Exit status: 0 all cases passed, 1 a case failed, 3 cases are left.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
RECORD = "NIGHT_RECORD"
"""environment variable: the file to which pytest's hooks below append the outcomes"""
DONE = "NIGHT_DONE"
"""environment variable: the file that names the cases to leave out"""
END = "NIGHT_END"
"""environment variable: Unix time after which no case begins"""


class Outcome(NamedTuple):
    """Of one case at one try."""

    case: str
    """pytest's node id"""
    outcome: str
    """passed, failed or skipped"""
    seconds: float


class Night:
    """The outcomes of one state of the tree."""

    def __init__(self, outcomes: Iterable[Outcome]):
        self.tries: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            self.tries[outcome.case].append(outcome)

    def with_outcome(self, name: str) -> list[str]:
        """Return the cases whose last try has this outcome."""
        return [case for case, tries in self.tries.items() if tries[-1].outcome == name]

    @property
    def done(self) -> list[str]:
        """The cases that need no other try."""
        return self.with_outcome("passed") + self.with_outcome("skipped")

    def report(self, cases: int) -> str:
        """Return the lines that say where the night stands; `cases`: how many there are."""
        passed, failed, skipped = (self.with_outcome(name) for name in ("passed", "failed", "skipped"))
        minutes = sum(outcome.seconds for tries in self.tries.values() for outcome in tries) / 60
        later = [case for case in passed if len(self.tries[case]) > 1]
        left = cases - len(passed) - len(failed) - len(skipped)
        lines = [f"failed: {case}" for case in failed]
        lines += [f"passed at try {len(self.tries[case])}: {case}" for case in later]
        counts = f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped, {left} left"
        return "\n".join([*lines, f"night: {counts}; {minutes:.0f} minutes of tests"])


def read_outcomes(file: Path) -> list[Outcome]:
    """Return the outcomes in a file, which may not exist yet or end in the middle of a line."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [Outcome(*json.loads(line)) for line in lines]


def tree_state() -> str:
    """Return the commit, and a digest of the changes that are not committed."""
    commit = git("rev-parse", "--short=12", "HEAD").decode().strip()
    changes = git("diff", "HEAD", "--binary")
    return f"{commit}-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


# Hooks of pytest: this module is a plugin of the process that `main` starts, and of its workers


@pytest.hookimpl(trylast=True)  # after -m exhaustive
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """List the cases, and leave out those that need no other try."""
    cases = [item.nodeid for item in items]
    Path(os.environ[RECORD]).with_suffix(".cases").write_text(
        "\n".join(cases), encoding="utf-8"
    )  # the same in all workers
    done = set(Path(os.environ[DONE]).read_text(encoding="utf-8").splitlines())
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Begin no case after the end of the part: it is neither run nor reported."""
    return True if time.time() > float(os.environ[END]) else None


class Recorder:
    """Appends the outcome of each case to the record as soon as the case has ended."""

    def __init__(self, record: Path):
        self.record = record
        self.phases: dict[str, list[pytest.TestReport]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.phases[report.nodeid].append(report)
        if report.when not in ("setup", "call"):  # "teardown", or "???" if the case has killed its worker
            phases = self.phases.pop(report.nodeid)
            outcomes = {phase.outcome for phase in phases}
            worst = next(name for name in ("failed", "skipped", "passed") if name in outcomes)
            outcome = Outcome(report.nodeid, worst, round(sum(phase.duration for phase in phases), 1))
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that has the reports of all workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ[RECORD])))


# The command


def run_part(record: Path, minutes: float, paths: list[str]) -> int:
    """Run the cases that are left until the time is over, and return pytest's exit status."""
    done = record.with_suffix(".done")  # a copy: all workers must leave out the same cases
    done.write_text("\n".join(Night(read_outcomes(record)).done), encoding="utf-8")
    variables = {RECORD: str(record), DONE: str(done), END: str(time.time() + 60 * minutes)}
    workers = ["-n", str(len(os.sched_getaffinity(0))), "--dist", "load"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.night", "-m", "exhaustive", *workers, *paths]
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45, help="no case begins later (default: 45)")
    parser.add_argument("paths", nargs="*", help="files or folders (default: all tests)")
    options = parser.parse_args()
    record = ROOT / ".night" / f"{tree_state()}.jsonl"
    record.parent.mkdir(exist_ok=True)
    status = run_part(record, options.minutes, options.paths)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        return status  # a file that cannot be imported, or Ctrl-C: pytest has said it
    cases = record.with_suffix(".cases").read_text(encoding="utf-8").splitlines()
    night = Night(outcome for outcome in read_outcomes(record) if outcome.case in set(cases))
    print(night.report(len(cases)))
    if night.with_outcome("failed"):
        return 1
    return 0 if len(night.done) == len(cases) else 3


if __name__ == "__main__":
    sys.exit(main())
