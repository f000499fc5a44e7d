"""Writes the peaks with which the stage `memory` of the first hour compares those of a GPU.

    PYTHONPATH=recipes python -m tests.hollow.first_hour_peaks

They are of the stage's own steps, on as many GPUs as a node may have: one rank's, on the hollow GPU.
"""

import csv
import sys
import tempfile
from pathlib import Path

from evidence.first_hour.jobs import Jobs, Machine
from evidence.first_hour.stages import HOLLOW_PEAKS, MEMORY_MODES, memory_layout
from tests.hollow.launches import measure
from tests.hollow.memory import HUGE

RANKS = (1, 2, 4, 8)
"""that a stage takes of a node"""


def cases() -> dict[tuple[int, str], list[str]]:
    """Return the command line of each step by the number of ranks and the recompute mode."""
    named = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            machine = Machine(("NVIDIA H100 80GB HBM3",) * ranks, "2.13.0", "13.0", "")
            jobs = Jobs(machine, "", Path(folder) / "jobs", deadline=0)
            for mode in MEMORY_MODES:
                degree = f"--parallel.dp_shard={ranks}"
                named[ranks, mode] = [degree if "dp_shard" in word else word for word in memory_layout(jobs, mode)]
    return named


def main() -> int:
    """Measure and write; exit status 1 where a step failed."""
    arguments = cases()
    reports = measure({f"{ranks} {mode}": case for (ranks, mode), case in arguments.items()}, HUGE)
    rows = []
    for (ranks, mode), report in zip(arguments, reports.values(), strict=True):
        if "error" in report:
            print(report["error"])
            return 1
        rows.append([ranks, mode, f"{report['live']:.2f}"])
    with HOLLOW_PEAKS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["ranks", "recompute", "peak_gib"])
        writer.writerows(rows)
    print(HOLLOW_PEAKS.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
