"""The stages of a run, [[data.stage]]: their ranges of sequences and the sizes of their steps, also after a resume.

A config ends a stage at a step or at a number of tokens, the order of the data (`order.py`) at a sequence of the run.
They agree as long as the batch sizes stay the same. A checkpoint has steps and sequences of each past stage, so that a
run that resumes with another batch size keeps the sequences of past stages, and ends later stages where they say.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from torchllm.config import Data, Source, Training
from torchllm.config.stages import START, Progress, StageSteps, mixture_stages, spans_of
from torchllm.data.order import Mixture, PlannedStage, mixture_shares, uses_in_length

DEFAULT_WEIGHT = Source().weight


class ContinuedStages(NamedTuple):
    stages: list[PlannedStage]
    spans: list[StageSteps]
    """the steps to come"""
    differences: list[str]
    """a line for each stage that would change the sequences so far"""


def mixed_by_size(data: Data, sizes: Sequence[int]) -> Data:
    """Return settings with the sizes of the sources as weights, unless a weight or a stage is chosen.

    Then a run goes through each source equally often.
    """
    is_chosen = bool(data.stage) or any(source.weight != DEFAULT_WEIGHT for source in data.sources)
    if is_chosen or len(sizes) == 1:
        return data
    weighed = [replace(source, weight=float(size)) for source, size in zip(data.sources, sizes, strict=True)]
    return replace(data, sources=tuple(weighed))


class UsedUp(NamedTuple):
    """A source that has had its epochs."""

    source: int
    end: int
    """number of the run's sequences until then"""


class LimitedStages(NamedTuple):
    """The stages of a run, cut where a source has had its epochs."""

    stages: list[PlannedStage]
    used_up: list[UsedUp]
    end: int
    """number of the run's sequences until all sources of a stage have had their epochs; 0: never"""


def limit_epochs(
    stages: Sequence[PlannedStage], sizes: Mapping[int, Sequence[int]], max_epochs: Sequence[float]
) -> LimitedStages:
    """Cut stages where a source has had `max_epochs` (0: any number) of its sequences.

    sizes: sequences of each source, by `PlannedStage.length`. The other sources go on with their weights. Where none is
    left, all go on as if there were no limit.
    """
    cut: list[PlannedStage] = []
    used_up: list[UsedUp] = []
    left = [True] * len(max_epochs)
    used, before = [0] * len(max_epochs), sizes[0]
    first = 0
    for stage in stages:
        own_sizes = sizes[stage.length]
        used, before = uses_in_length(used, before, own_sizes), own_sizes
        limits = [max(1, math.floor(size * epochs)) for size, epochs in zip(own_sizes, max_epochs, strict=True)]
        while not stage.end or first < stage.end:
            for source, limit in enumerate(limits):
                if max_epochs[source] and left[source] and used[source] >= limit:
                    left[source] = False
                    used_up.append(UsedUp(source, first))
            weights = tuple(weight * is_left for weight, is_left in zip(stage.weights, left, strict=True))
            if not any(weights):
                return LimitedStages([*cut, stages[-1]._replace(end=0)], used_up, first)
            mixture = Mixture(weights)
            ends = [stage.end] if stage.end else []
            for source, limit in enumerate(limits):
                if max_epochs[source] and weights[source]:
                    ends.append(first + mixture.end_of(source, limit - used[source]))
            end = min(ends, default=0)
            cut.append(stage._replace(until=stage.until if end == stage.end else 0, end=end, weights=weights))
            if not end:
                return LimitedStages(cut, used_up, 0)
            used = [count + mixture.uses(source, end - first) for source, count in enumerate(used)]
            first = end
    raise AssertionError("the last stage has no end")


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
        if end is None:
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


def stages_from_state(state: Mapping[str, Any], sources: int) -> list[PlannedStage]:
    """Return the stages in the state of a loader; the run may have more sources by now."""
    stages = []
    for until, end, weights, *length in state["stages"]:
        padding = [0.0] * (sources - len(weights))
        stages.append(PlannedStage(until, end, (*weights, *padding), *length))
    return stages
