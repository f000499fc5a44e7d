"""The split of a pipeline's blocks that evens out the measured times of its stages.

The split that a run starts with counts operations (`torchllm/facts/stages.py`); kernels and machines are not that even.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torchllm.tools.watch.stage_times import ForwardTimes

UNEVEN = 0.05
"""stages are uneven if the slowest takes longer than the mean by more than this share"""
MAX_SPLITS = 3
"""other splits that a run tries; each costs a new start from a checkpoint"""


class Costs(NamedTuple):
    """Operations of one token's forward pass: they divide the measured time of a stage among its parts."""

    embedding: int
    blocks: list[int]
    """of every block of the model: dense ones and those with experts differ"""
    head: int


class MeasuredSplit(NamedTuple):
    """A split that the run has left for another one, and how it did."""

    split: tuple[int, ...]
    slowest: float
    """seconds of its slowest stage"""
    noise: float
    """error of a measured time, in seconds"""


class Rebalancer:
    """Chooses the next split of a run after each measurement. It ends with the first split that nothing improves.

    A time measured 10 % too long looks like an uneven stage, and each new split gets new measurements. So a gain must
    be larger than the noise of the measurement, a split that turns out slower than the one before is undone and is the
    last, and at most `MAX_SPLITS` are tried.
    """

    def __init__(self) -> None:
        self.tried = 0
        self.former: MeasuredSplit | None = None
        """the split before the last change"""

    def next_split(self, split: tuple[int, ...], times: ForwardTimes, costs: Costs) -> tuple[int, ...] | None:
        """Return the split to go on with after the measured one; None: go on with that. Arguments: `better_split`'s."""
        slowest = max(times.seconds)
        former, self.former = self.former, None
        if former is not None and slowest > former.slowest + max(former.noise, times.noise):
            self.tried = MAX_SPLITS
            return former.split
        if self.tried == MAX_SPLITS:
            return None
        better = better_split(split, times, costs)
        if better is not None:
            self.tried += 1
            self.former = MeasuredSplit(split, slowest, times.noise)
        return better


class PartialSplit(NamedTuple):
    """A split of the first blocks over the first stages."""

    slowest: float
    """seconds of the slowest of these stages"""
    blocks: tuple[int, ...]
    """of each"""


def better_split(split: Sequence[int], times: ForwardTimes, costs: Costs) -> tuple[int, ...] | None:
    """Return the split whose slowest stage is fastest; None if stages are even, or it gains too little.

    A gain is too little if it is below `UNEVEN` / 2 of the slowest stage, or below the noise of the measured times.

    split: blocks of each stage. The parts of a stage are taken to share its time by their costs, and a block that moves
    to cost the seconds that it costs now.
    """
    stage_seconds = times.seconds
    slowest, mean = max(stage_seconds), sum(stage_seconds) / len(stage_seconds)
    if slowest <= (1 + UNEVEN) * mean:
        return None
    ends = [0] * len(split)  # costs that stay with a stage when its blocks move
    ends[0] += costs.embedding
    ends[-1] += costs.head
    fixed: list[float] = []  # seconds of them
    block_seconds: list[float] = []
    borders = pairwise(accumulate(split, initial=0))
    for (start, stop), end, seconds in zip(borders, ends, stage_seconds, strict=True):
        blocks = costs.blocks[start:stop]
        per_operation = seconds / (sum(blocks) + end)
        block_seconds += [cost * per_operation for cost in blocks]
        fixed.append(end * per_operation)
    best = best_partition(block_seconds, fixed)
    gain = slowest - best.slowest
    return best.blocks if gain > max(times.noise, UNEVEN / 2 * slowest) else None


def best_partition(block_seconds: Sequence[float], fixed: Sequence[float]) -> PartialSplit:
    """Return the split into stages of at least one block whose slowest stage is fastest.

    fixed: seconds of each stage without its blocks. Stages are added one by one; of the ways to give them the first n
    blocks only the best can be part of the best whole (dynamic programming).
    """
    until = [0.0, *accumulate(block_seconds)]  # seconds of the first n blocks
    best = {0: PartialSplit(0.0, ())}  # by number of blocks
    for stage, end_seconds in enumerate(fixed):
        later_stages = len(fixed) - stage - 1  # each needs a block
        longer = {}
        for end in range(stage + 1, len(block_seconds) - later_stages + 1):
            candidates = []
            for start, partial in best.items():
                if start < end:
                    seconds = until[end] - until[start] + end_seconds
                    candidates.append(PartialSplit(max(partial.slowest, seconds), (*partial.blocks, end - start)))
            longer[end] = min(candidates, key=lambda candidate: (candidate.slowest, candidate.blocks[-1]))
        best = longer
    return best[len(block_seconds)]
