"""What a pipeline schedule costs: step time, idle time, and what waits in memory. No torch.

A rank computes its order (`planner.schedule`) entry by entry. A forward waits for the stage before, a gradient of
inputs for the stage after, and for the transfer where that stage is on another rank; sending takes no time of a rank
that computes. The results of a pair leave when both are there, as torch sends them. Nothing else is in it: no gather
of parameters, no link that two transfers share.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torchllm.config import Parallel, PipelineSchedule
from torchllm.planner.schedule import Action, Entry, flat, orders, rank_order


class StageTimes(NamedTuple):
    """What one micro batch takes in one stage, in any one unit of time."""

    forward: float
    input_gradient: float
    weight_gradient: float


class Simulated(NamedTuple):
    """One step of all ranks."""

    step: float
    """from the first forward to the end of the last gradient, in the unit of the stages' times"""
    busy: tuple[float, ...]
    """time that each rank computes"""
    spans: tuple[float, ...]
    """from the first to the last action of each rank: what a step takes where the next one starts without waiting for
    all ranks (arXiv 2401.10241, section 4)"""

    @property
    def bubble(self) -> float:
        """Idle time of all ranks over their computing time, as arXiv 2104.04473 counts it: (p - 1) / m for 1F1B."""
        return len(self.busy) * self.step / sum(self.busy) - 1


class Played(NamedTuple):
    """The orders of all ranks as one list, each action after what it waits for: the same whatever the times are."""

    actions: tuple[tuple[int, int, int, tuple[tuple[int, int], ...]], ...]
    """rank; number of the result that it waits for, 0: none; 4 x stage + kind; results that are there after it, each
    with the number of the transfer that they take, -1: none"""
    results: int
    counts: tuple[Counter[int], ...]
    """of each rank, how many actions of each stage and kind"""


KINDS = "FIWB"


def play(orders: Sequence[Sequence[Entry]]) -> Played:
    """Go through the ranks' orders as far as each can. ValueError where ranks wait for each other: never in an order of
    `planner.schedule`."""
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in flat(order)}
    last = len(rank_of) - 1
    numbers: dict[tuple[bool, int, int], int] = {}  # (forward?, stage, micro batch): its input
    waiting: dict[tuple[bool, int, int], int] = {}
    actions, done, awake = [], [0] * len(orders), list(range(len(orders)))
    while awake:
        rank = awake.pop()
        for entry in orders[rank][done[rank] :]:
            needs = [_input(action) for action in entry]
            missing = next((need for need in needs if need and need not in numbers), None)
            if missing:
                waiting[missing] = rank
                break
            done[rank] += 1
            outs = []
            for kind, stage, number in entry:
                if kind == "F":
                    to, key = stage + 1, ((True, stage + 1, number) if stage < last else (False, last, number))
                elif kind in "IB":
                    to, key = stage - 1, (False, stage - 1, number)
                else:
                    continue
                wire = min(stage, to) if rank_of.get(to, rank) != rank else -1
                numbers[key] = len(numbers) + 1
                outs.append((numbers[key], wire))
                if key in waiting:
                    awake.append(waiting.pop(key))
            for at, (action, need) in enumerate(zip(entry, needs, strict=True), start=1):
                what = 4 * action.stage + KINDS.index(action.kind)
                leave = tuple(outs) if at == len(entry) else ()
                actions.append((rank, numbers[need] if need else 0, what, leave))
    if waiting:
        raise ValueError(f"ranks {sorted(waiting.values())} wait for what no rank computes before it waits itself")
    counts = [Counter(4 * action.stage + KINDS.index(action.kind) for action in flat(order)) for order in orders]
    return Played(tuple(actions), len(numbers), tuple(counts))


@lru_cache(maxsize=16)  # some ten megabytes each
def played(schedule: PipelineSchedule, pp: int, virtual_stages: int, micro_batches: int) -> Played:
    """`play` of a schedule's orders, remembered: many layouts share one."""
    return play(orders(Parallel(pp=pp, schedule=schedule, virtual_stages=virtual_stages), micro_batches))


