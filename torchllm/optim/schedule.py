"""The learning rate as a pure function of the step number: there is no state to save or restore."""

import math

from torchllm.config import Schedule
from torchllm.config.applied_keys import applied


class LearningRate:
    """Computes the rate of steps 1 to `steps`: a linear warm-up to `peak`, then the decay of `schedule.name`.

    The rate of step `warmup_steps` is the peak; that of the last step is `final_fraction` of it ("constant": the peak).
    "wsd" (warm-up, stable, decay) stays at the peak until the last `decay_steps` steps, by default a tenth of the run.
    There it falls linearly, or as 1 - the square root of the share of them that is done (Hägele et al. 2024, arXiv
    2405.18392).
    """

    def __init__(self, schedule: Schedule, peak: float, steps: int) -> None:
        applied("schedule", schedule)
        self.schedule = schedule
        self.peak = peak
        self.steps = steps

    def __call__(self, step: int) -> float:
        """Return the rate of a step, counted from 1."""
        warmup = self.schedule.warmup_steps
        if step <= warmup:
            return self.peak * step / warmup
        height = self._decay(step)
        final = self.schedule.final_fraction
        return self.peak * (final + (1.0 - final) * height)

    def _decay(self, step: int) -> float:
        """Return how much of the way from the final rate to the peak is left: 1 at first, 0 at the last step."""
        start = self.schedule.warmup_steps
        if self.schedule.name == "wsd":
            decay_steps = self.schedule.decay_steps or max(1, self.steps // 10)
            start = max(start, self.steps - decay_steps)
        progress = (step - start) / max(1, self.steps - start)
        progress = min(1.0, max(0.0, progress))
        match self.schedule.name:
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * progress))
            case "wsd" if self.schedule.decay == "1-sqrt":
                return 1.0 - math.sqrt(progress)
            case "linear" | "wsd":
                return 1.0 - progress
            case "constant":
                return 1.0
