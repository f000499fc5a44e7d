"""Learning-rate schedules: their values at the corners and their shapes between."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, get_args, get_type_hints

import pytest

from torchllm.config import Config, Data, Optimizer, Schedule, Training
from torchllm.config.schema import MixtureStage
from torchllm.optim.schedule import LearningRate

pytestmark = pytest.mark.quick
PEAK, STEPS, WARMUP = 3e-4, 100, 10
NAMES = get_args(get_type_hints(Schedule)["name"])
"""every schedule that a config may name"""


def rates(**settings: Any) -> list[float]:
    """The rates of steps 1 .. STEPS."""
    defaults = {"warmup_steps": WARMUP, "final_fraction": 0.1}
    schedule = Schedule(**{**defaults, **settings})
    rate = LearningRate(schedule, PEAK, STEPS)
    return [rate(step) for step in range(1, STEPS + 1)]


def nearly(rate: float) -> Any:
    """Equal but for the last bits of a float64."""
    return pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_corners_and_monotony(name: str) -> None:
    curve = rates(name=name)
    assert curve[0] == pytest.approx(PEAK / WARMUP)  # the first step already learns
    assert curve[WARMUP - 1] == PEAK
    last = PEAK if name == "constant" else 0.1 * PEAK
    assert curve[-1] == nearly(last)
    warming = curve[:WARMUP]
    rising = [PEAK * step / WARMUP for step in range(1, WARMUP + 1)]
    assert warming == pytest.approx(rising)
    decaying = curve[WARMUP - 1 :]
    assert decaying == sorted(decaying, reverse=True)
    assert max(curve) == PEAK
    assert min(curve) > 0


def test_shapes_half_way() -> None:
    cosine = rates(name="cosine")
    linear = rates(name="linear")
    middle = (WARMUP + STEPS) // 2 - 1  # index of the step half way between peak and end
    half_decayed = PEAK * (0.1 + 0.9 * 0.5)
    assert cosine[middle] == nearly(half_decayed)
    assert linear[middle] == nearly(half_decayed)
    third = WARMUP + (STEPS - WARMUP) // 3 - 1  # a third of the way
    assert cosine[third] == nearly(PEAK * (0.1 + 0.9 * 0.75))  # cos(60°) = 1/2
    assert linear[third] == nearly(PEAK * (0.1 + 0.9 * 2 / 3))


@pytest.mark.parametrize(
    ("decay", "shape"),
    [("linear", lambda share: 1 - share), ("1-sqrt", lambda share: 1 - math.sqrt(share))],
)
def test_wsd_is_constant_and_then_falls(decay: str, shape: Callable[[float], float]) -> None:
    """Equation of the work: 1 - sqrt((n - (N - N_decay)) / N_decay)."""
    for final in (0.0, 0.2):
        curve = rates(name="wsd", decay_steps=16, decay=decay, final_fraction=final)
        assert curve[WARMUP - 1 : 84] == [PEAK] * 75  # steps 10 .. 84
        falling = [PEAK * (final + (1 - final) * shape(step / 16)) for step in range(1, 17)]
        assert curve[84:] == pytest.approx(falling, abs=1e-18)
    assert rates(name="wsd", decay=decay) == rates(name="wsd", decay=decay, decay_steps=10)  # 0: a tenth of the steps


@pytest.mark.parametrize(
    ("steps", "warmup", "last_rates"),
    [
        (9, 0, [1, 1, 0]),  # a tenth of the steps is none, but the last rate is the final one
        (100, 95, [5 / 5, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0]),  # what is left after the warmup decays, without a jump
    ],
)
def test_wsd_of_short_decays(steps: int, warmup: int, last_rates: list[float]) -> None:
    rate = LearningRate(Schedule(name="wsd", warmup_steps=warmup, final_fraction=0.0), PEAK, steps)
    last = range(steps - len(last_rates) + 1, steps + 1)
    assert [rate(step) / PEAK for step in last] == pytest.approx(last_rates)


def test_by_tokens_a_step_counts_for_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1 to 40 have 4 x 16 tokens, 41 to 100 have 8 x 32: of 17,920 tokens, 179.2 to an average step."""
    stages = (MixtureStage(until=40), MixtureStage(global_batch_size=8, sequence_length=32))
    training = Training(steps=STEPS, global_batch_size=4, sequence_length=16)
    config = Config(training=training, data=Data(stage=stages))
    monkeypatch.setattr("torchllm.optim.schedule.config_in_use", lambda: config)
    rate = LearningRate(Schedule(name="linear", warmup_steps=WARMUP, by_tokens=True), PEAK, STEPS)
    tokens = [64 * min(step, 40) + 256 * max(0, step - 40) for step in range(1, STEPS + 1)]
    by_steps = LearningRate(Schedule(name="linear", warmup_steps=WARMUP), PEAK, STEPS)
    assert rate(1) == nearly(PEAK / WARMUP * 64 / 179.2)
    assert rate(28) == nearly(PEAK)  # 1,792 tokens are ten average steps
    assert rate(STEPS) == by_steps(STEPS)
    decayed = [(token - 1792) / (tokens[-1] - 1792) for token in tokens[28:]]
    assert [rate(step) for step in range(29, STEPS + 1)] == [nearly(PEAK * (1 - 0.9 * share)) for share in decayed]


