"""Decide which checkpoints are proven good, by the losses and gradients that the run logs after them. No torch.

A checkpoint with finite weights may still be bad: weights of 1e30 are finite, but losses after them are not. It
is proven by a finite evaluation of its weights or of later ones; in a run without evaluations, by ten finite steps.
"""

import math
from collections import deque
from typing import NamedTuple

FINITE_STEPS = 10
"""number of applied steps after a checkpoint that prove it"""
NONE = -1
"""no checkpoint, not even one of step 0"""


class Sample(NamedTuple):
    """A logged step."""

    step: int
    applied: int
    """number of steps up to this one that were applied: loss and gradient were finite"""


class Proof:
    """Tracks one run in one process; the same on all ranks, since they log the same."""

    def __init__(self, start: int, *, evaluates: bool) -> None:
        """start: step of the loaded checkpoint. evaluates: the run has evaluations."""
        self.start = start
        self.evaluates = evaluates
        self.finite_until = NONE
        """checkpoints up to this step were followed by ten finite steps"""
        self.evaluated_until = NONE
        """checkpoints up to this step were followed by a finite evaluation, or are of its step"""
        self.last = NONE
        """the last logged step"""
        self._samples: deque[Sample] = deque([Sample(start, start)])
        """logged steps with fewer than ten applied steps after them"""

    def note(self, step: int, skipped: int, validation_loss: float | None) -> None:
        """Record a logged step. skipped: steps since `start` that were not applied."""
        self.last = step
        applied = step - skipped
        while self._samples and self._samples[0].applied + FINITE_STEPS <= applied:
            self.finite_until = self._samples.popleft().step
        if self._samples and self._samples[-1].applied == applied:
            self._samples.pop()  # the new one replaces it, so there are never more than ten
        self._samples.append(Sample(step, applied))
        if validation_loss is not None and math.isfinite(validation_loss):
            self.evaluated_until = step

    @property
    def proven_until(self) -> int:
        """Return the last proven step: checkpoints up to it are good."""
        return self.evaluated_until if self.evaluates else self.finite_until

    @property
    def waiting(self) -> range:
        """Return the steps whose checkpoints later steps may still prove, from this process's first logged step on."""
        return range(max(self.start, self.finite_until + 1), self.last + 1)

    def suspect_since(self, *, evaluation: bool) -> int:
        """Return the first step whose checkpoint is suspect when a run goes wrong.

        evaluation: an evaluation was not finite; False: too many steps in a row were not finite. Checkpoints before the
        one that this process started from are not suspected, since it has not seen the steps after them. The one that
        it started from may be: the next start then loads the previous checkpoint.
        """
        good = self.evaluated_until if evaluation else max(self.evaluated_until, self.finite_until)
        return max(self.start, good + 1)
