"""Waits for data, the same figures on all ranks."""

from unittest import mock

import pytest
import torch.distributed as dist

from tests.tools.watch.test_step_profiler import FakeClock
from tests.workers import run
from torchllm.tools.watch import bottlenecks
from torchllm.tools.watch.bottlenecks import DataWait, DataWaitClock


def _waits(totals: list[list[float]]) -> list[DataWait]:
    """The longest waits at checkpoints 0.25 s apart; totals: of each checkpoint, by rank."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    clock = FakeClock()
    with mock.patch.object(bottlenecks, "time", clock):
        waits_clock = DataWaitClock(group)
        waits = []
        for by_rank in totals:
            clock.now += 0.25
            waits.append(waits_clock.longest(by_rank[dist.get_rank()]))
    return waits


def test_the_longest_wait_since_the_last_checkpoint_is_that_of_one_rank_on_all_ranks() -> None:
    waits, waits_of_rank_1 = run(_waits, 2, [[0.01, 0.05], [0.07, 0.06]])
    assert waits == waits_of_rank_1
    assert [wait.rank for wait in waits] == [1, 0]
    assert [wait.seconds for wait in waits] == pytest.approx([0.05, 0.06])
    assert [wait.elapsed for wait in waits] == [0.25, 0.25]
    assert waits[0].share == waits[0].seconds / 0.25
