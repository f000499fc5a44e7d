"""Of many cases of a test `pytest` runs a sample, which has every value of every axis; `-m every_run` has the rest.

Of cases that stand each for itself, it runs a part: each commit another one.
"""

import itertools
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from tests.tiny_run import ROOT

Case = TypeVar("Case")


def sampled(names: Iterable[str], sample: Collection[str]) -> list[Any]:
    """Return the parameters of a test with a case per name. ValueError if the sample has a name that is none."""
    cases = list(names)
    if unknown := set(sample).difference(cases):
        raise ValueError(f"no such case: {sorted(unknown)}")
    return [name if name in sample else pytest.param(name, marks=pytest.mark.every_run) for name in cases]


def combinations(*axes: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a test with a case per combination of a value of each axis, which has values by name.

    The sample is as small as one can be: the i-th values of all axes, for each i, where the shorter ones begin again.
    """
    names = [list(axis) for axis in axes]
    count = max(map(len, names))
    sample = {tuple(axis[i % len(axis)] for axis in names) for i in range(count)}
    cases = []
    for combination in itertools.product(*names):
        marks = [] if combination in sample else [pytest.mark.every_run]
        values = [axis[name] for axis, name in zip(axes, combination, strict=True)]
        cases.append(pytest.param(*values, id="-".join(combination), marks=marks))
    return cases


def part_of_commit(commit: str, parts: int) -> int:
    """Return which part a commit has: the same one each time, so that a failure can be seen again.

    commit: its hexadecimal name; "" outside of a checkout, which always has the first part.
    """
    return int(commit or "0", 16) % parts


def current_commit() -> str:
    """Return the hexadecimal name of the commit that is checked out, "" outside of a checkout."""
    try:
        command = ["git", "rev-parse", "--verify", "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def part_of(cases: Sequence[Case], parts: int) -> Sequence[Case]:
    """Return every `parts`-th case, others at each commit."""
    return cases[part_of_commit(current_commit(), parts) :: parts]


def one_part(cases: Sequence[Any], parts: int) -> list[Any]:
    """Return the parameters of a test of which `pytest` runs every `parts`-th case, another part at each commit."""
    part = part_of(range(len(cases)), parts)
    parameters = []
    for index, case in enumerate(cases):
        marks = [] if index in part else [pytest.mark.every_run]
        parameters.append(pytest.param(case, marks=marks))
    return parameters
