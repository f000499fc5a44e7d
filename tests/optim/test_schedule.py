"""Learning-rate schedules: their values at the corners and their shapes between."""

import math
from typing import Any

import pytest

from torchllm.config import Schedule
from torchllm.optim.schedule import LearningRate

PEAK, STEPS, WARMUP = 3e-4, 100, 10


def rates(**settings: Any) -> list[float]:
    """The rates of steps 1 .. STEPS."""
    schedule = Schedule(**{"warmup_steps": WARMUP, "final_fraction": 0.1, **settings})
    rate = LearningRate(schedule, PEAK, STEPS)
    return [rate(step) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_corners_and_monotony(name: str) -> None:
    curve = rates(name=name)
    assert curve[0] == pytest.approx(PEAK / WARMUP)  # the first step already learns
    assert curve[WARMUP - 1] == PEAK
    assert curve[-1] == pytest.approx(PEAK if name == "constant" else 0.1 * PEAK, rel=1e-12)
    warming, decaying = curve[:WARMUP], curve[WARMUP - 1 :]
    assert warming == pytest.approx([PEAK * step / WARMUP for step in range(1, WARMUP + 1)])
    assert decaying == sorted(decaying, reverse=True)
    assert max(curve) == PEAK
    assert min(curve) > 0


def test_shapes_half_way() -> None:
    middle = (WARMUP + STEPS) // 2 - 1  # index of the step half way between peak and end
    for name in ("cosine", "linear"):
        assert rates(name=name)[middle] == pytest.approx(PEAK * (0.1 + 0.9 * 0.5), rel=1e-12)
    quarter = WARMUP + (STEPS - WARMUP) // 3 - 1
    assert rates(name="cosine")[quarter] == pytest.approx(PEAK * (0.1 + 0.9 * 0.75), rel=1e-12)  # cos(60°) = 1/2
    assert rates(name="linear")[quarter] == pytest.approx(PEAK * (0.1 + 0.9 * 2 / 3), rel=1e-12)


def test_wsd_is_constant_and_then_falls_linearly() -> None:
    curve = rates(name="wsd", decay_steps=20, final_fraction=0.0)
    assert curve[WARMUP - 1 : 80] == [PEAK] * 71  # steps 10 .. 80
    assert curve[80:] == pytest.approx([PEAK * (1 - step / 20) for step in range(1, 21)], abs=1e-18)
    assert rates(name="wsd")[:90] == rates(name="wsd", decay_steps=10)[:90]  # 0: a tenth
    assert rates(name="wsd")[90] < PEAK


def test_wsd_whose_warmup_reaches_into_the_decay_does_not_jump() -> None:
    """warmup 95 of 100 and the default decay of 10: what is left after the warmup decays."""
    rate = LearningRate(Schedule(name="wsd", warmup_steps=95, final_fraction=0.0), PEAK, 100)
    assert [rate(step) for step in range(95, 101)] == pytest.approx([PEAK * x / 5 for x in (5, 4, 3, 2, 1, 0)])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, STEPS])
def test_edges_of_the_warmup(name: str, warmup: int) -> None:
    curve = rates(name=name, warmup_steps=warmup)
    assert curve[max(warmup, 1) - 1] == pytest.approx(PEAK, rel=0.02)  # without a warmup step 1 is already one down
    assert curve[-1] == pytest.approx(PEAK if warmup == STEPS else 0.1 * PEAK)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_one_step_and_steps_past_the_end_are_finite(name: str) -> None:
    rate = LearningRate(Schedule(name=name), PEAK, 1)  # type: ignore[arg-type]
    assert math.isfinite(rate(1))
    past = LearningRate(Schedule(name=name), PEAK, STEPS)  # type: ignore[arg-type]
    assert past(STEPS + 50) == past(STEPS)
