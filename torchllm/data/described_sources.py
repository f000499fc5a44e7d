"""Lines of the log on the sources of a run: sizes, epochs, shares and stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from torchllm.config import Training
from torchllm.config.stages import StageSteps, span_of
from torchllm.data.corpus import SequenceSource
from torchllm.data.order import DataOrder, LimitedStages, PlannedStage, mixture_counts, mixture_shares
from torchllm.data.stages import steps_within

LISTED = 5
"""most sources that a message lists"""
_NOTICEABLE = 0.01
"""a share with a larger relative rounding error than this is reported to the user"""


class RoundedShare(NamedTuple):
    """A source whose share of the sequences differs from its weight."""

    source: int
    wanted: float
    used: float


def rounded_shares(weights: Sequence[float]) -> list[RoundedShare]:
    """Return the sources whose share in a block differs from their weight by more than `_NOTICEABLE`."""
    drawn = [source for source, weight in enumerate(weights) if weight > 0]
    shares = mixture_shares([weights[source] for source in drawn])
    counts = mixture_counts(shares)
    block = sum(counts)
    rounded = []
    for source, share, count in zip(drawn, shares, counts, strict=True):
        used = Fraction(count, block)
        if abs(used - share) > _NOTICEABLE * share:
            rounded.append(RoundedShare(source, float(share), float(used)))
    return rounded


@dataclass(frozen=True)
class DescribedSources:
    """The sources of a `TrainLoader`, and a run's order of their sequences."""

    names: Sequence[str]
    sources: Sequence[SequenceSource]
    max_epochs: Sequence[float]
    stages: Sequence[PlannedStage]
    limited: LimitedStages
    """the stages, cut where a source has had its max_epochs"""
    spans: Sequence[StageSteps]
    order: DataOrder

    def list_sources(self, steps: int) -> list[str]:
        """Return a line per source, with its size and its epochs in a run of `steps` steps."""
        sequences = self._sequences(steps)
        lines = []
        for index, source in enumerate(self.sources[:LISTED]):
            epochs = self.order.epochs(index, sequences)
            lines.append(f"{self.names[index]}: {source.describe()}; {epochs:.3g} epochs in {steps} steps")
        if len(self.names) > LISTED:
            lines.append(f"and {len(self.names) - LISTED} other sources")
        return lines

    def list_stages(self, steps: int, consumed: int, changes_size: bool) -> list[str]:
        """Return a line per stage of a run of `steps` steps, and one per source that leaves after `consumed` sequences.

        changes_size: stages have other batch sizes or lengths.
        """
        lines = []
        first_step, begin = 1, 0
        for stage in self.stages[:-1] if len(self.names) > 1 else ():
            lines.append(f"steps {first_step} to {stage.until}: {self.shares(begin)}")
            first_step, begin = stage.until + 1, stage.end
        for index, end in self.limited.used_up:
            if consumed < end < self._sequences(steps):
                step = steps_within(self.spans, end - 1) + 1
                lines.append(f"{self.names[index]}: leaves in step {step}, after {self.max_epochs[index]:g} epochs")
        if first_step > 1:
            lines.append(f"from step {first_step} on: {self.shares(begin)}")
        for span in self.spans if changes_size else ():
            lines.append(f"from step {span.before.steps + 1} on: {describe_size(span.training)}")
        return lines

    def shares(self, n: int, last: int = 0) -> str:
        """Describe the shares of the sources from the n-th sequence on, and their epochs before it.

        last: index of the last sequence of its step, whose shares are described where they change within the step.
        """
        stage = next(stage for stage in self.limited.stages if not stage.end or max(n, last) < stage.end)
        total = sum(stage.weights)
        listed = []
        for index, weight in enumerate(stage.weights[:LISTED]):
            epochs = self.order.epochs(index, n)
            listed.append(f"{weight / total:.3g} of {self.names[index]} ({epochs:.3g} epochs before)")
        if len(stage.weights) > LISTED:
            listed.append(f"and {len(stage.weights) - LISTED} other sources")
        return ", ".join(listed)

    def rounded_shares(self) -> str:
        """List the sources whose share of the sequences differs from their weight; "" if there is none."""
        rounded = [share for stage in self.stages for share in rounded_shares(stage.weights)]
        listed = []
        for share in rounded[:LISTED]:
            listed.append(f"{self.names[share.source]}: {share.wanted:.3g} asked, {share.used:.3g} used")
        if len(rounded) > LISTED:
            listed.append(f"and {len(rounded) - LISTED} other sources")
        return "; ".join(listed)

    def _sequences(self, steps: int) -> int:
        return span_of(self.spans, steps).after(steps).sequences


def describe_size(training: Training) -> str:
    """Describe the size of a step."""
    return f"{training.global_batch_size} sequences of {training.sequence_length} tokens per step"
