"""Tries mutants of the sources: each must make a test fail, or be explained in explained.toml.

    python -m tests.mutants --count=200 --seed=0              goes on where it was interrupted
    python -m tests.mutants --minutes=10                      as many as ten minutes allow
    python -m tests.mutants --part=1/2                        every second one, beside another command with 2/2
    python -m tests.mutants --only=torchllm/parallel/ring.py  those of the sample in one file
    python -m tests.mutants --survivors                       lists them, and tries nothing
    python -m tests.mutants --again                           tries unexplained survivors and time-outs again
    python -m tests.mutants --everything                      tries unexplained survivors against all of `pytest`

Exit status 0: all are tried, and each is killed or explained.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.generate import Mutant, mutants_of, sample
from tests.mutants.relevant import EVERYTHING, ROOT, mutated_files, relevant_tests
from tests.mutants.results import (
    Explanation,
    Results,
    digest_of,
    is_explained,
    markdown_table,
    read_explanations,
    rows,
)
from tests.mutants.run import IMPORT, KILLED, SURVIVED, TIMED_OUT, copied_repository, run_tests, try_mutant

LIMIT = 600.0
"""seconds for the tests of one mutant: a hang is found by then"""
EVERYTHING_LIMIT = 3600.0


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return the sample of all mutants of all files."""
    mutants = []
    for file in mutated_files():
        mutants += mutants_of(file, (ROOT / file).read_text())
    return sample(mutants, count, seed)


def is_broken(copy: Path, test: str, results: Results) -> bool:
    """Return whether a test that has failed with a mutant fails without one, too; each test is tried once."""
    if test == IMPORT or (ROOT / test).is_file():  # a file that could not be collected
        return False
    test = test.partition("[")[0]  # all its cases: their names may have spaces, at which pytest's line was cut
    if digest_of(test) not in results.passing:
        if run_tests(copy, [test], LIMIT).outcome != SURVIVED:
            return True
        results.add_passing(digest_of(test))
    return False


def try_all(mutants: Sequence[Mutant], results: Results, arguments: argparse.Namespace) -> bool:
    """Try mutants until the minutes are over, and note the outcomes; return False if a test fails without any."""
    deadline = time.monotonic() + 60 * arguments.minutes
    limit = EVERYTHING_LIMIT if arguments.everything else arguments.limit
    with copied_repository() as copy:
        for mutant in mutants:
            if time.monotonic() > deadline:
                break
            tests = EVERYTHING if arguments.everything else relevant_tests(mutant.file)
            run = try_mutant(copy, mutant, tests, limit)
            if run.outcome == KILLED and is_broken(copy, run.failed_test, results):
                print(f"{run.failed_test} fails without a mutant")
                return False
            results.add_outcome(mutant, run)
            print(f"{run.outcome:9} {run.seconds:5.1f} s  {describe(mutant)}  {run.failed_test}", flush=True)
    return True


def stale_explanations() -> list[Explanation]:
    """Return the explanations of mutants that can no longer be made."""
    stale = []
    for explanation in read_explanations():
        mutants = mutants_of(explanation.file, (ROOT / explanation.file).read_text())
        if not any(explanation.explains(mutant) for mutant in mutants):
            stale.append(explanation)
    return stale


def describe(mutant: Mutant) -> str:
    """Return a mutant in one line."""
    return f"{mutant.file} {mutant.function}: {mutant.original}  ->  {mutant.mutated}"


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants of all files together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="FILE")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every n-th mutant, from the k-th on")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant later")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one mutant")
    parser.add_argument("--results", type=Path, default=ROOT / "mutants.jsonl")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--survivors", action="store_true")
    arguments = parser.parse_args()

    mutants = [mutant for mutant in drawn(arguments.count, arguments.seed) if arguments.only in mutant.file]
    part, parts = (int(number) for number in arguments.part.split("/"))
    mutants = mutants[part - 1 :: parts]
    results = Results(arguments.results)
    explanations = read_explanations()

    def is_unexplained(mutant: Mutant) -> bool:
        return results.outcome(mutant) == SURVIVED and not is_explained(mutant, explanations)

    if not arguments.survivors:
        to_try = [mutant for mutant in mutants if not results.outcome(mutant)]
        if arguments.again:
            to_try = [mutant for mutant in mutants if is_unexplained(mutant) or results.outcome(mutant) == TIMED_OUT]
        if arguments.everything:
            to_try = [mutant for mutant in mutants if is_unexplained(mutant)]
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # as Ctrl-C, it leaves no process
        if to_try and not try_all(to_try, results, arguments):
            return 1
    unexplained = [mutant for mutant in mutants if is_unexplained(mutant)]
    for mutant in unexplained:
        print(f"survives: {describe(mutant)}")
    for explanation in stale_explanations():
        print(f"explained.toml: no such mutant: {explanation.file}: {explanation.original}  ->  {explanation.mutated}")
    print(markdown_table(rows(mutants, results, explanations)))
    missing = sum(not results.outcome(mutant) for mutant in mutants)
    if missing:
        print(f"{missing} of {len(mutants)} mutants were not tried")
    return int(bool(unexplained or missing))


if __name__ == "__main__":
    sys.exit(main())
