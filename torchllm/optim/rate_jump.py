"""Says where a resumed run does not go on at the learning rate of its checkpoint."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from torchllm.config import Schedule

logger = logging.getLogger(__name__)


def log_jump(
    learning_rate: Callable[[int], float],
    record: Mapping[str, Any],
    step: int,
    rate_of: Callable[[Schedule, float, int, int], float],
) -> None:
    """Log if the rate of `step` was another one by the config in `record`, of the checkpoint of that step.

    rate_of: (schedule, peak rate, steps, step) -> rate.
    """
    try:
        saved = record["config"]
        known = {key: value for key, value in saved["schedule"].items() if key in Schedule.__annotations__}
        rate = rate_of(Schedule(**known), saved["optimizer"]["learning_rate"], saved["training"]["steps"], step)
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
