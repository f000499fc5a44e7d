"""Which step of a training a dry run looks at."""

import pytest

from torchllm.config import Config, Data, MixtureStage, Training
from torchllm.tools.dry_run.run import largest_stage
from torchllm.tools.proof.layouts import with_settings

STAGES = (
    MixtureStage(until=5, sequence_length=16),
    MixtureStage(until=9, sequence_length=64, global_batch_size=2),
    MixtureStage(sequence_length=64, global_batch_size=4),
)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "data.stage.2"),
        ({"parallel.pp": 2}, "data.stage.2"),
        ({"parallel.schedule": "GPipe"}, "data.stage.2"),
        ({"parallel.schedule": "GPipe", "parallel.pp": 2}, "data.stage.0"),  # 512 tokens at once, not 256
        ({"parallel.schedule": "GPipe", "parallel.pp": 2, "data.stage": ()}, "training"),
    ],
)
def test_the_stage_whose_steps_need_most_memory_is_traced(settings: dict[str, object], key: str) -> None:
    config = Config(data=Data(stage=STAGES), training=Training(global_batch_size=32, sequence_length=32))
    assert largest_stage(with_settings(config, settings)).key == key
