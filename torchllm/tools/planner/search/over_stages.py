"""Choose layouts for a run whose stages have other batch sizes or lengths ([[data.stage]]). No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.config.stages import spans_of
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.advice import within_risk
from torchllm.tools.planner.search.explain import GIB, divides_nowhere, fits_nowhere
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.search import Ranked, Search, search
from torchllm.tools.planner.validity import RISK, judge

FIRST_LOOK = 16
"""fastest layouts of each stage that are looked at first"""


class StageJob(NamedTuple):
    """The question to the planner for one stage."""

    key: str
    """data.stage.0"""
    steps: int
    job: Job
    limited: Job
    """with as much memory as a pick may need"""


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
            of_stage = replace(job, training=span.training)
            stages.append(StageJob(span.key, steps, of_stage, within_risk(of_stage)))
    return stages


def fastest_over_stages(stages: Sequence[StageJob]) -> StagedLayout:
    """Return the layout that takes least time in sum, of those that every stage can have within the limit of risk.

    The fastest of each stage are looked at, then twice as many, until no other layout can be faster in sum: the
    threshold algorithm of Fagin, Lotem & Naor 2003. A search leaves out twins (`search.Search`), which may be faster by
    a little in another stage. Raises UserError if there is none.
    """
    looked_at = FIRST_LOOK
    while True:
        fastest = [_fastest(stage, looked_at) for stage in stages]
        layouts = dict.fromkeys(ranked.layout for found in fastest for ranked in found)
        common = [staged for layout in layouts if (staged := over_stages(stages, layout))]
        best = min(common, key=lambda staged: staged.seconds, default=None)
        if any(len(found) < looked_at for found in fastest):  # all layouts of a stage were looked at
            break
        least = sum(stage.steps * found[-1].prediction.step for stage, found in zip(stages, fastest, strict=True))
        if best is not None and best.seconds <= least:
            break
        looked_at *= 2
    if best is None:
        raise UserError("data.stage: no layout that one stage can have is valid and fits in all: change their sizes")
    return best


def _fastest(stage: StageJob, count: int) -> list[Ranked]:
    """Return the fastest layouts of a stage alone. Raises UserError that says why there is none."""
    found = Search(stage.limited, count).find_best().best
    if found:
        return found
    outcome = search(stage.job, 1)
    if outcome.best:
        reason = f"a layout fits, but its risk of running out of memory is over {RISK:.0%}"
    elif outcome.layouts:
        reason = fits_nowhere(stage.job, outcome)
    else:
        reason = divides_nowhere(stage.job, outcome)
    raise UserError(f"{stage.key}: {reason}")


def over_stages(stages: Sequence[StageJob], layout: Layout) -> StagedLayout | None:
    """Return a layout with its predictions for all stages; None if one of them cannot have it."""
    seconds = memory = 0.0
    for stage in stages:
        if not stage.limited.accepts(layout):
            return None
        prediction = predict(stage.limited.case(layout))
        if not prediction.fits:
            return None
        seconds += stage.steps * prediction.step
        memory = max(memory, prediction.memory.total)
    return StagedLayout(layout, seconds, memory)


def stage_table(stages: Sequence[StageJob], layout: Layout) -> Iterator[str]:
    """Yield a heading, a line for each stage with the cost of a step, and the hours of all."""
    yield "      step s    MFU    GiB             steps   sequences  tokens  stage"
    seconds = 0.0
    for stage in stages:
        case, training = stage.job.case(layout), stage.job.training
        prediction = predict(case)
        verdict = judge(case, prediction)
        cost = f"{prediction.step:8.4g} {prediction.mfu:6.1%} {prediction.memory.total / GIB:6.1f} {verdict.fits:10}"
        sizes = f"{stage.steps:11,} {training.global_batch_size:11,} {training.sequence_length:7,}"
        yield f"    {cost}{sizes}  {stage.key}"
        seconds += stage.steps * prediction.step
    yield f"    {seconds / 3600:.4g} hours in all"
