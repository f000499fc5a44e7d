"""Days and price follow from the step time; failures add what they lose."""

import pytest

from torchllm.config.errors import UserError
from torchllm.tools.planner.search.price import Purchase, bill, failures_line


def test_without_failures() -> None:
    cost = bill(Purchase(tokens=1e9, dollars_per_gpu_hour=3), step_seconds=2.0, tokens_per_step=10**6, gpus=8)
    assert cost.days == pytest.approx(2000 / 86400)
    assert cost.gpu_hours == pytest.approx(2000 / 3600 * 8)
    assert cost.dollars == pytest.approx(3 * cost.gpu_hours)
    assert cost.lost == 0
    assert failures_line(Purchase(tokens=1e9)) == ""


def test_failures_lose_half_an_interval_and_the_restart_and_may_fail_again() -> None:
    """In 100 hours of training one expects 100 / (M - L) failures, each of which loses L hours."""
    purchase = Purchase(tokens=1e9, hours_between_failures=10, save_minutes=60, restart_minutes=30)
    assert purchase.lost_hours == 1
    cost = bill(purchase, step_seconds=360.0, tokens_per_step=10**6, gpus=8)
    assert cost.days * 24 == pytest.approx(100 + 100 / (10 - 1) * 1)
    assert cost.lost == pytest.approx(0.1)
    line = failures_line(purchase)
    assert "one per 10 hours loses 1 hours (half of 60 minutes between checkpoints, 30 to restart)" in line
    assert line.endswith("10.0% of the time.")
    often = Purchase(tokens=1e9, hours_between_failures=0.1)
    with pytest.raises(UserError, match=r"--mtbf-hours 0\.1: a failure loses 0\.417 hours"):
        bill(often, 1.0, 10**6, 8)
