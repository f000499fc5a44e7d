"""When a pipeline rank may hold most: of the states that its order of work goes through, the few that may be worst.

No torch.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from torchllm.config import Parallel
from torchllm.planner.schedule import Entry, Kind, flat, rank_order


class Moment(NamedTuple):
    """One action of a rank, and what is under way while it runs, for each of the rank's stages, first to last."""

    stage: int
    """position on the rank of the stage that computes"""
    kind: Kind
    flying: tuple[int, ...]
    """micro batches whose activations are held, that of the action too"""
    deferred: tuple[int, ...]
    """micro batches whose gradients of weights are still to come"""
    graded: tuple[int, ...]
    """whether there are gradients, summed over the micro batches before: NONE, WHOLE, or REDUCED after the last"""


NONE, WHOLE, REDUCED = range(3)
ONE_STAGE = (Moment(0, "F", (1,), (0,), (WHOLE,)), Moment(0, "B", (1,), (0,), (WHOLE,)))
"""without a pipeline"""
IDLE = (Moment(0, "W", (0,), (0,), (NONE,)),)
"""of one stage, when nothing is under way"""
LIMITS = {"ZB-H1": 1, "ZB-H2": 2}
"""micro batches over the ranks: schedules that were measured as an automatic scheduler makes them, which fills this
limit on each rank (arXiv 2401.10241, ZB-1p and ZB-2p)"""
ROUNDS = 3
"""of as many micro batches as there are ranks: a longer step goes through no state that one of these has not"""


def of_rank(schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    """The moments of pipeline rank `rank` that may be its peak."""
    if pp == 1:
        return ONE_STAGE
    if schedule in LIMITS:
        flying = min(micro_batches, LIMITS[schedule] * pp)
        return tuple(moment._replace(flying=(flying,)) for moment in ONE_STAGE)
    few = micro_batches
    if schedule not in ("GPipe", "LoopedBFS"):  # they keep all
        round = micro_batches // max(1, micro_batches // pp)
        few = min(micro_batches, ROUNDS * round + micro_batches % round)
    return _of_few(schedule, pp, stages_per_rank, few, rank)


@cache
def _of_few(schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    parallel = Parallel(pp=pp, schedule=schedule, virtual_stages=stages_per_rank)  # type: ignore[arg-type]
    return tuple(_worst(_moments(rank_order(parallel, micro_batches, rank))))


def _moments(order: Iterable[Entry]) -> list[Moment]:
    actions = list(flat(order))
    stages = sorted({action.stage for action in actions})
    flying, deferred, graded = Counter[int](), Counter[int](), dict.fromkeys(stages, NONE)
    left = Counter(action.stage for action in actions if action.kind in "WB")
    found: dict[Moment, None] = {}
    for kind, stage, _ in actions:
        flying[stage] += kind == "F"
        state = (tuple(flying[s] for s in stages), tuple(deferred[s] for s in stages), tuple(graded.values()))
        found[Moment(stages.index(stage), kind, *state)] = None
        flying[stage] -= kind in "IB"
        deferred[stage] += (kind == "I") - (kind == "W")
        if kind in "WB":
            left[stage] -= 1
            graded[stage] = WHOLE if left[stage] else REDUCED
    return list(found)


def _worst(moments: Iterable[Moment]) -> list[Moment]:
    """For each action those that may be its worst: stages of a rank have much the same sizes, so sums tell. A gradient
    may weigh more than a micro batch, one put off less than one in flight, and of the last stage there are logits."""
    actions: dict[tuple[int, str], list[Moment]] = {}
    for moment in moments:
        actions.setdefault((moment.stage, moment.kind), []).append(moment)
    return list(dict.fromkeys(max(of, key=measure) for of in actions.values() for measure in _MEASURES))


_MEASURES: tuple[Callable[[Moment], tuple[int, ...]], ...] = (
    lambda m: (sum(m.flying), sum(m.deferred), m.graded.count(WHOLE)),
    lambda m: (sum(m.flying) + sum(m.deferred), m.graded.count(WHOLE)),
    lambda m: (m.graded.count(WHOLE), sum(m.flying), sum(m.deferred)),
    lambda m: (sum(m.flying) + 2 * m.flying[-1], m.graded.count(WHOLE)),
)
