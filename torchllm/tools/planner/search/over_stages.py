"""Choose layouts for a run whose stages have other batch sizes or lengths ([[data.stage]]). No torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.config.stages import spans_of
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.advice import within_risk
from torchllm.tools.planner.search.explain import divides_nowhere, fits_nowhere
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.search import search

FIRST_LOOK = 16
"""fastest layouts of each stage that are looked at first"""


class StageJob(NamedTuple):
    """The question to the planner for one stage."""

    key: str
    """data.stage.0"""
    steps: int
    job: Job


class StagedLayout(NamedTuple):
    """A layout that all stages can have."""

    layout: Layout
    seconds: float
    """predicted, of the whole run"""
    memory: float
    """predicted bytes of the largest stage, per GPU"""


def stage_jobs(config: Config, job: Job) -> list[StageJob]:
    """Return the questions for the stages of a run that have steps; `job`: the question for [training]."""
    stages = []
    for span in spans_of(config.data, config.training):
        steps = min(span.until or config.training.steps, config.training.steps) - span.before.steps
        if steps > 0:
            stages.append(StageJob(span.key, steps, within_risk(replace(job, training=span.training))))
    return stages


def layouts_over_stages(stages: Sequence[StageJob], count: int) -> list[StagedLayout]:
    """Return the `count` layouts that take least time in sum and fit in every stage, the fastest first.

    The fastest of each stage are looked at, then twice as many, until no other layout can be faster in sum: the
    threshold algorithm of Fagin, Lotem & Naor 2003. A search leaves out twins (`search.Search`), which may be faster by
    a little in another stage. Raises UserError if no layout fits.
    """
    looked_at = FIRST_LOOK
    while True:
        fastest = []
        for stage in stages:
            outcome = search(stage.job, looked_at)
            if not outcome.best:
                reason = fits_nowhere if outcome.layouts else divides_nowhere
                raise UserError(f"{stage.key}: {reason(stage.job, outcome)}")
            fastest.append(outcome.best)
        layouts = dict.fromkeys(ranked.layout for found in fastest for ranked in found)
        common = [staged for layout in layouts if (staged := over_stages(stages, layout))]
        common.sort(key=lambda staged: staged.seconds)
        least = sum(stage.steps * found[-1].prediction.step for stage, found in zip(stages, fastest, strict=True))
        if any(len(found) < looked_at for found in fastest):  # these are all layouts of a stage
            least = math.inf
        if (len(common) >= count and common[count - 1].seconds <= least) or least == math.inf:
            break
        looked_at *= 2
    if not common:
        raise UserError("data.stage: no layout that fits in one stage is valid and fits in all: change their sizes")
    return common[:count]


def over_stages(stages: Sequence[StageJob], layout: Layout) -> StagedLayout | None:
    """Return a layout with its predictions for all stages; None if one of them cannot have it."""
    seconds = memory = 0.0
    for stage in stages:
        if not stage.job.accepts(layout):
            return None
        prediction = predict(stage.job.case(layout))
        if not prediction.fits:
            return None
        seconds += stage.steps * prediction.step
        memory = max(memory, prediction.memory.total)
    return StagedLayout(layout, seconds, memory)
