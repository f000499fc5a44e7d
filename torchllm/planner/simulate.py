"""Simulate a pipeline schedule: step time, idle time, and what is held in memory. No torch.

A rank computes its order (`spec.schedules`) entry by entry. A forward waits for the previous stage, a gradient of
inputs for the next stage, and for the transfer if that stage is on another rank; sending takes no time of a rank
that computes. The results of a pair are sent when both are computed, as torch does it. Nothing else is simulated: no
gather of parameters, no link that two transfers share.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from torchllm.config import Parallel, PipelineSchedule
from torchllm.spec.schedules import Action, Entry, flat, orders, rank_order


class StageTimes(NamedTuple):
    """Times of one micro batch in one stage, in any unit."""

    forward: float
    input_gradient: float
    weight_gradient: float


class Simulated(NamedTuple):
    """One step of all ranks."""

    step: float
    """from the first forward to the end of the last gradient, in the unit of the stages' times"""
    busy: tuple[float, ...]
    """computing time of each rank"""
    spans: tuple[float, ...]
    """from the first to the last action of each rank: what a step takes where the next one starts without waiting for
    all ranks (arXiv 2401.10241, section 4)"""

    @property
    def bubble(self) -> float:
        """Idle time of all ranks over their computing time, as arXiv 2104.04473 counts it: (p - 1) / m for 1F1B."""
        return len(self.busy) * self.step / sum(self.busy) - 1


Step = tuple[int, int, int, int, int]
"""rank; number of the result that it waits for; 4 x stage + kind, or NOTHING; number of the result that is there after
it; number of the transfer that this takes, -1: none"""
KINDS, NOTHING = "FIWB", -1


class Played(NamedTuple):
    """The orders of all ranks as one list, each action after what it waits for. It does not depend on any times."""

    steps: list[Step]
    results: int
    firsts: list[int]
    """for each rank, the result that its first action waits for"""
    counts: list[Counter[int]]
    """for each rank, its number of actions of each stage and kind"""


def play(orders: Sequence[Sequence[Entry]]) -> Played:
    """Go through the ranks' orders as far as each can. ValueError if ranks wait for each other, which no order of
    `spec.schedules` makes them do.

    A micro batch goes through the stages and back, 2 x stages places: what it brings to place p has the number
    p x micro batches + its own. To place 0 it brings nothing, and nobody waits for what leaves the last.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in flat(order)}
    batches = 1 + max(action.micro_batch for order in orders for action in flat(order))
    back = [*range(len(rank_of)), *reversed(range(len(rank_of)))]
    wires = [min(one, other) if rank_of[one] != rank_of[other] else -1 for one, other in pairwise(back)] + [-1]
    end = len(back) * batches

    def steps(rank: int, order: Sequence[Entry]) -> Iterator[Step]:
        for entry in order:
            together = []
            for kind, stage, number in entry:
                what, place = 4 * stage + KINDS.index(kind), stage if kind == "F" else len(back) - 1 - stage
                need, result = place * batches + number, (place + 1) * batches + number
                together.append((rank, 0, what, end, -1) if kind == "W" else (rank, need, what, result, wires[place]))
            if len(together) == 1:
                yield together[0]
            else:  # the results leave when all are there
                yield from ((*step[:3], end, -1) for step in together)
                yield from ((rank, 0, NOTHING, *step[3:]) for step in together)

    of_ranks = [list(steps(rank, order)) for rank, order in enumerate(orders)]
    left = [of_rank[::-1] for of_rank in of_ranks]
    there = bytearray([True] * batches + [False] * end)
    waiting: dict[int, int] = {}
    played: list[Step] = []
    awake = list(range(len(orders)))
    while awake:
        rank = awake.pop()
        mine = left[rank]
        while mine:
            step = mine[-1]
            if not there[step[1]]:
                waiting[step[1]] = rank
                break
            played.append(mine.pop())
            there[step[3]] = True
            if step[3] in waiting:
                awake.append(waiting.pop(step[3]))
    if waiting:
        raise ValueError(f"ranks {sorted(waiting.values())} wait for what no rank computes before it waits itself")
    counts = [Counter(what for _, _, what, _, _ in of_rank) for of_rank in of_ranks]
    return Played(played, len(there), [of_rank[0][1] for of_rank in of_ranks], counts)


@lru_cache(maxsize=16)  # some ten megabytes each
def played(schedule: PipelineSchedule, pp: int, virtual_stages: int, micro_batches: int) -> Played:
    """`play` of a schedule's orders, remembered: many layouts share one."""
    return play(orders(Parallel(pp=pp, schedule=schedule, virtual_stages=virtual_stages), micro_batches))


