"""What a pipeline schedule costs: step time, idle time, and what waits in memory. No torch.

A rank computes its order (`planner.schedule`) entry by entry. A forward waits for the stage before, a gradient of
inputs for the stage after, and for the transfer where that stage is on another rank; sending takes no time of a rank
that computes. The results of a pair leave when both are there, as torch sends them. Nothing else is in it: no gather
of parameters, no link that two transfers share.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torchllm.config import Parallel
from torchllm.planner.schedule import Action, Entry, flat


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

    @property
    def bubble(self) -> float:
        """Idle time of all ranks over their computing time, as arXiv 2104.04473 counts it: (p - 1) / m for 1F1B."""
        return len(self.busy) * self.step / sum(self.busy) - 1


def simulate(
    orders: Sequence[Sequence[Entry]], stages: Sequence[StageTimes], transfers: Sequence[float] = ()
) -> Simulated:
    """Go through the ranks' orders. `transfers`: time between each stage and the next, either way; empty: none.

    ValueError where ranks wait for each other: never in an order of `planner.schedule`.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in flat(order)}
    times = [{"F": f, "I": i, "W": w, "B": i + w} for f, i, w in stages]
    last = len(stages) - 1
    delay = [transfers[at] if transfers and rank_of[at] != rank_of[at + 1] else 0.0 for at in range(last)]
    arrived: dict[tuple[bool, int, int], float] = {}  # (forward?, stage, micro batch): when its input is there
    waiting: dict[tuple[bool, int, int], int] = {}
    clock, done, awake = [0.0] * len(orders), [0] * len(orders), list(range(len(orders)))
    while awake:
        rank = awake.pop()
        for entry in orders[rank][done[rank] :]:
            needs = [_input(action) for action in entry]
            missing = next((need for need in needs if need and need not in arrived), None)
            if missing:
                waiting[missing] = rank
                break
            now = clock[rank]
            for action, need in zip(entry, needs, strict=True):
                now = max(now, arrived[need] if need else 0.0) + times[action.stage][action.kind]
            clock[rank] = now
            done[rank] += 1
            for kind, stage, number in entry:
                if kind == "F":
                    key = (True, stage + 1, number) if stage < last else (False, last, number)
                    arrived[key] = now + (delay[stage] if stage < last else 0.0)
                elif kind in "IB":
                    key = (False, stage - 1, number)
                    arrived[key] = now + (delay[stage - 1] if stage else 0.0)
                else:
                    continue
                if key in waiting:
                    awake.append(waiting.pop(key))
    if waiting:
        raise ValueError(f"ranks {sorted(waiting.values())} wait for what no rank computes before it waits itself")
    busy = (sum(times[action.stage][action.kind] for action in flat(order)) for order in orders)
    return Simulated(max(clock), tuple(busy))


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
