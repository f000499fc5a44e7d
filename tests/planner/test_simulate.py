import gc
import math
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchllm.config import SCHEDULES, Parallel, PipelineSchedule
from torchllm.planner.simulate import (
    Simulated,
    StagePeak,
    StageTimes,
    idle_in_theory,
    peak_memory,
    peaks,
    simulate,
)
from torchllm.spec.schedules import Action, Entry, orders

NAMES = list(SCHEDULES)
SPLIT = [name for name, kind in SCHEDULES.items() if kind.splits_backward]
WHOLE = [name for name, kind in SCHEDULES.items() if not kind.splits_backward]


def equal(parallel: Parallel, micro_batches: int, stage: StageTimes) -> Simulated:
    """A step of equal stages."""
    return simulate(orders(parallel, micro_batches), [stage] * parallel.stages)


@pytest.mark.parametrize("schedule", WHOLE)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("virtual", [0, 4])
def test_bubble_of_whole_backwards_is_the_papers(
    schedule: PipelineSchedule, ranks: int, rounds: int, virtual: int
) -> None:
    """(p - 1) / (v m), whatever forward and backward take."""
    stages = virtual if SCHEDULES[schedule].most_stages == math.inf else 0
    parallel, micro_batches = Parallel(pp=ranks, schedule=schedule, virtual_stages=stages), rounds * ranks
    times = StageTimes(3, 2, 5)
    found = equal(parallel, micro_batches, times)
    assert found.bubble == pytest.approx((ranks - 1) / (parallel.stages_per_rank * micro_batches), rel=1e-12)
    assert found.step - max(found.busy) == idle_in_theory(parallel, times)


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("times", [StageTimes(1, 1, 1), StageTimes(4, 4, 3), StageTimes(2, 2, 1)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 8])
def test_bubble_of_split_backwards_is_the_papers(
    schedule: PipelineSchedule, times: StageTimes, ranks: int, rounds: int
) -> None:
    parallel = Parallel(pp=ranks, schedule=schedule)
    found = equal(parallel, rounds * ranks, times)
    assert found.step - max(found.busy) == idle_in_theory(parallel, times)


def test_a_zero_bubble_of_the_paper_needs_equal_parts() -> None:
    """Not a closed form: ZB-V with slow gradients of weights waits for them too."""
    parallel, times = Parallel(pp=4, schedule="ZBVZeroBubble"), StageTimes(1, 1, 2)
    found = equal(parallel, 8, times)
    assert found.step - max(found.busy) > idle_in_theory(parallel, times)


def test_two_ranks_by_hand() -> None:
    """1F1B, two micro batches, F = 1, I = 1, W = 1; the boundary takes 10 each way.

    Rank 0: F0 0-1, F1 1-2, B0 24-26, B1 27-29. Rank 1: F0 11-12, B0 12-14, F1 14-15, B1 15-17.
    """
    order, stage = orders(Parallel(pp=2), 2), StageTimes(1, 1, 1)
    found = simulate(order, [stage, stage], [10])
    assert found == Simulated(29, (6, 6), (29, 6))  # rank 1 works from 11 to 17
    assert found.bubble == pytest.approx(2 * 29 / 12 - 1)
    slow_head = [stage, StageTimes(2, 3, 1)]  # rank 1: F0 1-3, B0 3-7, F1 7-9, B1 9-13; rank 0: B1 13-15
    assert simulate(order, slow_head) == Simulated(15, (6, 12), (15, 12))


def test_a_pair_sends_nothing_before_both_are_computed() -> None:
    """Rank 0: F1 0-1, then F0 1-2 and B1 2-7. Rank 1 has F0's input at 7 from a pair, else at 2; it takes 1."""
    pair: list[Entry] = [(Action("F", 0, 1),), (Action("F", 0, 0), Action("B", 0, 1))]
    alone: list[Entry] = [(Action("F", 0, 1),), (Action("F", 0, 0),), (Action("B", 0, 1),)]
    after: list[Entry] = [(Action("F", 1, 1),), (Action("B", 1, 1),), (Action("F", 1, 0),)]
    stages = [StageTimes(1, 2, 3), StageTimes(1, 0, 0)]
    assert [simulate([order, after], stages).step for order in (pair, alone)] == [8, 7]


def test_stages_on_one_rank_need_no_transfer() -> None:
    parallel, stage = Parallel(pp=2, schedule="ZBVZeroBubble"), StageTimes(1, 1, 1)
    order = orders(parallel, 4)
    without = simulate(order, [stage] * 4)
    assert simulate(order, [stage] * 4, [0, 100, 0]) == without  # the bottom of the V
    assert simulate(order, [stage] * 4, [1, 0, 0]).step > without.step


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    first: list[Entry] = [(Action("F", 0, 0),), (Action("B", 0, 0),), (Action("F", 0, 1),), (Action("B", 0, 1),)]
    last: list[Entry] = [(Action("F", 1, 1),), (Action("B", 1, 1),), (Action("F", 1, 0),), (Action("B", 1, 0),)]
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait"):
        simulate([first, last], [StageTimes(1, 1, 1)] * 2)


