"""The table of residuals: classes of rows, the share above a value, and the table that ships."""

from dataclasses import replace

import pytest

from evidence.write_residuals import SHOWN_FROM
from tests.tools.planner.test_predict import case
from torchllm.tools.planner.residuals import (
    ANY,
    LEVELS,
    NATIVE,
    RowClass,
    Spread,
    added_axes,
    classes_of_pair,
    read_spreads,
)
from torchllm.tools.planner.step_errors import KNOWLEDGE

EVEN = tuple(2 * level - 1 for level in LEVELS)
"""quantiles of values spread evenly from -1 to 1"""
EVERYTHING = RowClass(ANY, ANY, ANY)
RATIO = "ratio of two layouts"


def test_pairs_have_the_added_axes_first() -> None:
    first, *_, last = classes_of_pair(case(), case(tp=2, pp=2))
    assert first == RowClass(NATIVE, "+tp+pp", ANY)
    assert last == EVERYTHING
    sparse = replace(case(), model=replace(case().model, experts=8))
    expert_parallel = replace(sparse, parallel=replace(sparse.parallel, ep=2))
    assert added_axes(sparse, expert_parallel) == "+ep"
    assert added_axes(case(tp=2), case(tp=4)) == "the same"
    assert added_axes(case(tp=2), case(pp=2, tp=2)) == "+pp"
    assert added_axes(case(), case(pp=2, tp=2)) == "+tp+pp"


def test_the_share_above() -> None:
    spread = Spread("peak memory", "fold", EVERYTHING, rows=100, folds=5, quantiles=EVEN)
    for value in (-0.85, -0.3, 0.0, 0.4, 0.89):
        assert spread.share_above(value) == pytest.approx((1 - value) / 2)
    assert spread.share_above(EVEN[-1]) == pytest.approx(0.05)
    assert spread.share_above(EVEN[0]) == pytest.approx(0.95)
    assert 0 < spread.share_above(2.0) < 0.01
    assert spread.mean == pytest.approx(0, abs=1e-12)
    constant = spread._replace(quantiles=(0.1,) * len(LEVELS))
    assert constant.share_above(0.2) < 1e-6
    assert constant.share_above(0.0) > 0.999999


def test_what_ships_has_a_class_for_everything_and_none_of_few_rows() -> None:
    table = read_spreads()
    for knowledge in KNOWLEDGE:
        assert (RATIO, knowledge, EVERYTHING) in table
    for spread in table.values():
        assert spread.rows >= SHOWN_FROM
        assert list(spread.quantiles) == sorted(spread.quantiles)
