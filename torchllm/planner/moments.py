"""When a pipeline rank may hold most: of the states that its order of work goes through, the few that may be worst.

No torch.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from torchllm.config import Parallel
from torchllm.spec.schedules import Entry, Kind, flat, rank_order


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
    return tuple(_worst(rank_order(parallel, micro_batches, rank)))


def _worst(order: Iterable[Entry]) -> list[Moment]:
    """For each action the moments that may be its worst: stages of a rank have much the same sizes, so sums tell. A
    gradient may weigh more than a micro batch, one put off less than one in flight, and of the last stage there are
    logits."""
    actions = list(flat(order))
    left = Counter(action.stage for action in actions if action.kind in "WB")
    place = {stage: at for at, stage in enumerate(sorted(left))}
    flying, deferred, graded = [0] * len(place), [0] * len(place), [NONE] * len(place)
    all_flying = all_deferred = whole = 0
    worst: dict[tuple[int, Kind], list[tuple[tuple[int, ...], Moment]]] = {}
    for kind, stage, _ in actions:
        at = place[stage]
        flying[at] += kind == "F"
        all_flying += kind == "F"
        measures = (
            (all_flying, all_deferred, whole),
            (all_flying + all_deferred, whole),
            (whole, all_flying, all_deferred),
            (all_flying + 2 * flying[-1], whole),
        )
        most = worst.setdefault((at, kind), [((), IDLE[0])] * len(measures))
        for which, measure in enumerate(measures):
            if measure > most[which][0]:
                most[which] = measure, Moment(at, kind, tuple(flying), tuple(deferred), tuple(graded))
        flying[at] -= kind in "IB"
        all_flying -= kind in "IB"
        deferred[at] += (kind == "I") - (kind == "W")
        all_deferred += (kind == "I") - (kind == "W")
        if kind in "WB":
            left[stage] -= 1
            whole += (left[stage] > 0) - (graded[at] == WHOLE)
            graded[at] = WHOLE if left[stage] else REDUCED
    return list(dict.fromkeys(moment for most in worst.values() for _, moment in most))


class Total(NamedTuple):
    """A moment with the stages of one size taken together."""

    size: int
    """of the stage that computes"""
    kind: Kind
    counts: tuple[int, ...]
    """of each size, summed over its stages: micro batches flying; deferred; stages WHOLE; stages REDUCED"""


@cache
def totals(moments: tuple[Moment, ...], size_of: tuple[int, ...]) -> list[Total]:
    """Of moments, those that come to the same once. size_of: of each of the rank's stages, which size it has."""
    of_size = [[at for at, size in enumerate(size_of) if size == one] for one in range(max(size_of) + 1)]
    found: dict[Total, None] = {}
    for stage, kind, flying, deferred, graded in moments:
        whole, reduced = ([state == one for state in graded] for one in (WHOLE, REDUCED))
        numbers = flying, deferred, whole, reduced
        counts = tuple(sum(number[at] for at in places) for number in numbers for places in of_size)
        found[Total(size_of[stage], kind, counts)] = None
    return list(found)
