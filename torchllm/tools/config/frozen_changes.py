"""State that a resumed run drops, or starts without, if its model.frozen differs from the checkpoint's.

Only such runs import this.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchllm.config.schema import Config
from torchllm.facts.shapes import parameter_shapes

logger = logging.getLogger(__name__)


def log_freezing(saved: Mapping[str, Any], config: Config) -> None:
    """Log the state dropped for newly frozen parameters, and the state that newly trained ones start without.

    saved: config of the checkpoint.
    """
    model, optimizer = config.model, config.optimizer
    before = replace(model, frozen=saved["model"].get("frozen", ""))
    names = parameter_shapes(model)
    frozen = sum(model.freezes(name) and not before.freezes(name) for name in names)
    thawed = sum(before.freezes(name) and not model.freezes(name) for name in names)
    has_state = optimizer.name != "sgd" or optimizer.momentum > 0
    has_average = optimizer.ema_decay > 0 and saved["optimizer"].get("ema_decay", 0.0) > 0
    if frozen and has_state:
        logger.info("the optimizer state of %d parameters is dropped: they are frozen now", frozen)
    if frozen and has_average:
        logger.info("the moving average of %d parameters is dropped: they are frozen now", frozen)
    if thawed and has_state:
        logger.info("%d parameters that were frozen start without optimizer state, as in a new run", thawed)
