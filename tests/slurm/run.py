"""Run the trials on a Slurm cluster in namespaces, and write their table into docs/reliability.md.

    python tests/slurm/run.py                     as root; .ci/slurm installs what is needed first
    python tests/slurm/run.py -k "scancel or drained"        some trials, as pytest's -k names them

Exit status 1 if any trial failed; the table is written only where all ran.
"""

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # Python put this folder there

import pytest
import torch

from tests.faults.run import PAGE, sentence, skip_reason, write_table

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- slurm -->\n", "<!-- /slurm -->\n"


@dataclass
class Trial:
    """What was done once."""

    text: str
    outcome: str
    seconds: float
    seen: str


class Recorder:
    """A plugin of pytest that notes what comes of each trial."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a trial."""
        if report.when != "call" and report.passed:
            return
        _, _, case = report.nodeid.partition("::")
        function, _, parameters = case.partition("[")
        text = sentence(function) + (f": {parameters.rstrip(']')}" if parameters else "")
        outcome = "as it should be" if report.passed else "**failed**"
        if report.skipped:
            outcome = f"not tried: {skip_reason(report)}"
        seen = ", ".join(str(value) for name, value in report.user_properties if name == "seen")
        self.trials.append(Trial(text, outcome, report.duration, seen))


def table(trials: Sequence[Trial]) -> str:
    """Return the table in Markdown."""
    lines = ["| trial | seen | outcome |", "|---|---|---|"]
    lines += [f"| {trial.text} | {trial.seen} | {trial.outcome} |" for trial in trials]
    return "\n".join(lines) + "\n"


def versions() -> str:
    """Return the versions of what was tried, and when."""
    slurm = subprocess.run(["scontrol", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{slurm}, torch {torch.__version__}, {platform.freedesktop_os_release()['PRETTY_NAME']}"


def main(arguments: Sequence[str]) -> int:
    """Run the trials that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="of pytest: which trials")
    options = parser.parse_args(arguments)
    recorder = Recorder()
    status = int(pytest.main(["-m", "slurm", "-k", options.k, str(FOLDER)], plugins=[recorder]))
    content = f"`.ci/slurm`, {date.today().isoformat()}, {versions()}, 2 CPU cores, gloo:\n\n{table(recorder.trials)}"
    print(content)
    is_tried = recorder.trials and not any(trial.outcome.startswith("not tried") for trial in recorder.trials)
    if not options.k and is_tried:
        write_table(PAGE, content, BEGIN, END)
    return status if is_tried else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
