"""The joint fit: its equations, its bounds, its weights."""

import math
from pathlib import Path

import pytest

from tests.planner.evidence.test_calibrate import made
from tests.planner.evidence.test_cross_validation import named
from torchllm.planner.evidence.fit import (
    SHARED,
    FitProblem,
    fit,
    fitted_constants,
    joint_problem,
    scatter,
    solve,
    timed_rows,
)
from torchllm.planner.evidence.stacks import STACKS
from torchllm.spec.software import OF_A_MACHINE, PRIORS, Constants


def test_equations_are_solved() -> None:
    matrix = [[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]]
    right = [1.0, -2.0, 3.0]
    solution = solve(matrix, right)
    for row, value in zip(matrix, right, strict=True):
        assert sum(a * b for a, b in zip(row, solution, strict=True)) == pytest.approx(value)


def test_every_constant_has_a_prior_that_bounds_it() -> None:
    assert set(PRIORS) == set(Constants.__dataclass_fields__) == {*SHARED, "speed", "allocator"}
    assert set(OF_A_MACHINE) <= set(PRIORS)
    for constants in [Constants(), *(software.constants for software in STACKS.values())]:
        for name, prior in PRIORS.items():
            assert prior.low <= getattr(constants, name) <= prior.high, name
            assert prior.low <= prior.middle <= prior.high


def test_a_framework_has_no_constants_of_its_own_but_two() -> None:
    """The others are shared by all: what differs between frameworks is a fact, or their speed and allocator."""
    for software in STACKS.values():
        assert {getattr(software.constants, name) for name in SHARED} == {getattr(Constants(), name) for name in SHARED}


def test_two_speeds_are_told_apart() -> None:
    rows = timed_rows(named(made(speed=0.9), "slow/one") + named(made(speed=1.1), "fast/one"))
    point = fit(joint_problem(rows)).point
    assert math.exp(point["fast"] - point["slow"]) == pytest.approx(
        1.1 / 0.9, rel=0.03
    )  # priors hold them together a little


def test_no_fit_leaves_the_bounds() -> None:
    rows = timed_rows(named(made(speed=0.3), "ours/one"))
    near = fit(joint_problem(rows))
    assert math.exp(near.point["ours"]) == pytest.approx(PRIORS["speed"].low)
    for name in SHARED:
        assert PRIORS[name].low * (1 - 1e-9) <= math.exp(near.point[name]) <= PRIORS[name].high * (1 + 1e-9)


def test_a_large_fold_does_not_decide_alone() -> None:
    rows = timed_rows(named(made(), "ours/large") + named(made()[:2], "ours/small"))
    counts = FitProblem(rows, {}).counts()
    assert sum(counts[:18]) == pytest.approx(math.sqrt(18))
    assert sum(counts[18:]) == pytest.approx(math.sqrt(2))


def test_rows_that_scatter_say_less() -> None:
    """Half of the rows are slow and half are fast: the speed stays nearer to its prior than that of rows that agree."""
    rows = timed_rows(named(made(), "ours/one"))
    torn, agreeing = [], []
    for number, row in enumerate(rows):
        torn.append(row._replace(seconds=row.seconds * (1.2 if number % 2 else 2.4)))
        agreeing.append(row._replace(seconds=row.seconds * 1.2 * math.sqrt(2)))
    assert fit(joint_problem(torn)).point["ours"] > fit(joint_problem(agreeing)).point["ours"] + 0.05
    assert scatter([1.0, 1.0, 3.0]) == 0
    assert scatter([-1.0, 0.0, 1.0]) == 1


def test_an_odd_row_decides_nothing() -> None:
    """A run that waited for a time-out takes ten times as long as it should; the others are fitted as without it."""
    rows = timed_rows(named(made(speed=0.95), "ours/one"))
    odd = rows[0]._replace(seconds=10 * rows[0].seconds)
    without, with_odd = (fit(joint_problem(chosen)).point["ours"] for chosen in (rows[1:], [odd, *rows[1:]]))
    assert with_odd == pytest.approx(without, abs=0.01)


def test_rows_of_unknown_frameworks_are_not_fitted() -> None:
    (first, *_) = made()
    assert not timed_rows([first._replace(cells={**first.cells, "stack": "somebody's"})])


def test_the_command_prints_the_constants(tmp_path: Path) -> None:
    (first, *_) = made()
    (tmp_path / "rows.csv").write_text(f"{','.join(first.cells)}\n{','.join(first.cells.values())}\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    printed = fitted_constants([str(tmp_path)]).splitlines()
    assert printed[0].startswith("1 rows of 1 folds")
    assert [line.split()[0] for line in printed[1:]] == [*SHARED, "torchllm"]
    with pytest.raises(ValueError, match="no row of a known framework"):
        fitted_constants([str(tmp_path / "nothing")])
