"""Simulate a pipeline schedule: step time and idle time. No torch.

A rank computes its order (`schedules`) entry by entry. A forward waits for the previous stage, a gradient of
inputs for the next stage, and for the transfer if that stage is on another rank; sending takes no time of a rank
that computes. The results of a pair are sent when both are computed, as torch does it. Nothing else is simulated: no
gather of parameters, no link that two transfers share.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torchllm.config import Parallel, PipelineSchedule
from torchllm.tools.planner.schedules import Action, Entry, flat, orders


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
    """from the first to the last action of each rank: the time of a step if the next one starts without waiting for
    all ranks (arXiv 2401.10241, section 4)"""

    @property
    def bubble(self) -> float:
        """Idle time of all ranks over their computing time, as arXiv 2104.04473 counts it: (p - 1) / m for 1F1B."""
        return len(self.busy) * self.step / sum(self.busy) - 1


KIND_OF_WORK = {"F": 0, "I": 1, "W": 2, "B": 3}
"""position of each kind of action among the times of a stage"""
NO_WORK = -1
"""work of a step that computes nothing"""
NO_TRANSFER = -1
"""transfer of a result that stays on its rank"""
AT_HAND = 0
"""number of a result that exists from the start: the input of micro batch 0 on the first stage"""


class Step(NamedTuple):
    """One action of a rank, in numbers: they are indices of the lists that `simulate_played` fills."""

    rank: int
    needed: int
    """number of the result that it waits for"""
    work: int
    """4 x stage + kind, or NO_WORK"""
    result: int
    """number of the result that is there after it"""
    transfer: int
    """the boundary that the result crosses to another rank, by the stage before it; or NO_TRANSFER"""


class Played(NamedTuple):
    """The orders of all ranks as one list, each step after the one that it waits for. It does not depend on times."""

    steps: list[Step]
    results: int
    """number of results"""
    firsts: list[int]
    """for each rank, the result that its first action waits for"""
    counts: list[Counter[int]]
    """for each rank, its number of steps of each work"""


class Route(NamedTuple):
    """The way of the micro batches through the stages and back. It has 2 x stages stops.

    The input of a micro batch at a stop is a result, numbered stop x micro batches + micro batch. The inputs of stop 0
    exist from the start. No step waits for the outputs of the last stop.
    """

    stages: int
    micro_batches: int
    transfers: list[int]
    """for each stop, the transfer from it to the next"""

    @property
    def unused(self) -> int:
        """Number of a result that no step waits for: the output of micro batch 0 at the last stop."""
        return 2 * self.stages * self.micro_batches

    @property
    def results(self) -> int:
        """Number of results: the inputs of each stop, and the outputs of the last."""
        return self.unused + self.micro_batches

    def step_of(self, action: Action, rank: int) -> Step:
        """Return an action as a step. The gradient of weights neither waits nor sends."""
        kind, stage, micro_batch = action
        work = 4 * stage + KIND_OF_WORK[kind]
        if kind == "W":
            return Step(rank, AT_HAND, work, self.unused, NO_TRANSFER)
        stop = stage if kind == "F" else 2 * self.stages - 1 - stage
        needed = stop * self.micro_batches + micro_batch
        result = needed + self.micro_batches
        return Step(rank, needed, work, result, self.transfers[stop])


def route_of(orders: Sequence[Sequence[Entry]]) -> Route:
    """Return the way of the micro batches through the stages that the ranks' orders compute."""
    rank_of = {}
    last_micro_batch = 0
    for rank, order in enumerate(orders):
        for action in flat(order):
            rank_of[action.stage] = rank
            last_micro_batch = max(last_micro_batch, action.micro_batch)
    stages = len(rank_of)
    transfers = []
    for stage in range(stages - 1):
        crosses_ranks = rank_of[stage] != rank_of[stage + 1]
        transfers.append(stage if crosses_ranks else NO_TRANSFER)
    turn = [NO_TRANSFER]  # from the last stage's forward to its backward
    end = [NO_TRANSFER]
    return Route(stages, last_micro_batch + 1, transfers + turn + transfers[::-1] + end)


