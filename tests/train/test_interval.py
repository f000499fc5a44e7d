"""What is done every so many steps, and at the last one."""

import pytest

from torchllm.train.interval import due

pytestmark = pytest.mark.quick


def test_it_is_done_every_interval_and_at_the_last_step() -> None:
    assert [step for step in range(1, 12) if due(step, 4, 11)] == [4, 8, 11]
    assert [step for step in range(1, 5) if due(step, 1, 4)] == [1, 2, 3, 4]


def test_an_interval_of_0_is_never() -> None:
    assert not any(due(step, 0, 4) for step in range(1, 5))
