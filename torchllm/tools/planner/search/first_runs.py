"""Which runs of a job to measure first, where its framework has not been measured on its GPU. No torch.

They are the runs that are expected to lower the error of the job's other runs most in `plan.py calibrate`
(`evidence/design.py`). Candidates are the fastest layout of each level of simplicity, and those that differ from the
first pick in one setting; all leave room in memory. `python -m evidence first-runs` compares such a choice with random
ones, on published runs.
"""

from torchllm.tools.planner.evidence.calibrate import problem_of, run_of
from torchllm.tools.planner.evidence.design import candidates_of, most_telling
from torchllm.tools.planner.evidence.fit import Timed, linearize
from torchllm.tools.planner.evidence.step_errors import shares_of
from torchllm.tools.planner.evidence.validity import memory_limit, step_deviation
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.advice import Advice
from torchllm.tools.planner.search.explain import one_change
from torchllm.tools.planner.search.layouts import Job
from torchllm.tools.planner.search.search import Ranked

RUNS = 6


def first_runs(job: Job, advice: Advice, count: int = RUNS) -> list[Ranked]:
    """Return the `count` layouts to measure first, fewer if fewer fit."""
    layouts = {ranked.layout: ranked for ranked in layouts_that_fit(job, advice)}
    runs: list[Timed] = []
    shares, deviations = [], []
    for ranked in layouts.values():
        case = job.case(ranked.layout)
        runs.append(run_of(case, ranked.prediction.step, len(runs)))
        shares.append(shares_of(case, ranked.prediction))
        deviations.append(step_deviation(case, ranked.prediction))
    problem = problem_of(runs)
    candidates = candidates_of(linearize(runs, problem.middle), shares, deviations)
    ranks = list(layouts.values())
    return [ranks[index] for index in most_telling(candidates, problem, count)]


def layouts_that_fit(job: Job, advice: Advice) -> list[Ranked]:
    """Return the layouts to choose from, the first pick among them."""
    candidates = list(advice.candidates)
    for layouts in one_change(job, advice.first.layout):
        for layout in layouts:
            case = job.case(layout)
            prediction = predict(case)
            if prediction.memory.total <= memory_limit(case):
                candidates.append(Ranked(layout, prediction))
    return candidates
