"""The joint fit: its equations, its bounds, its weights."""

import math
from pathlib import Path

import pytest

from evidence.folds import fitted_constants, joint_problem, timed_rows
from evidence.stacks import STACKS
from tests.evidence.tables import made, named, write_rows
from torchllm.tools.planner.calibration.fit import OF_A_MACHINE, PRIORS, SHARED, FitProblem, Point, Timed, fit, scatter
from torchllm.tools.planner.software import Constants


def our_rows(**constants: float) -> list[Timed]:
    return timed_rows(named(made(**constants), "ours/one"))


def slower(row: Timed, factor: float) -> Timed:
    return row._replace(seconds=row.seconds * factor)


def fitted_point(rows: list[Timed]) -> Point:
    """Return the logarithms of the constants fitted to some rows."""
    problem = joint_problem(rows)
    return fit(problem).point


def test_every_constant_has_a_prior_that_bounds_it() -> None:
    names = set(Constants.__dataclass_fields__)
    assert set(PRIORS) == names
    assert names == {*SHARED, "speed", "allocator"}
    assert set(OF_A_MACHINE) <= names
    all_constants = [Constants()]
    for software in STACKS.values():
        all_constants.append(software.constants)
    for name, prior in PRIORS.items():
        assert prior.low <= prior.middle <= prior.high
        for constants in all_constants:
            assert prior.low <= getattr(constants, name) <= prior.high, name
            # what differs between frameworks is a fact, or their speed and allocator
            assert name not in SHARED or getattr(constants, name) == getattr(Constants(), name), name


def test_no_fit_leaves_the_bounds() -> None:
    point = fitted_point(our_rows(speed=0.3))
    assert math.exp(point["ours"]) == pytest.approx(PRIORS["speed"].low)
    for name in SHARED:
        prior = PRIORS[name]
        value = math.exp(point[name])
        assert prior.low * (1 - 1e-9) <= value <= prior.high * (1 + 1e-9)


def test_a_large_fold_does_not_decide_alone() -> None:
    large = named(made(), "ours/large")
    small = named(made()[:2], "ours/small")
    counts = FitProblem(timed_rows(large + small), {}).counts()
    assert sum(counts[:18]) == pytest.approx(math.sqrt(18))
    assert sum(counts[18:]) == pytest.approx(math.sqrt(2))


def test_rows_that_scatter_say_less() -> None:
    """Half of the rows are slow and half are fast: the speed stays nearer to its prior than that of rows that agree."""
    torn, agreeing = [], []
    for number, row in enumerate(our_rows()):
        factor = 1.2 if number % 2 else 2.4
        torn.append(slower(row, factor))
        agreeing.append(slower(row, 1.2 * math.sqrt(2)))
    torn_point, agreeing_point = fitted_point(torn), fitted_point(agreeing)
    assert torn_point["ours"] > agreeing_point["ours"] + 0.05
    assert scatter([1.0, 1.0, 3.0]) == 0
    assert scatter([-1.0, 0.0, 1.0]) == 1


def test_an_odd_row_decides_nothing() -> None:
    """A run that waited for a time-out takes ten times as long as it should; the others are fitted as without it."""
    first, *usual = our_rows(speed=0.95)
    without_odd = fitted_point(usual)
    with_odd = fitted_point([slower(first, 10), *usual])
    assert with_odd["ours"] == pytest.approx(without_odd["ours"], abs=0.01)


def test_the_command_prints_the_constants(tmp_path: Path) -> None:
    first, *_ = made()
    write_rows(tmp_path / "rows.csv", [first])
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    printed = fitted_constants([str(tmp_path)])
    heading, *lines = printed.splitlines()
    assert heading.startswith("1 rows of 1 folds")
    assert [line.split()[0] for line in lines] == [*SHARED, "torchllm"]
    with pytest.raises(ValueError, match="no row of a known framework"):
        fitted_constants([str(tmp_path / "nothing")])
