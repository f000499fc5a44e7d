"""The learning rate as a function of the step number: nothing to save, nothing to restore."""

import math

from torchllm.config import Schedule


class LearningRate:
    """`rate(step)` for steps 1 .. `steps`: a linear warmup to `peak`, then the schedule's shape.

    The rate of step `warmup_steps` is the peak and that of the last step `final_fraction` of it (constant: the peak).
    """

    def __init__(self, schedule: Schedule, peak: float, steps: int) -> None:
        self.schedule = schedule
        self.peak = peak
        self.steps = steps

    def __call__(self, step: int) -> float:
        """The rate of a step, counted from 1."""
        warmup = self.schedule.warmup_steps
        if step <= warmup:
            return self.peak * step / warmup
        start = warmup
        if self.schedule.name == "wsd":
            start = max(warmup, self.steps - (self.schedule.decay_steps or max(1, self.steps // 10)))
        progress = min(1.0, max(0.0, (step - start) / max(1, self.steps - start)))
        shape = {
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "linear": 1.0 - progress,
            "wsd": 1.0 - progress,
            "constant": 1.0,
        }[self.schedule.name]
        final = self.schedule.final_fraction
        return self.peak * (final + (1.0 - final) * shape)
