"""Up to which step the checkpoints of a run are proven to be good, by what the run logs after them. No torch.

A checkpoint with finite weights may still be lost: weights of 1e30 are finite, and no loss after them is. A checkpoint
is proven by a finite evaluation of its weights or of later ones; in a run without evaluations, by ten finite steps.
"""

import math
from collections import deque
from typing import NamedTuple

FINITE_STEPS = 10
"""steps that were applied after a checkpoint, and prove it"""
NONE = -1
"""no checkpoint, not even one of step 0"""


class Sample(NamedTuple):
    """A logged step."""

    step: int
    applied: int
    """steps up to this one that were applied, for loss and gradient were finite"""


class Proof:
    """Follows one run in one process; the same on all ranks, for they log the same."""

    def __init__(self, start: int, *, evaluates: bool) -> None:
        """start: the step after which the run begins. evaluates: the run has evaluations."""
        self.start = start
        self.evaluates = evaluates
        self.finite_until = NONE
        """checkpoints up to this step were followed by ten finite steps"""
        self.evaluated_until = NONE
        """checkpoints up to this step were followed by a finite evaluation, or are of its step"""
        self.last = NONE
        """the last logged step"""
        self._samples: deque[Sample] = deque([Sample(start, start)])
        """of which fewer than ten applied steps have followed"""

    def note(self, step: int, skipped: int, validation_loss: float | None) -> None:
        """Note a logged step. skipped: steps since `start` that were not applied."""
        self.last = step
        applied = step - skipped
        while self._samples and self._samples[0].applied + FINITE_STEPS <= applied:
            self.finite_until = self._samples.popleft().step
        if self._samples and self._samples[-1].applied == applied:
            self._samples.pop()  # the new one says more, so there are never more than ten
        self._samples.append(Sample(step, applied))
        if validation_loss is not None and math.isfinite(validation_loss):
            self.evaluated_until = step

    @property
    def proven_until(self) -> int:
        """Return up to which step checkpoints are proven."""
        return self.evaluated_until if self.evaluates else self.finite_until

    @property
    def waiting(self) -> range:
        """Return the steps whose checkpoints steps may still prove: of this process, none before its first logged."""
        return range(max(self.start, self.finite_until + 1), self.last + 1)

    def suspect_since(self, *, evaluation: bool) -> int:
        """Return from which step on checkpoints are suspect, where a run goes wrong.

        evaluation: it goes wrong by an evaluation that is not finite, else by its steps, of which too many in a row
        were not finite. Checkpoints older than the one that this process has started from are not suspected: it has
        seen nothing that followed them, and if it did not help to start from here, the next start is from the one
        before.
        """
        good = self.evaluated_until if evaluation else max(self.evaluated_until, self.finite_until)
        return max(self.start, good + 1)