def test_by_tokens_steps_of_one_size_have_the_rates_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(training=Training(steps=STEPS, global_batch_size=3, sequence_length=7))
    monkeypatch.setattr("torchllm.optim.schedule.config_in_use", lambda: config)
    for name in NAMES:
        assert rates(name=name, by_tokens=True) == rates(name=name)


def test_edges_of_the_warmup() -> None:
    for name, warmup in (("cosine", 0), ("linear", 1), ("wsd", STEPS)):
        curve = rates(name=name, warmup_steps=warmup)
        first_step_at_peak = max(warmup, 1)
        assert curve[first_step_at_peak - 1] == pytest.approx(PEAK, rel=0.02)  # without one, step 1 is one down
        assert curve[-1] == pytest.approx(PEAK if warmup == STEPS else 0.1 * PEAK)


def test_one_step_and_steps_past_the_end_are_finite() -> None:
    for name in NAMES:
        schedule = Schedule(name=name)
        assert math.isfinite(LearningRate(schedule, PEAK, 1)(1)), name
        rate = LearningRate(schedule, PEAK, STEPS)
        assert rate(STEPS + 50) == rate(STEPS), name


@pytest.mark.parametrize(
    ("steps", "schedule", "line"),
    [
        (6, Schedule(name="linear", warmup_steps=6), "jumps from 3.00e-04 at step 6 to 2.62e-04: "),
        (6, Schedule(name="constant", warmup_steps=0), ""),
        (8, Schedule(name="linear", warmup_steps=8), ""),
    ],
)
def test_a_run_whose_rate_does_not_go_on_says_so(
    steps: int, schedule: Schedule, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps and warm-up of a first try are cut to 6; the run goes on to 8, with a warm-up of 8 or without one."""
    saved = Config(training=Training(steps=steps), optimizer=Optimizer(learning_rate=PEAK), schedule=schedule)
    record = {"config": json.loads(json.dumps(asdict(saved)))}
    now = replace(schedule, warmup_steps=min(schedule.warmup_steps, 8) and 8)
    with caplog.at_level("INFO"):
        LearningRate(now, PEAK, 8).log_jump(record, 6)
        LearningRate(now, PEAK, 8).log_jump({}, 6)  # of a checkpoint without a config
        record["config"]["schedule"]["name"] = "of a fork"
        LearningRate(now, PEAK, 8).log_jump(record, 6)
    assert (line in caplog.text) if line else caplog.text == ""


def test_a_rate_by_tokens_jumps_where_a_later_stage_has_another_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def config_of(batch: int) -> Config:
        stages = (MixtureStage(until=50), MixtureStage(global_batch_size=batch))
        schedule = Schedule(name="linear", by_tokens=True)
        optimizer = Optimizer(learning_rate=PEAK)
        training = Training(steps=STEPS, global_batch_size=4)
        return Config(training=training, data=Data(stage=stages), schedule=schedule, optimizer=optimizer)

    record = {"config": json.loads(json.dumps(asdict(config_of(8))))}
    with caplog.at_level("INFO"):
        for batch, count in ((8, 0), (32, 1)):
            config = config_of(batch)
            monkeypatch.setattr("torchllm.optim.schedule.config_in_use", lambda config=config: config)
            LearningRate(config.schedule, PEAK, STEPS).log_jump(record, 60)
            assert caplog.text.count("the learning rate jumps") == count
