"""The stages of a training, [[data.stage]]: the steps of each, with its batch size and length.

They follow from the config alone, and for a run that resumes from how far it is (`torchllm/data/stages.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from torchllm.config.schema import Config, Data, MixtureStage, Training

C = TypeVar("C", bound=Config)


class Progress(NamedTuple):
    """How far a run is."""

    steps: int = 0
    sequences: int = 0
    tokens: int = 0


START = Progress()


class StageSteps(NamedTuple):
    """The steps of a stage, from a position of the run on."""

    key: str
    """"data.stage.0", "training" if there are no stages"""
    before: Progress
    """where it begins, or where the run goes on in it"""
    until: int
    """its last step, not after `before` if it is past; 0: to the end"""
    training: Training
    """with its batch size and length"""

    def after(self, step: int) -> Progress:
        """Return the position after one of the steps."""
        sequences = (step - self.before.steps) * self.training.global_batch_size
        tokens = self.before.tokens + sequences * self.training.sequence_length
        return Progress(step, self.before.sequences + sequences, tokens)


def mixture_stages(data: Data) -> list[MixtureStage]:
    """Return the stages with their weights, or the one that a run without stages has."""
    weights = tuple(source.weight for source in data.sources)
    return [stage if stage.weights else replace(stage, weights=weights) for stage in data.stage or [MixtureStage()]]


def spans_of(data: Data, training: Training, position: Progress = START) -> list[StageSteps]:
    """Return the steps of all stages of a run that is at a position, also those after training.steps."""
    spans = []
    for index, stage in enumerate(mixture_stages(data)):
        batch = stage.global_batch_size or training.global_batch_size
        length = stage.sequence_length or training.sequence_length
        until = stage.until
        if stage.until_tokens:  # the first step that reaches it
            until = position.steps - (position.tokens - stage.until_tokens) // (batch * length)
        of_stage = replace(training, global_batch_size=batch, sequence_length=length)
        spans.append(StageSteps(f"data.stage.{index}" if data.stage else "training", position, until, of_stage))
        if until > position.steps:
            position = spans[-1].after(until)
    return spans


def span_of(spans: Sequence[StageSteps], step: int) -> StageSteps:
    """Return the span of a step, from 1; the first if it is before all."""
    return next((span for span in reversed(spans) if span.before.steps < step), spans[0])


def of_span(config: C, span: StageSteps) -> C:
    """Return the config of a run with the steps of one stage alone."""
    return replace(config, training=span.training, data=replace(config.data, stage=()))