def simulate_played(played: Played, stages: Sequence[StageTimes], transfers: Sequence[float] = ()) -> Simulated:
    """When everything ends. `transfers`: time between each stage and the next, either way; empty: none."""
    times = [time for f, i, w in stages for time in (f, i, w, i + w)]
    delay = [*(transfers or [0.0] * (len(stages) - 1)), 0.0]  # the last: of what stays on its rank
    arrived, clock = [0.0] * (played.results + 1), [0.0] * len(played.counts)
    starts: list[float] = [-1.0] * len(clock)
    for rank, need, what, outs in played.actions:
        now = clock[rank]
        if arrived[need] > now:
            now = arrived[need]
        if starts[rank] < 0:
            starts[rank] = now
        clock[rank] = now = now + times[what]
        for result, wire in outs:
            arrived[result] = now + delay[wire]
    busy = (sum(times[what] * count for what, count in counts.items()) for counts in played.counts)
    return Simulated(max(clock), tuple(busy), tuple(end - start for end, start in zip(clock, starts, strict=True)))


def simulate(
    orders: Sequence[Sequence[Entry]], stages: Sequence[StageTimes], transfers: Sequence[float] = ()
) -> Simulated:
    """One step of these orders: `simulate_played(play(orders), stages, transfers)`."""
    return simulate_played(play(orders), stages, transfers)


def idle_in_theory(parallel: Parallel, stage: StageTimes) -> float:
    """What a rank waits in a step of equal stages and no transfers, in the unit of `stage`, one stage's times.

    The papers' closed forms, whatever the micro batches and the stages a rank; over m times a rank's work on one micro
    batch it is the bubble. With p ranks and B = I + W:

    - GPipe, 1F1B, Interleaved1F1B, LoopedBFS: (p - 1) (F + B), so the bubble is (p - 1) / (v m) with v stages a rank
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


def _input(action: Action) -> tuple[bool, int, int] | None:
    """What an action waits for; None where there is nothing: tokens, and gradients of weights."""
    kind, stage, number = action
    return None if kind == "W" or (kind == "F" and stage == 0) else (kind == "F", stage, number)


class Peak(NamedTuple):
    """The most that a stage holds at a time."""

    in_flight: int
    """micro batches whose forward has been and whose gradient of inputs has not: their activations"""
    deferred: int
    """micro batches whose gradient of weights is still to come: the inputs and output gradients of the matrices"""


def peaks(order: Iterable[Entry]) -> dict[int, Peak]:
    """What each stage of a rank holds at most; the stages' peaks need not be at one time."""
    found: dict[int, Peak] = {}
    for action, in_flight, deferred in _held(order):
        stage = action.stage
        before = found.get(stage, Peak(0, 0))
        found[stage] = Peak(max(before.in_flight, in_flight[stage]), max(before.deferred, deferred[stage]))
    return found


@lru_cache(maxsize=4096)
def most_in_flight(
    schedule: PipelineSchedule, pp: int, virtual_stages: int, micro_batches: int, rank: int
) -> tuple[int, ...]:
    """Of each of a rank's stages, first to last, the micro batches in flight at its peak.

    They are reached in the first three rounds; GPipe and LoopedBFS keep all.
    """
    if pp > 1 and schedule in ("GPipe", "LoopedBFS"):
        return (micro_batches,) * virtual_stages
    round = micro_batches // max(1, micro_batches // pp)
    few = min(micro_batches, 3 * round + micro_batches % round)
    order = rank_order(Parallel(pp=pp, schedule=schedule, virtual_stages=virtual_stages), few, rank)
    return tuple(peak.in_flight for _, peak in sorted(peaks(order).items()))


def peak_memory(order: Iterable[Entry], activations: Mapping[int, float], deferred: Mapping[int, float]) -> float:
    """The most that a rank holds at a time, in the unit of what one micro batch leaves in each stage: after its forward
    (`activations`), and after its gradient of inputs for that of the weights (`deferred`)."""
    most = 0.0
    for _, flying, late in _held(order):
        held = sum(count * activations[stage] for stage, count in flying.items())
        most = max(most, held + sum(count * deferred[stage] for stage, count in late.items()))
    return most


def _held(order: Iterable[Entry]) -> Iterable[tuple[Action, Counter[int], Counter[int]]]:
    """After each action: micro batches in flight and deferred, by stage (the same counters every time)."""
    in_flight, deferred = Counter[int](), Counter[int]()
    for action in flat(order):
        in_flight[action.stage] += {"F": 1, "I": -1, "W": 0, "B": -1}[action.kind]
        deferred[action.stage] += {"F": 0, "I": 1, "W": -1, "B": 0}[action.kind]
        yield action, in_flight, deferred
