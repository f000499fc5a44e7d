"""The stages of a run, [[data.stage]], each with its mixture: their ranges of sequences, also after a resume.

A config ends a stage at a step, the order of the data (`order.py`) at a sequence of the run. The two agree as long as
the global batch stays the same. A checkpoint has both for each stage, so that a run that resumes with another global
batch keeps the sequences of past stages, and ends later stages at their step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from torchllm.config import Data, MixtureStage, Source
from torchllm.data.order import Mixture, PlannedStage, mixture_shares

DEFAULT_WEIGHT = Source().weight


class Progress(NamedTuple):
    steps: int = 0
    sequences: int = 0


class ContinuedStages(NamedTuple):
    stages: list[PlannedStage]
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


def limit_epochs(stages: Sequence[PlannedStage], sizes: Sequence[int], max_epochs: Sequence[float]) -> LimitedStages:
    """Cut stages where a source has had `max_epochs` (0: any number) of its `sizes` sequences.

    The other sources go on with their weights. Where none is left, all go on as if there were no limit.
    """
    limits = [max(1, math.floor(size * epochs)) for size, epochs in zip(sizes, max_epochs, strict=True)]
    cut: list[PlannedStage] = []
    used_up: list[UsedUp] = []
    left = [True] * len(sizes)
    used = [0] * len(sizes)
    first = 0
    for stage in stages:
        while not stage.end or first < stage.end:
            weights = tuple(weight * is_left for weight, is_left in zip(stage.weights, left, strict=True))
            if not any(weights):
                return LimitedStages([*cut, stages[-1]._replace(end=0)], used_up, first)
            mixture = Mixture(weights)
            ends = [stage.end] if stage.end else []
            for source, limit in enumerate(limits):
                if max_epochs[source] and weights[source]:
                    ends.append(first + mixture.end_of(source, limit - used[source]))
            end = min(ends, default=0)
            cut.append(PlannedStage(stage.until if end == stage.end else 0, end, weights))
            if not end:
                return LimitedStages(cut, used_up, 0)
            used = [count + mixture.uses(source, end - first) for source, count in enumerate(used)]
            first = end
            for source, limit in enumerate(limits):
                if max_epochs[source] and left[source] and used[source] >= limit:
                    left[source] = False
                    used_up.append(UsedUp(source, end))
    raise AssertionError("the last stage has no end")


def plan_stages(data: Data, global_batch_size: int) -> list[PlannedStage]:
    return continue_stages(data, global_batch_size, [], Progress()).stages


def continue_stages(
    data: Data, global_batch_size: int, saved: Sequence[PlannedStage], progress: Progress
) -> ContinuedStages:
    """Return the stages of a config for a run that resumes; `saved`: stages of its checkpoint, taken at `progress`."""
    steps, sequences = progress
    ends = {stage.until: stage.end for stage in saved if 0 < stage.end <= sequences}
    ends[steps] = sequences
    configured = data.stage or (MixtureStage(weights=tuple(source.weight for source in data.sources)),)
    stages, differences = [], []
    for index, stage in enumerate(configured):
        end = 0
        if index < len(configured) - 1:
            if stage.until > steps:
                end = sequences + (stage.until - steps) * global_batch_size
            elif stage.until in ends:
                end = ends[stage.until]
            else:
                differences.append(
                    f"data.stage.{index}.until: no stage of the checkpoint, which is at step {steps}, ended at step "
                    f"{stage.until}"
                )
                continue
        stages.append(PlannedStage(stage.until if end else 0, end, stage.weights))
    if not differences and past_mixtures(saved, sequences) != past_mixtures(stages, sequences):
        differences.append(
            f"data.stage: up to step {steps} the sources were mixed {describe_stages(saved)} in the checkpoint, "
            f"{describe_stages(stages)} now"
        )
    return ContinuedStages(stages, differences)


def past_mixtures(stages: Iterable[PlannedStage], sequences: int) -> list[tuple[int, list[Fraction]]]:
    """Return the mixture of the first `sequences` sequences of a run: ends of stages, and shares of the sources."""
    past = []
    end = 0
    for stage in stages:
        if end == sequences:
            break
        end = min(stage.end or sequences, sequences)
        past.append((end, mixture_shares(stage.weights)))
    return past


def describe_stages(stages: Iterable[PlannedStage]) -> str:
    """Describe the mixture of a run in words: [1.0, 0.0] until step 9, [0.5, 0.5] to the end."""
    listed = []
    for stage in stages:
        end = f"until step {stage.until}" if stage.end else "to the end"
        listed.append(f"{list(stage.weights)} {end}")
    return ", ".join(listed)


def stages_from_state(state: Mapping[str, Any], sources: int) -> list[PlannedStage]:
    """Return the stages in the state of a loader; the run may have more sources by now."""
    stages = []
    for until, end, weights in state["stages"]:
        padding = [0.0] * (sources - len(weights))
        stages.append(PlannedStage(until, end, (*weights, *padding)))
    return stages
