import math
from itertools import product

import pytest

from torchllm.config import SCHEDULES, Parallel
from torchllm.tools.planner.schedules import Action, Entry, orders
from torchllm.tools.planner.simulate import Simulated, StageTimes, play, simulate_played

SPLIT = [name for name, kind in SCHEDULES.items() if kind.splits_backward]
WHOLE = [name for name, kind in SCHEDULES.items() if not kind.splits_backward]
INTERLEAVED = [name for name, kind in SCHEDULES.items() if kind.most_stages == math.inf]
"""schedules of as many stages per rank as one likes"""
EQUAL = StageTimes(1, 1, 1)


def forward(stage: int, micro_batch: int) -> Entry:
    return (Action("F", stage, micro_batch),)


def backward(stage: int, micro_batch: int) -> Entry:
    return (Action("B", stage, micro_batch),)


def simulate_equal(parallel: Parallel, micro_batches: int, stage: StageTimes) -> Simulated:
    return simulate_played(play(orders(parallel, micro_batches)), [stage] * parallel.stages)


def idle(step: Simulated) -> float:
    """Return the seconds that the busiest rank waits."""
    return step.step - max(step.busy)


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

    The last two need at least two micro batches per rank.
    """
    forward, inputs, weights = stage
    waiting_times = {
        "InterleavedZeroBubble": forward + inputs - weights,
        "ZBVZeroBubble": forward,
        "DualPipeV": forward + 2 * inputs - weights,
    }
    of_whole_backwards = forward + inputs + weights
    return (parallel.pp - 1) * waiting_times.get(parallel.schedule, of_whole_backwards)


def test_bubble_of_whole_backwards_is_the_papers() -> None:
    """(p - 1) / (v m), whatever forward and backward take."""
    for schedule in WHOLE:
        times = StageTimes(3, 2, 5)
        for ranks, rounds, virtual in product([2, 4, 8], [1, 2, 5], [0, 4]):
            stages = virtual if schedule in INTERLEAVED else 0
            parallel = Parallel(pp=ranks, schedule=schedule, virtual_stages=stages)
            micro_batches = rounds * ranks
            step = simulate_equal(parallel, micro_batches, times)
            bubble = (ranks - 1) / (parallel.stages_per_rank * micro_batches)
            assert step.bubble == pytest.approx(bubble, rel=1e-12), schedule
            assert idle(step) == idle_in_theory(parallel, times), schedule


def test_bubble_of_split_backwards_is_the_papers() -> None:
    for schedule in SPLIT:
        split_times = [StageTimes(1, 1, 1), StageTimes(4, 4, 3), StageTimes(2, 2, 1)]
        for ranks, rounds, times in product([2, 4, 8], [2, 3, 8], split_times):
            parallel = Parallel(pp=ranks, schedule=schedule)
            step = simulate_equal(parallel, rounds * ranks, times)
            assert idle(step) == idle_in_theory(parallel, times), schedule


def test_two_ranks_by_hand() -> None:
    """1F1B, two micro batches, F = 1, I = 1, W = 1; the boundary takes 10 each way.

    Rank 0: F0 0-1, F1 1-2, B0 24-26, B1 27-29. Rank 1: F0 11-12, B0 12-14, F1 14-15, B1 15-17.
    """
    order = orders(Parallel(pp=2), 2)
    step = simulate_played(play(order), [EQUAL, EQUAL], [10])
    assert step == Simulated(29, (6, 6), (29, 6))  # rank 1 works from 11 to 17
    assert step.bubble == pytest.approx(2 * 29 / 12 - 1)


def test_a_pair_sends_nothing_before_both_are_computed() -> None:
    """Rank 0: F1 0-1, then F0 1-2 and B1 2-7. Rank 1 has F0's input at 7 from a pair, else at 2; it takes 1."""
    both = forward(0, 0) + backward(0, 1)
    pair = [forward(0, 1), both]
    apart = [forward(0, 1), forward(0, 0), backward(0, 1)]
    last_rank = [forward(1, 1), backward(1, 1), forward(1, 0)]
    stages = [StageTimes(1, 2, 3), StageTimes(1, 0, 0)]
    assert simulate_played(play([pair, last_rank]), stages).step == 8
    assert simulate_played(play([apart, last_rank]), stages).step == 7


def test_stages_on_one_rank_need_no_transfer() -> None:
    order = orders(Parallel(pp=2, schedule="ZBVZeroBubble"), 4)
    stages = [EQUAL] * 4
    without_transfers = simulate_played(play(order), stages)
    at_the_bottom_of_the_v = simulate_played(play(order), stages, [0, 100, 0])
    between_ranks = simulate_played(play(order), stages, [1, 0, 0])
    assert at_the_bottom_of_the_v == without_transfers
    assert between_ranks.step > without_transfers.step


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    first = [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)]
    last = [forward(1, 1), backward(1, 1), forward(1, 0), backward(1, 0)]
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] wait"):
        simulate_played(play([first, last]), [EQUAL] * 2)
