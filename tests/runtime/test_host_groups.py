"""Gloo groups of all ranks: what they cost does not grow with the ranks."""

import os

import pytest

from recipes.benchmark.host_groups import SetupCost, setup_cost
from tests.workers import run


def _costs(*ranks: int, lazy: bool = True) -> list[SetupCost]:
    variable = os.environ.get("TORCH_GLOO_LAZY_INIT")
    try:
        return [setup_cost(count, lazy) for count in ranks]
    finally:
        os.environ.pop("TORCH_GLOO_LAZY_INIT")
        if variable is not None:
            os.environ["TORCH_GLOO_LAZY_INIT"] = variable


def test_sockets_and_requests_of_a_rank_do_not_grow_with_the_ranks() -> None:
    [costs] = run(_costs, 1, 8, 16)
    for cost in costs:
        assert cost.sockets <= 8
        assert cost.requests <= 10
    assert costs[1].bytes < 1.2 * costs[0].bytes


@pytest.mark.exhaustive
def test_the_setting_is_what_makes_the_difference() -> None:
    [[cost]] = run(_costs, 1, 16, lazy=False)
    assert cost.sockets >= 2 * 15
    assert cost.requests > 2 * 2 * 15
