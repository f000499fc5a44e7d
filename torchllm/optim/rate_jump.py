"""Says where a resumed run does not go on at the learning rate of its checkpoint."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torchllm.config import Config, Data, MixtureStage, Schedule, Training

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _known(kind: type[T], saved: Mapping[str, Any]) -> T:
    """Return a section of a config from the keys that this version knows."""
    return kind(**{key: value for key, value in saved.items() if key in kind.__annotations__})


def log_jump(
    learning_rate: Callable[[int], float],
    record: Mapping[str, Any],
    step: int,
    rate_of: Callable[[Schedule, float, int, int, Config], float],
) -> None:
    """Log if the rate of `step` was another one by the config in `record`, of the checkpoint of that step.

    rate_of: (schedule, peak rate, steps, step, config with their sizes) -> rate.
    """
    try:
        saved = record["config"]
        schedule, training = _known(Schedule, saved["schedule"]), _known(Training, saved["training"])
        stages = tuple(_known(MixtureStage, stage) for stage in saved["data"].get("stage", ()))
        sizes = Config(training=training, data=Data(stage=stages))
        rate = rate_of(schedule, saved["optimizer"]["learning_rate"], training.steps, step, sizes)
    except (KeyError, TypeError):  # no config, or one of a fork with another schedule
        return
    if not math.isclose(rate, learning_rate(step), rel_tol=0.01):
        logger.info(
            "the learning rate jumps from %.2e at step %d to %.2e: by the schedule of this run it would have been %.2e "
            "there",
            rate,
            step,
            learning_rate(step + 1),
            learning_rate(step),
        )
