"""Which runs of a job to measure first, where its framework has not been measured on its GPU. No torch.

The first pick, and then whatever differs most from all that are chosen: the layout whose step is made of other terms
tells most about the constants that `plan.py calibrate` fits. With experts the second run has another kind of expert
parallelism (ep 1, or above), which predictions know least. Candidates are the fastest layout of each level of
simplicity, and those that differ from the first pick in one setting; all leave room in memory.
"""

from collections.abc import Sequence

from torchllm.tools.planner.predict import Prediction, predict
from torchllm.tools.planner.search.advice import Advice
from torchllm.tools.planner.search.explain import one_change
from torchllm.tools.planner.search.layouts import Job
from torchllm.tools.planner.search.search import Ranked
from torchllm.tools.planner.validity import memory_limit

RUNS = 6


def first_runs(job: Job, advice: Advice, count: int = RUNS) -> list[Ranked]:
    """Return the `count` layouts to measure first, fewer if fewer fit."""
    remaining = layouts_that_fit(job, advice)
    chosen = [remaining.pop(0)]
    others = [ranked for ranked in remaining if (ranked.layout.ep > 1) != (chosen[0].layout.ep > 1)]
    if others:
        chosen.append(min(others, key=lambda ranked: ranked.prediction.step))
        remaining.remove(chosen[1])
    while remaining and len(chosen) < count:
        steps = [ranked.prediction for ranked in chosen]
        distances = [distance(ranked.prediction, steps) for ranked in remaining]
        chosen.append(remaining.pop(distances.index(max(distances))))
    return chosen


def distance(step: Prediction, steps: Sequence[Prediction]) -> float:
    """Return how much the terms of a step, as shares of it, differ from the closest of other steps: 0 to 2."""
    return min(
        sum(abs(step.terms.get(term, 0.0) / step.step - other.terms.get(term, 0.0) / other.step) for term in names)
        for other in steps
        for names in [step.terms | other.terms]
    )


def layouts_that_fit(job: Job, advice: Advice) -> list[Ranked]:
    """Return the different layouts to choose from, the first pick first."""
    candidates = {ranked.layout: ranked for ranked in [advice.first, *advice.candidates]}
    for layouts in one_change(job, advice.first.layout):
        for layout in layouts:
            prediction = predict(job.case(layout))
            if prediction.memory.total <= memory_limit(job.hardware):
                candidates.setdefault(layout, Ranked(layout, prediction))
    return list(candidates.values())
