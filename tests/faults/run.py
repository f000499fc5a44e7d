"""Run all fault tests, those of the night too, and write the table fault x trials x outcome of docs/reliability.md.

    python tests/faults/run.py --trials 3                     all parts, three trials per fault
    python tests/faults/run.py --only launcher lease          parts: the test files, without "test_"

A fault is a test function: its name says what is done and what must come of it. Exit status 1 if any trial failed. With
--only, the table's rows of other parts stay as they are.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # Python put this folder there

import pytest

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs/reliability.md"
BEGIN, END = "<!-- faults -->\n", "<!-- /faults -->\n"


@dataclass
class Fault:
    """What was tried of one test function, over all its parameters, or of one case."""

    part: str
    text: str
    trials: int = 0
    failed: list[str] = field(default_factory=list)
    """names of the cases that failed"""
    skipped: list[str] = field(default_factory=list)
    """reasons"""
    observed: list[str] = field(default_factory=list)
    """properties that a test has noted"""

    @property
    def outcome(self) -> str:
        if self.failed:
            return f"**failed**: {', '.join(self.failed)}"
        if self.skipped and not self.trials:
            return f"not tried: {self.skipped[0]}"
        return "as it should be"


class Recorder:
    """A plugin of pytest that notes what comes of each fault. by_case: each set of parameters is a fault of its own."""

    def __init__(self, trials: int = 1, by_case: bool = False) -> None:
        self.trials = trials
        self.by_case = by_case
        self.faults: dict[str, Fault] = {}
        self._trials_of_case: dict[str, int] = {}

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            repeats = "trials" in getattr(item, "fixturenames", ())
            self._trials_of_case[item.nodeid] = self.trials if repeats else 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        file, _, case = report.nodeid.partition("::")
        function, _, parameters = case.partition("[")
        text = sentence(function)
        if self.by_case and parameters:
            text += f": {parameters.rstrip(']')}"
        fault = self.faults.setdefault(f"{file}: {text}", Fault(part_of(file), text))
        fault.observed += [str(value) for name, value in report.user_properties if name == "observed"]
        if report.skipped:
            fault.skipped.append(skip_reason(report))
            return
        fault.trials += self._trials_of_case[report.nodeid]
        if report.failed:
            fault.failed.append(parameters.rstrip("]") or report.when)


def part_of(file: str) -> str:
    """Return the part of a test file: "launcher" for tests/faults/test_launcher.py."""
    return Path(file).stem.removeprefix("test_")


def sentence(function: str) -> str:
    """Return the name of a test function as words."""
    return function.removeprefix("test_").replace("_", " ")


def skip_reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""


def table(rows: Sequence[str]) -> str:
    return (
        "\n".join(["| part | fault, and the required outcome | trials | outcome |", "|---|---|--:|---|", *rows]) + "\n"
    )


def table_row(fault: Fault) -> str:
    return f"| {fault.part} | {fault.text} | {fault.trials} | {fault.outcome} |"


def rows_of_other_parts(page: Path, parts: Sequence[str]) -> list[str]:
    lines = page.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| part |")]
    return [row for row in rows if part_of_row(row) not in parts]


def part_of_row(row: str) -> str:
    return row.split("|")[1].strip()


def write_table(page: Path, content: str, begin: str = BEGIN, end: str = END) -> None:
    """Put a table between its marks in a page."""
    text = page.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(before + begin + content + end + after)


def main(arguments: Sequence[str]) -> int:
    """Run the parts that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3, help="of each fault that can be repeated")
    parts = sorted(part_of(file.name) for file in FOLDER.glob("test_*.py"))
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=", ".join(parts))
    options = parser.parse_args(arguments)
    tried = options.only or parts
    recorder = Recorder(options.trials)
    files = [str(FOLDER / f"test_{part}.py") for part in tried]
    status = int(
        pytest.main([*files, "-m", "exhaustive or not exhaustive", f"--trials={options.trials}"], plugins=[recorder])
    )
    rows = [table_row(fault) for fault in recorder.faults.values()]
    print(table(rows))
    all_rows = sorted(rows_of_other_parts(PAGE, tried) + rows, key=part_of_row)
    heading = f"`python tests/faults/run.py`, last on {date.today().isoformat()}, 2 CPU cores, gloo:\n\n"
    write_table(PAGE, heading + table(all_rows))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
