"""Epochs of sources that a run counts: equally many of each, or those after which one ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchllm.config import Data, Source
from torchllm.data.order import LimitedStages, Mixture, PlannedStage, UsedUp, uses_in_length

DEFAULT_WEIGHT = Source().weight


def mixed_by_size(data: Data, sizes: Sequence[int]) -> Data:
    """Return settings with the sizes of the sources as weights, unless a weight or a stage is chosen.

    Then a run goes through each source equally often.
    """
    is_chosen = bool(data.stage) or any(source.weight != DEFAULT_WEIGHT for source in data.sources)
    if is_chosen or len(sizes) == 1:
        return data
    weighed = [replace(source, weight=float(size)) for source, size in zip(data.sources, sizes, strict=True)]
    return replace(data, sources=tuple(weighed))


def cut_stages(
    stages: Sequence[PlannedStage], sizes: Mapping[int, Sequence[int]], max_epochs: Sequence[float]
) -> LimitedStages:
    """Cut stages where a source has had its epochs, as `limit_epochs` says."""
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