def simulate_played(played: Played, stages: Sequence[StageTimes], transfers: Sequence[float] = ()) -> Simulated:
    """Return when everything ends. `transfers`: time between each stage and the next, either way; empty: none."""
    times = [time for f, i, w in stages for time in (f, i, w, i + w)] + [0.0]  # the last: of nothing
    delay = [*(transfers or [0.0] * (len(stages) - 1)), 0.0]  # the last: of what stays on its rank
    arrived, clock = [0.0] * played.results, [0.0] * len(played.counts)
    for rank, need, what, result, wire in played.steps:
        now = clock[rank]
        if arrived[need] > now:
            now = arrived[need]
        clock[rank] = now = now + times[what]
        arrived[result] = now + delay[wire]
    busy = (sum(times[what] * count for what, count in counts.items()) for counts in played.counts)
    starts = (arrived[need] for need in played.firsts)
    return Simulated(max(clock), tuple(busy), tuple(end - start for end, start in zip(clock, starts, strict=True)))


def simulate(
    orders: Sequence[Sequence[Entry]], stages: Sequence[StageTimes], transfers: Sequence[float] = ()
) -> Simulated:
    """Simulate one step of these orders."""
    return simulate_played(play(orders), stages, transfers)


def idle_in_theory(parallel: Parallel, stage: StageTimes) -> float:
    """Return how long a rank waits in a step of equal stages without transfers, in the unit of `stage`.

    `stage`: times of one stage. These are published closed forms, for any number of micro batches and of stages per
    rank. Divided by m times a rank's work on one micro batch it is the bubble. With p ranks and B = I + W:

    - GPipe, 1F1B, Interleaved1F1B, LoopedBFS: (p - 1) (F + B), so the bubble is (p - 1) / (v m) with v stages per rank
      (arXiv 2104.04473, section 2.2).
    - InterleavedZeroBubble: (p - 1) (F + I - W) (arXiv 2401.10241, ZB-H1), where F = I >= W.
    - ZBVZeroBubble: (p - 1) F, before the first action and after the last (the same, section 6), where F = I >= W.
    - DualPipeV: (p - 1) (F + B + B - 3 W) (github.com/deepseek-ai/DualPipe, which counts the ranks unfolded, and may
      compute a pair faster than F + B; torch does not), where F = I >= W.

    The last two need twice as many micro batches as ranks.
    """
    forward, inputs, weights = stage
    wait = {
        "InterleavedZeroBubble": forward + inputs - weights,
        "ZBVZeroBubble": forward,
        "DualPipeV": forward + 2 * inputs - weights,
    }.get(parallel.schedule, forward + inputs + weights)
    return (parallel.pp - 1) * wait


class StagePeak(NamedTuple):
    """The most that a stage holds at once."""

    in_flight: int
    """micro batches between their forward and their gradient of inputs: their activations are held"""
    deferred: int
    """micro batches between their gradients of inputs and of weights: what the latter need is held"""


def peaks(order: Iterable[Entry]) -> dict[int, StagePeak]:
    """Return the most that each stage of a rank holds; the stages' peaks need not coincide."""
    found: dict[int, StagePeak] = {}
    for action, in_flight, deferred in _held(order):
        stage = action.stage
        before = found.get(stage, StagePeak(0, 0))
        found[stage] = StagePeak(max(before.in_flight, in_flight[stage]), max(before.deferred, deferred[stage]))
    return found


@lru_cache(maxsize=4096)
def most_in_flight(
    schedule: PipelineSchedule, pp: int, virtual_stages: int, micro_batches: int, rank: int
) -> tuple[int, ...]:
    """Return, for each of a rank's stages, first to last, the micro batches in flight at its peak.

    They are reached in the first three rounds; GPipe and LoopedBFS keep all.
    """
    if pp > 1 and schedule in ("GPipe", "LoopedBFS"):
        return (micro_batches,) * virtual_stages
    round = micro_batches // max(1, micro_batches // pp)
    few = min(micro_batches, 3 * round + micro_batches % round)
    order = rank_order(Parallel(pp=pp, schedule=schedule, virtual_stages=virtual_stages), few, rank)
    return tuple(peak.in_flight for _, peak in sorted(peaks(order).items()))


def peak_memory(order: Iterable[Entry], activations: Mapping[int, float], deferred: Mapping[int, float]) -> float:
    """Return the most that a rank holds at once, in the unit of what one micro batch leaves in each stage.

    `activations`: what it leaves after its forward; `deferred`: after its gradient of inputs, for that of the weights.
    """
    most = 0.0
    for _, flying, late in _held(order):
        held = sum(count * activations[stage] for stage, count in flying.items())
        most = max(most, held + sum(count * deferred[stage] for stage, count in late.items()))
    return most


def _held(order: Iterable[Entry]) -> Iterable[tuple[Action, Counter[int], Counter[int]]]:
    """Yield each action with the micro batches in flight and deferred after it, by stage (always the same counters)."""
    in_flight, deferred = Counter[int](), Counter[int]()
    for action in flat(order):
        in_flight[action.stage] += {"F": 1, "I": -1, "W": 0, "B": -1}[action.kind]
        deferred[action.stage] += {"F": 0, "I": 1, "W": -1, "B": 0}[action.kind]
        yield action, in_flight, deferred
