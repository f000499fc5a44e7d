"""The learning rate as a pure function of the step number: there is no state to save or restore."""

import math
from collections.abc import Mapping
from typing import Any

from torchllm.config import Config, Schedule
from torchllm.config.applied_keys import applied, config_in_use
from torchllm.config.stages import span_of, spans_of


class LearningRate:
    """Computes the rate of steps 1 to `steps`: a linear warm-up to `peak`, then the decay of `schedule.name`.

    Step `warmup_steps` has the peak rate; the last step has `final_fraction` of it ("constant": the peak).
    "wsd" (warm-up, stable, decay) stays at the peak until the last `decay_steps` steps, by default a tenth of the run.
    There it falls linearly, or as 1 - sqrt(share of the decay that is done) (Hägele et al. 2024, arXiv 2405.18392).
    With `schedule.by_tokens` steps are weighted by their tokens, which follow from the stages of the config.
    """

    def __init__(self, schedule: Schedule, peak: float, steps: int) -> None:
        applied("schedule", schedule)
        self.schedule = schedule
        self.peak = peak
        self.steps = steps

    def __call__(self, step: int) -> float:
        """Return the rate of a step, counted from 1."""
        return rate_of(self.schedule, self.peak, self.steps, step)

    def log_jump(self, record: Mapping[str, Any], step: int) -> None:
        """Log if a resumed run does not continue at its checkpoint's rate because its schedule differs.

        record: record of the checkpoint of `step`, which has the config.
        """
        from torchllm.optim.rate_jump import log_jump  # of no use to a fresh run

        log_jump(self, record, step, rate_of)


def rate_of(schedule: Schedule, peak: float, steps: int, step: int, sizes: Config | None = None) -> float:
    """Return the rate of a step, counted from 1, of a run of `steps` steps. sizes: of its steps; None: this run's."""
    position: float = step
    if schedule.by_tokens:
        position = steps * _tokens_after(step, sizes) / _tokens_after(steps, sizes)
    if position <= schedule.warmup_steps:
        return peak * position / schedule.warmup_steps
    final = schedule.final_fraction
    return peak * (final + (1.0 - final) * _decay(schedule, steps, position))


def _tokens_after(step: int, sizes: Config | None) -> int:
    """Return the tokens of the steps 1 to `step` of a run. sizes: as in `rate_of`."""
    config = sizes or config_in_use()
    return span_of(spans_of(config.data, config.training), step).after(step).tokens


def _decay(schedule: Schedule, steps: int, step: float) -> float:
    """Return the decay factor between peak and final rate: 1 at first, 0 at the last step."""
    start = schedule.warmup_steps
    if schedule.name == "wsd":
        decay_steps = schedule.decay_steps or max(1, steps // 10)
        start = max(start, steps - decay_steps)
    progress = (step - start) / max(1, steps - start)
    progress = min(1.0, max(0.0, progress))
    match schedule.name:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd" if schedule.decay == "1-sqrt":
            return 1.0 - math.sqrt(progress)
        case "linear" | "wsd":
            return 1.0 - progress
        case "constant":
            return 1.0
