"""The stages of a training, [[data.stage]]: the steps of each, and its batch size, length and mixture.

They are a function of the config alone. A run that resumes with another batch size counts from its checkpoint instead:
`torchllm/data/stages.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from torchllm.config.schema import Config, Data, MixtureStage, Training

C = TypeVar("C", bound=Config)


class TrainingStage(NamedTuple):
    """Steps with one batch size, one length and one mixture."""

    key: str
    """"data.stage.0", "training" if there are no stages"""
    before: int
    """steps before it"""
    tokens: int
    """tokens of the steps before it"""
    until: int
    """its last step; 0: to the end"""
    training: Training
    """with its batch size and length"""

    def tokens_after(self, step: int) -> int:
        """Return the tokens of the run after one of its steps."""
        return self.tokens + (step - self.before) * self.training.global_batch_size * self.training.sequence_length


def stages_of(data: Data) -> tuple[MixtureStage, ...]:
    """Return the stages with their weights, or the one that a run without stages has."""
    weights = tuple(source.weight for source in data.sources)
    stages = data.stage or (MixtureStage(),)
    return tuple(stage if stage.weights else replace(stage, weights=weights) for stage in stages)


def training_of(stage: MixtureStage, training: Training) -> Training:
    """Return [training] with the batch size and the length of a stage."""
    batch, length = stage.global_batch_size, stage.sequence_length
    return replace(
        training,
        global_batch_size=batch or training.global_batch_size,
        sequence_length=length or training.sequence_length,
    )


def last_step(stage: MixtureStage, training: Training, steps: int, tokens: int) -> int:
    """Return the last step of a stage, given a step of it or before it, and the tokens so far; 0: it has no end.

    training: of the stage. With `until_tokens` it is the first step with as many tokens of the run.
    """
    if not stage.until_tokens:
        return stage.until
    return steps - (tokens - stage.until_tokens) // (training.global_batch_size * training.sequence_length)


def training_stages(data: Data, training: Training) -> list[TrainingStage]:
    """Return all stages of a run that starts at step 0, also those after its last step."""
    stages = []
    before = tokens = 0
    for index, stage in enumerate(stages_of(data)):
        of_stage = training_of(stage, training)
        until = last_step(stage, of_stage, before, tokens)
        key = f"data.stage.{index}" if data.stage else "training"
        stages.append(TrainingStage(key, before, tokens, until, of_stage))
        before, tokens = until, stages[-1].tokens_after(until)
    return stages


def stage_at(config: Config, step: int) -> TrainingStage:
    """Return the stage of a step, counted from 1."""
    stages = training_stages(config.data, config.training)
    return next(stage for stage in reversed(stages) if stage.before < max(step, 1))


def config_at(config: C, stage: TrainingStage) -> C:
    """Return the config of a run that has one stage alone."""
    return replace(config, training=stage.training, data=replace(config.data, stage=()))


def changes_size(data: Data) -> bool:
    """Return whether a stage sets its batch size or its length."""
    return any(stage.global_batch_size or stage.sequence_length for stage in data.stage)


def lengths(data: Data, sequence_length: int) -> dict[int, str]:
    """Return the lengths of all sequences, each with the first key that sets it; training.sequence_length is first."""
    keys = {sequence_length: "training.sequence_length"}
    for index, stage in enumerate(data.stage):
        if stage.sequence_length:
            keys.setdefault(stage.sequence_length, f"data.stage.{index}.sequence_length")
    return keys


def tokens_after(config: Config) -> Callable[[int], int]:
    """Return a function of a step, from 0: the tokens of the run after it."""
    return lambda step: stage_at(config, step).tokens_after(step)
