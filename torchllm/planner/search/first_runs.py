"""Which runs of a job to measure first, where its framework has not been measured on its GPU. No torch.

They are the first pick and, one after the other, the layout whose step is spent most unlike those already chosen: the
constants that `plan.py calibrate` fits (launches, traffic, what overlaps, waits) are told apart by steps that are spent
differently. Candidates are the fastest layout of each level of simplicity, and those that differ from the first pick in
one setting; all leave room in memory. Which six shrink the interval most is not computed.
"""

from torchllm.planner.predict import Prediction, predict
from torchllm.planner.search.advice import Advice
from torchllm.planner.search.explain import one_change
from torchllm.planner.search.layouts import Job
from torchllm.planner.search.search import Ranked
from torchllm.planner.search.validity import memory_limit

RUNS = 6


def first_runs(job: Job, advice: Advice, count: int = RUNS) -> list[Ranked]:
    """Return the `count` layouts to measure first, fewer if fewer fit."""
    chosen = [advice.first]
    left = {one.layout: one for one in _candidates(job, advice)}
    while left and len(chosen) < count:
        farthest = max(left.values(), key=lambda one: min(unlike(one.prediction, other.prediction) for other in chosen))
        if min(unlike(farthest.prediction, other.prediction) for other in chosen) == 0:
            break  # what is left is spent as one of them
        chosen.append(left.pop(farthest.layout))
    return chosen


def _candidates(job: Job, advice: Advice) -> list[Ranked]:
    """Return the layouts to choose from, which fit with room."""
    found = list(advice.candidates)
    for layouts in one_change(job, advice.first.layout):
        for layout in layouts:
            ranked = Ranked(layout, predict(job.case(layout)))
            if ranked.prediction.memory.total <= memory_limit(job.case(layout)):
                found.append(ranked)
    return found


def unlike(one: Prediction, other: Prediction) -> float:
    """Return how differently two steps are spent: the sum of the differences of their terms' shares, from 0 to 2."""
    names = dict.fromkeys([*one.terms, *other.terms])
    return sum(abs(one.terms.get(name, 0.0) / one.step - other.terms.get(name, 0.0) / other.step) for name in names)
