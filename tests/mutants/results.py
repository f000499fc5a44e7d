"""What became of the mutants: a file of JSON lines, the explanations of survivors, and a table of both."""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants.generate import Mutant
from tests.mutants.relevant import ROOT
from tests.mutants.run import KILLED, SURVIVED, TIMED_OUT, TestRun

EXPLAINED = Path(__file__).with_name("explained.toml")


class Explanation(NamedTuple):
    """Why no test needs to see a mutant."""

    file: str
    original: str
    mutated: str
    reason: str

    def explains(self, mutant: Mutant) -> bool:
        """Return whether it is of this mutant; where in its file that is, does not matter."""
        return (self.file, self.original, self.mutated) == (mutant.file, mutant.original, mutant.mutated)


def read_explanations(file: Path = EXPLAINED) -> list[Explanation]:
    """Read all explanations."""
    return [Explanation(**entry) for entry in tomllib.loads(file.read_text()).get("survivor", [])]


class Results:
    """The results file; a line that comes later replaces an earlier one of the same mutant."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[str, dict[str, Any]] = {}
        """last record of each mutant, by its key"""
        self.passing: set[str] = set()
        """digests of tests that pass without a mutant"""
        for line in file.read_text().splitlines() if file.exists() else ():
            record = json.loads(line)
            if "passes" in record:
                self.passing.add(record["passes"])
            else:
                self.outcomes[record["key"]] = record

    def add_outcome(self, mutant: Mutant, run: TestRun) -> None:
        """Note what became of a mutant."""
        record = {
            "key": mutant.key,
            "file": mutant.file,
            "function": mutant.function,
            "kind": mutant.kind,
            "original": mutant.original,
            "mutated": mutant.mutated,
            "outcome": run.outcome,
            "by": run.failed_test,
            "seconds": round(run.seconds, 1),
        }
        self.outcomes[mutant.key] = record
        self._append(record)

    def add_passing(self, digest: str) -> None:
        """Note that tests pass without a mutant."""
        self.passing.add(digest)
        self._append({"passes": digest})

    def outcome(self, mutant: Mutant) -> str:
        """Return what became of a mutant; empty: it was not tried."""
        return self.outcomes.get(mutant.key, {}).get("outcome", "")

    def _append(self, record: Mapping[str, Any]) -> None:
        with self.file.open("a") as file:  # one write of one line: several commands may share the file
            file.write(json.dumps(record) + "\n")


def digest_of(test: str) -> str:
    """Return what changes when the file of a test changes."""
    text = (ROOT / test.partition("::")[0]).read_bytes()
    return hashlib.sha256(test.encode() + b"\0" + text).hexdigest()[:12]


class Row(NamedTuple):
    """A row of the table."""

    place: str
    mutants: int
    killed: int
    timed_out: int
    survived: int
    explained: int


def room_of(file: str) -> str:
    """Return a row's place: the folder of a file of the library, or the recipe."""
    return str(Path(file).parent) if file.startswith("torchllm/") else file


def rows(mutants: Sequence[Mutant], results: Results, explanations: Sequence[Explanation]) -> list[Row]:
    """Return a row for each room, of the mutants that were tried, and one for all."""
    tried = [mutant for mutant in mutants if results.outcome(mutant)]
    by_room: dict[str, list[Mutant]] = {}
    for mutant in sorted(tried, key=lambda mutant: mutant.file):
        by_room.setdefault(room_of(mutant.file), []).append(mutant)
    by_room["all"] = tried
    table = []
    for room, of_room in by_room.items():
        outcomes = [results.outcome(mutant) for mutant in of_room]
        survivors = [mutant for mutant in of_room if results.outcome(mutant) == SURVIVED]
        explained = [mutant for mutant in survivors if is_explained(mutant, explanations)]
        counts = [outcomes.count(outcome) for outcome in (KILLED, TIMED_OUT, SURVIVED)]
        table.append(Row(room, len(of_room), *counts, len(explained)))
    return table


def is_explained(mutant: Mutant, explanations: Iterable[Explanation]) -> bool:
    """Return whether a mutant is explained."""
    return any(explanation.explains(mutant) for explanation in explanations)


def markdown_table(table: Sequence[Row]) -> str:
    """Return rows as a table."""
    lines = ["| | mutants | killed | timed out | survived | of these explained |", "| --- |" + " --: |" * 5]
    for row in table:
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)
