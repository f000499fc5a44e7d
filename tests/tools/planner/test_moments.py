"""The states of a schedule that may be its peak, by hand."""

import pytest

from torchllm.tools.planner.moments import NONE, REDUCED, WHOLE, Moment, Total, of_rank, totals

pytestmark = pytest.mark.quick


def test_moments_of_a_pipeline() -> None:
    """By hand, two ranks and four micro batches."""
    forward = Moment(0, "F", (2,), (0,), (WHOLE,))
    backward = Moment(0, "B", (2,), (0,), (WHOLE,))
    assert set(of_rank("1F1B", 2, 1, 4, 0)) == {forward, backward}
    everything = of_rank("GPipe", 2, 1, 4, 1)
    assert Moment(0, "B", (4,), (0,), (NONE,)) in everything
    assert Moment(0, "B", (3,), (0,), (WHOLE,)) in everything


def test_moments_of_several_stages_per_rank() -> None:
    """By hand, two ranks, two stages each, and four micro batches."""
    breadth_first = of_rank("LoopedBFS", 2, 2, 4, 0)
    last = [moment for moment in breadth_first if moment.stage == 0 and moment.kind == "B"]
    assert (False, False) in {moment.waiting for moment in last}
    assert (WHOLE, REDUCED) in {moment.graded for moment in last}  # the later stage's gradients are reduced by then
    interleaved = of_rank("Interleaved1F1B", 2, 2, 4, 0)
    assert (False, True) in {moment.waiting for moment in interleaved}


def test_stages_are_gathered_ahead_of_their_first_forward() -> None:
    """By hand: rank 0 of ZBV takes three micro batches through its first stage before its second has begun."""
    ahead = [moment for moment in of_rank("ZBVZeroBubble", 2, 2, 8, 0) if any(moment.ahead)]
    assert {(moment.stage, moment.kind, moment.ahead) for moment in ahead} == {(0, "F", (False, True))}
    assert max(moment.flying for moment in ahead) == (3, 0)
    four_stages = of_rank("Interleaved1F1B", 2, 4, 8, 0)
    assert (False, True, True, False) in {moment.ahead for moment in four_stages}  # torch gathers three at once


def most(part: str, schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[int]:
    """The largest sum over a rank's stages of `part` of a Moment, for each rank."""
    sums = []
    for rank in range(ranks):
        moments = of_rank(schedule, ranks, stages_per_rank, micro_batches, rank)
        sums.append(max(sum(getattr(moment, part)) for moment in moments))
    return sums


def test_micro_batches_in_flight() -> None:
    """GPipe: all; 1F1B: p - r; Interleaved1F1B: v p + p - 1 of 1/v the size on the first rank (arXiv 2205.05198)."""
    assert most("flying", "GPipe", 4, 1, 12) == [12] * 4
    assert most("flying", "1F1B", 4, 1, 12) == [4, 3, 2, 1]
    assert most("flying", "LoopedBFS", 2, 2, 6) == [12] * 2
    assert most("flying", "Interleaved1F1B", 4, 2, 8)[0] == 2 * 4 + 4 - 1
    assert most("deferred", "InterleavedZeroBubble", 4, 1, 8) == [1, 2, 3, 4]


def test_moments_where_most_gradients_are_put_off() -> None:
    """By hand: at the end of a step ZBV puts off those of two micro batches, where few are in flight."""
    zero_bubble = of_rank("ZBVZeroBubble", 2, 2, 8, 1)
    assert max(sum(moment.deferred) for moment in zero_bubble if moment.kind == "I") == 2


def test_stages_of_one_size_are_taken_together() -> None:
    """Three stages, the last two of one size: by hand. Which of the two computes, or holds more, is the same."""
    first = Moment(0, "F", (3, 2, 1), (0, 1, 0), (WHOLE, REDUCED, NONE), (False, True, False), (False, False, True))
    second = Moment(1, "F", (3, 2, 1), (0, 1, 0), (WHOLE, REDUCED, NONE), (False, False, True), (False, False, True))
    third = Moment(2, "F", (3, 1, 2), (0, 0, 1), (WHOLE, NONE, REDUCED), (False, True, False), (False, True, False))
    size_0 = Total(0, "F", (3, 3), (0, 1), whole=(1, 0), reduced=(0, 1), waiting=(0, 1), ahead=(0, 1))
    assert totals((first, second, third), (0, 1, 1)) == [size_0, size_0._replace(size=1)]
