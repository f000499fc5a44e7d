"""Counts a step of every layout on the hollow GPU, for the tables in launches_*.json, one per release of torch.

python -m tests.hollow.launches              print what differs from the table
python -m tests.hollow.launches --write      write the table
python -m tests.hollow.launches --only="zero 3, compile" --kernels      print the launches of one layout by name
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.hollow.bed import H100, ROOT, Machine, environment
from tests.hollow.layouts import Arguments, layouts

RELEASE = ".".join(version("torch").split(".")[:2])
TABLE = Path(__file__).parent / f"launches_{RELEASE}.json"
VERSIONS = "versions"
"""of the packages that the rest of a table was measured with, in its place of a layout"""
TOLERANCE = 1.02
"""times the launches of the table"""

Report = dict[str, Any]
"""a `one_rank.RankReport`, or {"error": text}"""


def measure(
    cases: Mapping[str, Arguments], machine: Machine = H100, module: str = "tests.hollow.one_rank", **variables: str
) -> dict[str, Report]:
    """Return the report of one rank's step of each case, by its name.

    module: the one that measures. variables: of the environment.
    """
    with tempfile.TemporaryDirectory() as messages:
        done = subprocess.run(
            [sys.executable, "-m", module, "--cases"],
            input=json.dumps(list(cases.values())),
            env={**environment(machine, Path(messages)), **variables},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == len(cases), f"{len(reports)} of {len(cases)} cases reported; exit status {done.returncode}"
    return dict(zip(cases, reports, strict=True))


def measure_all(cases: Mapping[str, Arguments], machine: Machine = H100, **variables: str) -> dict[str, Report]:
    """Return the report of each case, none of which may fail."""
    reports = measure(cases, machine, **variables)
    assert {name: report["error"] for name, report in reports.items() if "error" in report} == {}
    return reports


def row(report: Report) -> dict[str, int]:
    """Return a report's row of the table: how many of each a step has."""
    return {
        "launches": report["launches"],
        "memsets": report["memsets"],
        "copies": sum(report["copies"].values()),
        "collectives": sum(report["collectives"].values()),
    }


def read_table() -> dict[str, dict[str, int]]:
    """Return the installed torch's table, without its versions. FileNotFoundError: none was written (--write)."""
    table = json.loads(TABLE.read_text())
    del table[VERSIONS]
    return table


def as_text(rows: Mapping[str, dict[str, int]]) -> str:
    """Return the table as JSON with a line per layout, so that a change shows as one."""
    head = {VERSIONS: {package: version(package) for package in ("torch", "triton")}}
    lines = [f"  {json.dumps(name)}: {json.dumps(columns)}" for name, columns in {**head, **rows}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str]) -> int:
    """Count, and compare or write; exit status 1 where a layout failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--only", metavar="LAYOUT", help="one layout, by its name in the table")
    parser.add_argument("--kernels", action="store_true", help="print the launches by name")
    options = parser.parse_args(arguments)
    cases = layouts()
    if options.only:
        cases = {options.only: cases[options.only]}
    reports = measure(cases)
    failed = {name: report["error"] for name, report in reports.items() if "error" in report}
    for name, error in failed.items():
        print(f"{name}: {error.splitlines()[-1]}")
    rows = {name: row(report) for name, report in reports.items() if name not in failed}
    if options.write and not options.only and not failed:
        TABLE.write_text(as_text(rows))
    table = read_table() if TABLE.exists() else {}
    for name, columns in rows.items():
        expected = table.get(name)
        if expected != columns:
            print(f"{name}: {columns}, in the table {expected}")
        if options.kernels:
            for kernel, times in reports[name]["kernels"].items():
                print(f"{times:6}  {kernel}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