PARTS = st.tuples(*[st.integers(0, 9)] * 3)
"""whole numbers: sums are exact, and comparisons need no tolerance"""


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[Entry]], list[StageTimes], list[int]]:
    """Orders that the config allows, stages of any times, transfers."""
    schedule = draw(st.sampled_from(NAMES))
    ranks, virtual = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    looped = SCHEDULES[schedule].most_stages == math.inf
    parallel = Parallel(pp=ranks, schedule=schedule, virtual_stages=virtual if looped else 0)
    found = orders(parallel, ranks * draw(st.integers(2, 3)))
    times = draw(st.lists(PARTS, min_size=parallel.stages, max_size=parallel.stages))
    transfers = draw(st.lists(st.integers(0, 5), min_size=parallel.stages - 1, max_size=parallel.stages - 1))
    return found, [StageTimes(*parts) for parts in times], transfers


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_slower_parts_never_make_a_faster_step(
    layout: tuple[list[list[Entry]], list[StageTimes], list[int]], data: st.DataObject
) -> None:
    order, stages, transfers = layout
    step = simulate(order, stages, transfers).step
    at, part = data.draw(st.integers(0, len(stages) - 1)), data.draw(st.sampled_from(StageTimes._fields))
    slower = list(stages)
    slower[at] = stages[at]._replace(**{part: getattr(stages[at], part) + 3})
    assert simulate(order, slower, transfers).step >= step
    at = data.draw(st.integers(0, len(transfers) - 1))
    assert simulate(order, stages, [*transfers[:at], transfers[at] + 3, *transfers[at + 1 :]]).step >= step


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_a_step_takes_at_least_its_busiest_rank_and_its_longest_chain(
    layout: tuple[list[list[Entry]], list[StageTimes], list[int]],
) -> None:
    order, stages, transfers = layout
    found = simulate(order, stages, transfers)
    assert found.step >= max(found.busy)
    assert found.step >= sum(stage.forward + stage.input_gradient for stage in stages)  # micro batch 0, there and back
    assert simulate(order, stages).step <= sum(found.busy)  # somebody always computes


def held(schedule: PipelineSchedule, ranks: int, micro_batches: int, virtual: int = 0) -> list[dict[int, StagePeak]]:
    """Each rank's peaks."""
    return [
        peaks(order) for order in orders(Parallel(pp=ranks, schedule=schedule, virtual_stages=virtual), micro_batches)
    ]


def in_flight(found: Sequence[dict[int, StagePeak]]) -> list[int]:
    return [sum(peak.in_flight for peak in rank.values()) for rank in found]


def test_micro_batches_in_flight() -> None:
    """GPipe: all; 1F1B: p - r; Interleaved1F1B: v p + p - 1 of 1/v the size (arXiv 2205.05198)."""
    assert in_flight(held("GPipe", 4, 12)) == [12] * 4
    assert in_flight(held("1F1B", 4, 12)) == [4, 3, 2, 1]
    assert held("LoopedBFS", 2, 6)[0] == {0: StagePeak(6, 0), 2: StagePeak(6, 0)}
    ranks, virtual = 4, 3
    (order, *_) = orders(Parallel(pp=ranks, schedule="Interleaved1F1B", virtual_stages=virtual), 12)
    ones = dict.fromkeys(range(ranks * virtual), 1.0)
    assert peak_memory(order, ones, ones) == virtual * ranks + ranks - 1


def test_zero_bubble_holds_what_waits_for_its_weights() -> None:
    found = held("InterleavedZeroBubble", 4, 8)
    assert [max(peak.deferred for peak in rank.values()) for rank in found] == [1, 2, 3, 4]


def test_peak_memory_counts_what_is_there_at_one_time() -> None:
    order: list[Entry] = [
        *[(Action("F", 0, 0),), (Action("F", 0, 1),), (Action("I", 0, 0),)],  # 10, 20, then 10 + 4
        *[(Action("I", 0, 1),), (Action("F", 2, 0),), (Action("W", 0, 0),)],  # 8, 8 + 3, 4 + 3
        *[(Action("W", 0, 1),), (Action("B", 2, 0),)],
    ]
    assert peak_memory(order, {0: 10, 2: 3}, {0: 4, 2: 1}) == 20
    assert peak_memory(order, {0: 1, 2: 3}, {0: 4, 2: 1}) == 11
    assert peaks(order) == {0: StagePeak(2, 2), 2: StagePeak(1, 0)}


def test_the_largest_pipelines_are_simulated_at_once() -> None:
    """16 ranks, 8 stages each, 128 micro batches: 32,768 actions, 0.15 s on an idle core."""
    parallel = Parallel(pp=16, schedule="Interleaved1F1B", virtual_stages=8)

    def seconds(micro_batches: int) -> float:
        gc.collect()
        gc.disable()  # a collection would look through all that other tests have made
        start = time.process_time()
        equal(parallel, micro_batches, StageTimes(1, 1, 1))
        taken = time.process_time() - start
        gc.enable()
        return taken

    fewer = min(seconds(64) for _ in range(3))
    assert min(seconds(128) for _ in range(3)) < 4 * fewer  # twice the actions, and nothing that grows much faster
