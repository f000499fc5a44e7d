"""Find the moments that may be the peak of a pipeline rank's memory, among the states that its schedule goes through.

No torch.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from torchllm.config import Parallel
from torchllm.tools.planner.schedules import Entry, Kind, flat, rank_order
from torchllm.tools.planner.simulate import first_rounds


class Moment(NamedTuple):
    """One action of a rank, and the work in flight while it runs, for each of the rank's stages, first to last."""

    stage: int
    """position on the rank of the stage that computes"""
    kind: Kind
    flying: tuple[int, ...]
    """micro batches whose activations are held, including the action's own"""
    deferred: tuple[int, ...]
    """micro batches whose gradients of weights are still to come"""
    graded: tuple[int, ...]
    """whether there are gradients, summed over the micro batches before: NONE, WHOLE, or REDUCED after the last"""
    waiting: tuple[bool, ...] = (False,)
    """whether the last action before this one was a forward, of stages that do not compute"""
    ahead: tuple[bool, ...] = (False,)
    """whether the weights are gathered for a first forward that is still to come, of stages that do not compute"""


NONE, WHOLE, REDUCED = range(3)
ONE_STAGE = (Moment(0, "F", (1,), (0,), (WHOLE,)), Moment(0, "B", (1,), (0,), (WHOLE,)))
"""without a pipeline"""
IDLE = (Moment(0, "W", (0,), (0,), (NONE,)),)
"""of one stage, when nothing is under way"""
STAGES_AHEAD = 3
"""stages of a rank that torch's schedules gather at once, the one that computes first (`_add_unshard_reshard`)"""
LIMITS = {"ZB-H1": 1, "ZB-H2": 2}
"""micro batches over the ranks: schedules that were measured as an automatic scheduler makes them, which fills this
limit on each rank (arXiv 2401.10241, ZB-1p and ZB-2p)"""
ROUNDS = 3
"""of one micro batch per rank: a longer step goes through no other states"""


def of_rank(schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    """Return the moments of pipeline rank `rank` that may be its peak."""
    if pp == 1:
        return ONE_STAGE
    if schedule in LIMITS:
        flying = min(micro_batches, LIMITS[schedule] * pp)
        return tuple(moment._replace(flying=(flying,)) for moment in ONE_STAGE)
    keeps_all = schedule in ("GPipe", "LoopedBFS")
    count = micro_batches if keeps_all else first_rounds(micro_batches, pp, ROUNDS)
    return _of_few(schedule, pp, stages_per_rank, count, rank)


@cache
def _of_few(schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int) -> tuple[Moment, ...]:
    parallel = Parallel(pp=pp, schedule=schedule, virtual_stages=stages_per_rank)  # type: ignore[arg-type]  # a schedule's name
    return tuple(_worst(rank_order(parallel, micro_batches, rank)))


class PeakCandidate(NamedTuple):
    """A moment that may be the worst of its kind of action."""

    measure: tuple[int, ...]
    """sums of the work in flight, compared from the left"""
    moment: Moment


def _worst(order: Iterable[Entry]) -> list[Moment]:
    """Return, for each action, the moments that may be its worst.

    The stages of a rank have much the same sizes, so sums over them decide. Several sums are tried, because the weights
    of their parts are not known here: a gradient may weigh more than a micro batch, a deferred one less than one in
    flight or, where blocks are recomputed, more, and the last stage also has logits. Before all stages have begun,
    whole stages may be gathered ahead.
    """
    actions = list(flat(order))
    backwards_left = Counter(action.stage for action in actions if action.kind in "WB")
    position_of = {stage: at for at, stage in enumerate(sorted(backwards_left))}
    stage_count = len(position_of)
    flying = [0] * stage_count
    deferred = [0] * stage_count
    graded = [NONE] * stage_count
    last_kinds = [""] * stage_count
    all_flying = 0
    all_deferred = 0
    whole = 0
    worst: dict[tuple[int, Kind], list[PeakCandidate]] = {}
    for kind, stage, _ in actions:
        at = position_of[stage]
        if kind == "F":
            flying[at] += 1
            all_flying += 1
        of_others = last_kinds[:at] + last_kinds[at + 1 :]
        to_begin, waiting_others = of_others.count(""), of_others.count("F")
        measures = (
            (all_flying, all_deferred, whole),
            (all_flying + all_deferred, whole),
            (all_deferred, all_flying, whole),
            (whole, all_flying, all_deferred),
            (all_flying + 2 * flying[-1], whole),
            (to_begin, all_flying, waiting_others, all_deferred, whole),
        )
        nothing = PeakCandidate((), IDLE[0])
        highest = worst.setdefault((at, kind), [nothing] * len(measures))
        for which, measure in enumerate(measures):
            if measure > highest[which].measure:
                waiting = [last == "F" for last in last_kinds]
                waiting[at] = False
                ahead = [last == "" and other < at + STAGES_AHEAD for other, last in enumerate(last_kinds)]
                ahead[at] = False
                under_way = tuple(flying), tuple(deferred), tuple(graded)
                moment = Moment(at, kind, *under_way, tuple(waiting), tuple(ahead))
                highest[which] = PeakCandidate(measure, moment)
        last_kinds[at] = kind
        if kind in "IB":
            flying[at] -= 1
            all_flying -= 1
        if kind == "I":
            deferred[at] += 1
            all_deferred += 1
        if kind == "W":
            deferred[at] -= 1
            all_deferred -= 1
        if kind in "WB":
            backwards_left[stage] -= 1
            if graded[at] == WHOLE:
                whole -= 1
            graded[at] = REDUCED
            if backwards_left[stage]:
                graded[at] = WHOLE
                whole += 1
    distinct: dict[Moment, None] = {}  # a set that keeps its order
    for candidates in worst.values():
        for candidate in candidates:
            distinct[candidate.moment] = None
    return list(distinct)


class Total(NamedTuple):
    """A moment with the stages of one size taken together."""

    size: int
    """of the stage that computes"""
    kind: Kind
    flying: tuple[int, ...]
    """micro batches whose activations are held, summed over the stages of each size"""
    deferred: tuple[int, ...]
    """micro batches whose gradients of weights are still to come, in the same way"""
    whole: tuple[int, ...]
    """stages of each size whose gradients are WHOLE"""
    reduced: tuple[int, ...]
    """stages of each size whose gradients are REDUCED"""
    waiting: tuple[int, ...] = (0,)
    """stages of each size that do not compute, and whose last action was a forward"""
    ahead: tuple[int, ...] = (0,)
    """stages of each size that do not compute, and whose weights are gathered for their first forward"""


@cache
def totals(moments: tuple[Moment, ...], size_of: tuple[int, ...]) -> list[Total]:
    """Return the moments with the stages of one size taken together; moments that become equal once.

    size_of: for each of the rank's stages, the index of its size.
    """
    size_count = max(size_of) + 1

    def sums(numbers: Sequence[int]) -> tuple[int, ...]:
        """Return, for each size, the sum of the numbers of its stages."""
        result = [0] * size_count
        for size, number in zip(size_of, numbers, strict=True):
            result[size] += number
        return tuple(result)

    distinct: dict[Total, None] = {}  # a set that keeps its order
    for moment in moments:
        whole = [state == WHOLE for state in moment.graded]
        reduced = [state == REDUCED for state in moment.graded]
        under_way = sums(moment.flying), sums(moment.deferred)
        gradients = sums(whole), sums(reduced)
        others = sums(moment.waiting), sums(moment.ahead)
        total = Total(size_of[moment.stage], moment.kind, *under_way, *gradients, *others)
        distinct[total] = None
    return list(distinct)
