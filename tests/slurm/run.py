"""Run the trials on a Slurm cluster in namespaces, and write their table into docs/reliability.md.

    python tests/slurm/run.py                     as root; .ci/slurm installs what is needed first
    python tests/slurm/run.py -k "scancel or drained"        some trials, as pytest's -k names them

Exit status 1 if any trial failed; the table is written only where all ran.
"""

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # Python put this folder there

import pytest
import torch

from tests.faults.run import PAGE, Fault, Recorder, write_table
from tests.slurm.cluster import missing

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- slurm -->\n", "<!-- /slurm -->\n"


def table(trials: Iterable[Fault]) -> str:
    lines = ["| trial | observed | outcome |", "|---|---|---|"]
    lines += [f"| {trial.text} | {', '.join(trial.observed)} | {trial.outcome} |" for trial in trials]
    return "\n".join(lines) + "\n"


def versions() -> str:
    """Return the versions of what was tried, and when."""
    slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{slurm}, torch {torch.__version__}, {platform.freedesktop_os_release()['PRETTY_NAME']}"


def main(arguments: Sequence[str]) -> int:
    """Run the trials that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="of pytest: which trials")
    options = parser.parse_args(arguments)
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    heading = f"`.ci/slurm`, {date.today().isoformat()}, {versions()}, 2 CPU cores, gloo:\n\n"
    recorder = Recorder(by_case=True)
    status = int(pytest.main(["-k", options.k, str(FOLDER)], plugins=[recorder]))
    content = heading + table(recorder.faults.values())
    print(content)
    if not options.k:
        write_table(PAGE, content, BEGIN, END)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
