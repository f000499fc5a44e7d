"""The stages of a run, [[data.stage]]: their ranges of sequences and the sizes of their steps, also after a resume.

A config ends a stage at a step or at a number of tokens, the order of the data (`order.py`) at a sequence of the run.
They agree as long as the batch sizes stay the same. A checkpoint has steps and sequences of each past stage, so that a
run that resumes with another batch size keeps the sequences of past stages, and ends later stages where they say.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from torchllm.config import Data, Training
from torchllm.config.stages import START, Progress, StageSteps, mixture_stages, spans_of
from torchllm.data.order import LimitedStages, PlannedStage, mixture_shares


class ContinuedStages(NamedTuple):
    stages: list[PlannedStage]
    spans: list[StageSteps]
    """the steps to come"""
    differences: list[str]
    """a line for each stage that would change the sequences so far"""


def limit_epochs(
    stages: Sequence[PlannedStage], sizes: Mapping[int, Sequence[int]], max_epochs: Sequence[float]
) -> LimitedStages:
    """Cut stages where a source has had `max_epochs` (0: any number) of its sequences.

    sizes: sequences of each source, by `PlannedStage.length`. The other sources go on with their weights. Where none is
    left, all go on as if there were no limit.
    """
    if not any(max_epochs):
        return LimitedStages(stages)
    from torchllm.data.epoch_limits import cut_stages  # few runs have limits

    return cut_stages(stages, sizes, max_epochs)


def plan_stages(data: Data, training: Training) -> ContinuedStages:
    """Return the stages of a run that starts at step 0."""
    return continue_stages(data, training, [], START)


def continue_stages(
    data: Data, training: Training, saved: Sequence[PlannedStage], progress: Progress
) -> ContinuedStages:
    """Return the stages of a config for a run that resumes; `saved`: stages of its checkpoint, taken at `progress`."""
    ends = [Progress(stage.until, stage.end, tokens_of(saved, stage.end, training)) for stage in saved if stage.end]
    ends = [*(end for end in ends if end.sequences <= progress.sequences), progress]
    stages: list[PlannedStage] = []
    differences = []
    *before_last, last = spans = spans_of(data, training, progress)
    for stage, span in zip(mixture_stages(data), spans, strict=True):
        length = 0 if stage.sequence_length == training.sequence_length else stage.sequence_length
        if span is last:
            end: Progress | None = START  # there is none
        elif span.until > span.before.steps:
            end = span.after(span.until)
        else:
            past = (end for end in ends if end.tokens >= stage.until_tokens and stage.until in (0, end.steps))
            end = next(past, None)
        if end is None and span.before.steps > progress.steps:
            name = "until_tokens" if stage.until_tokens else "until"
            differences.append(f"{span.key}.{name}: the stage before it ends later, at step {span.before.steps}")
        elif end is None:
            differences.append(
                f"{span.key}.until: no stage of the checkpoint, which is at step {progress.steps}, ended at step "
                f"{stage.until}"
            )
        else:
            stages.append(PlannedStage(end.steps, end.sequences, stage.weights, length))
    spans = [*(span for span in before_last if span.until > span.before.steps), last]
    steps, sequences, _ = progress
    if not differences and past_mixtures(saved, sequences) != past_mixtures(stages, sequences):
        differences.append(
            f"data.stage: up to step {steps} the sources were mixed {describe_stages(saved)} in the checkpoint, "
            f"{describe_stages(stages)} now"
        )
    return ContinuedStages(stages, spans, differences)


def tokens_of(stages: Iterable[PlannedStage], sequences: int, training: Training) -> int:
    """Return the tokens of the first `sequences` sequences of a run with these stages."""
    tokens = first = 0
    for stage in stages:
        end = min(stage.end or sequences, sequences)
        tokens += max(0, end - first) * (stage.length or training.sequence_length)
        first = max(first, end)
    return tokens


def steps_within(spans: Sequence[StageSteps], sequences: int) -> int:
    """Return the last step of the run that needs no more than its first `sequences` sequences."""
    span = next((span for span in reversed(spans) if span.before.sequences <= sequences), spans[0])
    return span.before.steps + (sequences - span.before.sequences) // span.training.global_batch_size


def past_mixtures(stages: Iterable[PlannedStage], sequences: int) -> list[tuple[int, list[Fraction], int]]:
    """Return the mixture of the first `sequences` of a run: ends of stages, shares of the sources, lengths."""
    past = []
    end = 0
    for stage in stages:
        if end == sequences:
            break
        end = min(stage.end or sequences, sequences)
        past.append((end, mixture_shares(stage.weights), stage.length))
    return past


def describe_stages(stages: Iterable[PlannedStage]) -> str:
    """Describe the mixture of a run in words: [1.0, 0.0] until step 9, [0.5, 0.5] to the end."""
    listed = []
    for stage in stages:
        end = f"until step {stage.until}" if stage.end else "to the end"
        length = f" in sequences of {stage.length} tokens" * (stage.length > 0)
        listed.append(f"{list(stage.weights)}{length} {end}")
    return ", ".join(listed)
