"""Tries mutants of the sources: each must make a test fail, or be explained in explained.toml.

    python -m tests.mutants --count=200 --seed=0              goes on where it was interrupted
    python -m tests.mutants --minutes=10                      as many as ten minutes allow
    python -m tests.mutants --part=1/2                        every second one, beside another command with 2/2
    python -m tests.mutants --only=torchllm/parallel/ring.py  those of the sample in one file
    python -m tests.mutants --survivors                       lists them, and tries nothing
    python -m tests.mutants --again                           tries unexplained survivors and time-outs again

Exit status 0: all are tried, and each is killed or explained.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.generate import Mutant, mutants_of, sample
from tests.mutants.relevant import ROOT, mutated_files, relevant_tests
from tests.mutants.results import Results, digest_of, is_explained, markdown_table, read_explanations, rows
from tests.mutants.run import SURVIVED, TIMED_OUT, copied_repository, run_tests, try_mutant

LIMIT = 240.0
"""seconds for the tests of one mutant: a hang is found by then"""
UNMUTATED_LIMIT = 3600.0


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return the sample of all mutants of all files."""
    mutants = []
    for file in mutated_files():
        mutants += mutants_of(file, (ROOT / file).read_text())
    return sample(mutants, count, seed)


def check_tests(copy: Path, mutants: Sequence[Mutant], results: Results) -> bool:
    """Run the tests without a mutant, but those that have passed before; return whether all pass."""
    tests = {test for mutant in mutants for test in relevant_tests(mutant.file)}
    new = [test for test in sorted(tests) if digest_of(test) not in results.passing]
    if not new:
        return True
    print(f"{len(new)} tests or files of tests, without a mutant", flush=True)
    run = run_tests(copy, new, UNMUTATED_LIMIT)
    if run.outcome != SURVIVED:
        print(f"{run.failed_test} fails without a mutant")
        return False
    for test in new:
        results.add_passing(digest_of(test))
    return True


def try_all(mutants: Sequence[Mutant], results: Results, limit: float, minutes: float) -> bool:
    """Try mutants until `minutes` are over, and note what became of each; return False if tests fail without any."""
    deadline = time.monotonic() + 60 * minutes
    with copied_repository() as copy:
        if not check_tests(copy, mutants, results):
            return False
        for mutant in mutants:
            if time.monotonic() > deadline:
                break
            run = try_mutant(copy, mutant, relevant_tests(mutant.file), limit)
            results.add_outcome(mutant, run)
            print(f"{run.outcome:9} {run.seconds:5.1f} s  {describe(mutant)}  {run.failed_test}", flush=True)
    return True


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
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # as Ctrl-C, it leaves no process
        if to_try and not try_all(to_try, results, arguments.limit, arguments.minutes):
            return 1
    unexplained = [mutant for mutant in mutants if is_unexplained(mutant)]
    for mutant in unexplained:
        print(f"survives: {describe(mutant)}")
    print(markdown_table(rows(mutants, results, explanations)))
    missing = sum(not results.outcome(mutant) for mutant in mutants)
    if missing:
        print(f"{missing} of {len(mutants)} mutants were not tried")
    return int(bool(unexplained or missing))


if __name__ == "__main__":
    sys.exit(main())
