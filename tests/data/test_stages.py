"""Stages of a mixture, in words."""

import pytest

from torchllm.data.stages import PlannedStage, describe_stages

pytestmark = pytest.mark.quick


def test_stages_in_words() -> None:
    stages = [PlannedStage(9, 72, (1.0, 0.0)), PlannedStage(0, 0, (0.5, 0.5))]
    assert describe_stages(stages) == "[1.0, 0.0] until step 9, [0.5, 0.5] to the end"
