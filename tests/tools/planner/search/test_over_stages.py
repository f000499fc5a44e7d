"""Layouts for stages of several sizes, beside an enumeration of all."""

from dataclasses import replace

import pytest

from tests.tools.planner.search.test_enumeration import random_job, written_layouts
from torchllm.config import Config, Data, MixtureStage, Training
from torchllm.config.errors import UserError
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.advice import within_risk
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.over_stages import StageJob, fastest_over_stages, stage_jobs

SIZES = ((2, 2048, 100), (4, 512, 30))
"""sequences, tokens and steps of two stages"""


def stages_of(job: Job) -> list[StageJob]:
    stages = []
    for batch, length, steps in SIZES:
        training = Training(global_batch_size=batch, sequence_length=length)
        of_stage = replace(job, training=training)
        stages.append(StageJob(f"of {length}", steps, of_stage, within_risk(of_stage)))
    return stages


def enumerated(stages: list[StageJob]) -> dict[Layout, float]:
    """Return the seconds of each layout that all stages can have."""
    seconds = {}
    for layout in written_layouts(stages[1].job):  # a larger batch: it has all micro batches of the other
        if all(stage.limited.accepts(layout) for stage in stages):
            predictions = [predict(stage.limited.case(layout)) for stage in stages]
            if all(prediction.fits for prediction in predictions):
                times = [stage.steps * prediction.step for stage, prediction in zip(stages, predictions, strict=True)]
                seconds[layout] = sum(times)
    return seconds


@pytest.mark.parametrize(
    "seed", [1, 6, 8, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(40, 70))]
)
def test_the_fastest_over_all_stages_is_found(seed: int) -> None:
    stages = stages_of(random_job(seed))
    expected = enumerated(stages)
    if not expected:
        with pytest.raises(UserError):
            fastest_over_stages(stages)
        return
    found = fastest_over_stages(stages)
    assert found.seconds == pytest.approx(expected[found.layout])
    assert found.seconds <= 1.01 * min(expected.values())  # twins are left out


def test_stages_have_the_steps_between_their_ends() -> None:
    stages = (
        MixtureStage(until=100, global_batch_size=2),
        MixtureStage(until_tokens=100 * 2 * 2048 + 50 * 4 * 512, global_batch_size=4, sequence_length=512),
        MixtureStage(until=900),
    )
    config = Config(data=Data(stage=stages), training=Training(steps=400, global_batch_size=8, sequence_length=2048))
    found = stage_jobs(config, random_job(1))
    sizes = [(job.training.global_batch_size, job.training.sequence_length) for _, _, job, _ in found]
    assert [(key, steps) for key, steps, *_ in found] == [
        ("data.stage.0", 100),
        ("data.stage.1", 50),
        ("data.stage.2", 250),
    ]
    assert sizes == [(2, 2048), (4, 512), (8, 2048)]


def test_a_stage_that_fits_nowhere_is_named() -> None:
    job = random_job(1)
    small = replace(job, hardware=replace(job.hardware, memory=1e8))
    with pytest.raises(UserError, match=r"^of 2048: no layout fits in the "):
        fastest_over_stages(stages_of(small))
