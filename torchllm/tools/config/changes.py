"""Log how a run's config differs from the checkpoint's that it resumes from."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torchllm.config.schema import Config
from torchllm.optim.schedule import LearningRate

logger = logging.getLogger(__name__)


def log_config_changes(
    record: Mapping[str, Any], config: Config, *, learning_rate: Callable[[int], float] | None = None, step: int = 0
) -> None:
    """Log every key that differs from the config in `record`, the record of the checkpoint that a run resumes from.

    learning_rate: also log if it jumps at `step`, of the checkpoint; a plain function does not know its earlier rate.

    UserError if the low-rank updates of the checkpoint were trained on other frozen weights.
    """
    if "config" not in record:
        return
    from torchllm.tools.config.compare import config_changes, refuse_other_frozen_weights  # of no use to a fresh run

    changes = config_changes(record["config"], config)
    refuse_other_frozen_weights(changes, config)
    if changes:
        listed = "\n  ".join(map(str, changes))
        logger.info("the config is not the checkpoint's in %d key(s):\n  %s", len(changes), listed)
    for change in changes:
        if change.key == "model.frozen":
            from torchllm.tools.config.frozen_changes import log_freezing  # of no use to other runs

            log_freezing(record["config"], config)
        if change.changes_function:
            logger.warning(
                "%s changes the function of the model, though all tensors fit; to keep it, %s", change.key, change.undo
            )
    if isinstance(learning_rate, LearningRate):
        learning_rate.log_jump(record, step)
