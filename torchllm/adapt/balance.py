"""The split of a pipeline's blocks that evens out the measured times of its stages.

The split that a run starts with counts operations (`torchllm/spec/stages.py`); kernels and machines are not that even.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

UNEVEN = 0.05
"""stages are uneven if the slowest takes longer than the mean by more than this share"""


class PartialSplit(NamedTuple):
    """A split of the first blocks over the first stages."""

    slowest: float
    """seconds of the slowest of these stages"""
    blocks: tuple[int, ...]
    """of each"""


def better_split(
    split: Sequence[int], stage_seconds: Sequence[float], end_shares: tuple[float, float]
) -> tuple[int, ...] | None:
    """Return the split whose slowest stage is fastest; None if stages are even, or it gains less than `UNEVEN` / 2.

    split: blocks of each stage. end_shares: the embedding's fraction of the first stage's time, the head's of the
    last's. A block that moves is taken to cost what the blocks of its stage cost now.
    """
    mean = sum(stage_seconds) / len(stage_seconds)
    if max(stage_seconds) <= (1 + UNEVEN) * mean:
        return None
    fixed = [0.0] * len(split)  # seconds that stay with a stage when its blocks move
    fixed[0] += end_shares[0] * stage_seconds[0]
    fixed[-1] += end_shares[1] * stage_seconds[-1]
    block_seconds: list[float] = []
    for blocks, seconds, end_seconds in zip(split, stage_seconds, fixed, strict=True):
        block_seconds += [(seconds - end_seconds) / blocks] * blocks
    best = best_partition(block_seconds, fixed)
    gains = best.slowest < (1 - UNEVEN / 2) * max(stage_seconds)
    return best.blocks if gains else None


def best_partition(block_seconds: Sequence[float], fixed: Sequence[float]) -> PartialSplit:
    """Return the split into stages of at least one block whose slowest stage is fastest.

    fixed: seconds of each stage beside its blocks. Stages are added one by one; of the ways to give them the first n
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
