"""Of many cases of a test `pytest` runs a sample, which has every value of every axis; `-m every_run` has the rest."""

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


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
