"""Gloo groups of all ranks: what they cost does not grow with the ranks."""

import os
from unittest import mock

from tests.growth.host_groups import SetupCost, setup_cost
from tests.workers import run


def _costs(*ranks: int) -> list[SetupCost]:
    with mock.patch.dict(os.environ):
        return [setup_cost(count, lazy=True) for count in ranks]


def test_sockets_and_requests_of_a_rank_do_not_grow_with_the_ranks() -> None:
    [costs] = run(_costs, 1, 8, 16)
    for cost in costs:
        assert cost.sockets <= 8
        assert cost.requests <= 10
    assert costs[1].bytes < 1.2 * costs[0].bytes