def steps_of_order(order: Sequence[Entry], rank: int, route: Route) -> list[Step]:
    """Return the steps of one rank. The results of a pair of actions leave when both are computed."""
    steps = []
    for entry in order:
        if len(entry) == 1:
            steps.append(route.step_of(entry[0], rank))
            continue
        computed = [route.step_of(action, rank) for action in entry]
        for step in computed:
            steps.append(Step(rank, step.needed, step.work, route.unused, NO_TRANSFER))
        for step in computed:
            steps.append(Step(rank, AT_HAND, NO_WORK, step.result, step.transfer))
    return steps


def by_need(steps_of_ranks: Sequence[Sequence[Step]], route: Route) -> list[Step]:
    """Return the steps of all ranks, each after the one whose result it needs. ValueError if there is no such order.

    Each rank goes on until a result is missing. The rank that computes this result wakes it.
    """
    is_there = bytearray(route.results)
    is_there[: route.micro_batches] = b"\1" * route.micro_batches
    remaining = [list(reversed(steps)) for steps in steps_of_ranks]  # the next one last: it can be popped
    waiting_rank: dict[int, int] = {}
    awake = list(range(len(remaining)))
    ordered: list[Step] = []
    while awake:
        rank = awake.pop()
        steps = remaining[rank]
        while steps:
            step = steps[-1]
            if not is_there[step.needed]:
                waiting_rank[step.needed] = rank
                break
            ordered.append(steps.pop())
            is_there[step.result] = True
            if step.result in waiting_rank:
                awake.append(waiting_rank.pop(step.result))
    if waiting_rank:
        ranks = sorted(waiting_rank.values())
        raise ValueError(f"ranks {ranks} wait for each other: no order of their actions is possible")
    return ordered


def play(orders: Sequence[Sequence[Entry]]) -> Played:
    """Return the ranks' orders as one list of steps.

    ValueError if ranks wait for each other, which no order of `schedules` makes them do.
    """
    route = route_of(orders)
    steps_of_ranks = [steps_of_order(order, rank, route) for rank, order in enumerate(orders)]
    firsts = [steps[0].needed for steps in steps_of_ranks]
    counts = [Counter(step.work for step in steps) for steps in steps_of_ranks]
    return Played(by_need(steps_of_ranks, route), route.results, firsts, counts)


def first_rounds(micro_batches: int, pp: int, rounds: int) -> int:
    """Return a number of micro batches that simulates like all: the first rounds of a schedule, and the incomplete one.

    A round has one micro batch per pipeline rank, or a few more if they do not divide. A schedule repeats itself
    after each round.
    """
    size = round_size(micro_batches, pp)
    return min(micro_batches, rounds * size + micro_batches % size)


def round_size(micro_batches: int, pp: int) -> int:
    """Return the micro batches after which an interleaved schedule repeats itself."""
    rounds = max(1, micro_batches // pp)
    return micro_batches // rounds


@lru_cache(maxsize=16)  # some ten megabytes each
def played(schedule: PipelineSchedule, pp: int, virtual_stages: int, micro_batches: int) -> Played:
    """`play` of a schedule's orders, remembered: many layouts share one."""
    parallel = Parallel(pp=pp, schedule=schedule, virtual_stages=virtual_stages)
    return play(orders(parallel, micro_batches))


def simulate_played(played: Played, stages: Sequence[StageTimes], transfers: Sequence[float] = ()) -> Simulated:
    """Return when everything ends. `transfers`: time between each stage and the next, either way; empty: none."""
    times = times_of_works(stages)
    delays = [*transfers] if transfers else [0.0] * (len(stages) - 1)
    delays.append(0.0)  # at the index NO_TRANSFER
    arrived = [0.0] * played.results
    clocks = [0.0] * len(played.counts)
    for rank, needed, work, result, transfer in played.steps:
        time = clocks[rank]
        if arrived[needed] > time:
            time = arrived[needed]
        time += times[work]
        clocks[rank] = time
        arrived[result] = time + delays[transfer]
    busy = [sum(times[work] * count for work, count in counts.items()) for counts in played.counts]
    spans = [end - arrived[first] for end, first in zip(clocks, played.firsts, strict=True)]
    return Simulated(max(clocks), tuple(busy), tuple(spans))


def times_of_works(stages: Sequence[StageTimes]) -> list[float]:
    """Return the time of each work: four per stage, in the order of `KIND_OF_WORK`, and 0 at the index NO_WORK."""
    times = []
    for stage in stages:
        both_gradients = stage.input_gradient + stage.weight_gradient
        times += [stage.forward, stage.input_gradient, stage.weight_gradient, both_gradients]
    times.append(0.0)
    return times
