"""The split that evens out measured stage times."""

import itertools

import pytest
import torch

from torchllm.adapt.balance import best_partition, better_split


def slowest(split: tuple[int, ...], blocks: list[float], fixed: list[float]) -> float:
    """Seconds of the slowest stage."""
    seconds = []
    start = 0
    for count, end in zip(split, fixed, strict=True):
        seconds.append(sum(blocks[start : start + count]) + end)
        start += count
    return max(seconds)


@pytest.mark.parametrize("seed", range(20))
def test_no_split_is_better(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stages = 2 + seed % 3
    blocks = torch.rand(stages + 1 + seed % 5, generator=generator).tolist()
    fixed = torch.rand(stages, generator=generator).tolist()
    all_counts = itertools.product(range(1, len(blocks)), repeat=stages)
    splits = [split for split in all_counts if sum(split) == len(blocks)]
    best = best_partition(blocks, fixed)
    assert best.slowest == pytest.approx(slowest(best.blocks, blocks, fixed))
    assert best.slowest == pytest.approx(min(slowest(split, blocks, fixed) for split in splits))


def test_even_stages_stay() -> None:
    assert better_split((4, 4), (1.0, 1.04), (0.0, 0.1)) is None  # 2 % over the mean
    assert better_split((1, 1), (1.0, 3.0), (0.0, 0.0)) is None  # nothing to move


def test_blocks_leave_a_slow_stage() -> None:
    assert better_split((4, 4), (1.0, 3.0), (0.0, 0.0)) == (5, 3)  # 2, 2.25: 6 of 1/4 and 2 of 3/4 would be 3
    # Half of the last stage's time is the head's, which stays there.
    assert better_split((4, 4), (1.0, 2.0), (0.0, 0.5)) == (6, 2)  # 6 quarters; 2 and the head's 4
    moved = better_split((2, 2, 2, 2), (4.0, 1.0, 1.0, 1.0), (0.0, 0.0))
    assert moved is not None
    assert slowest(moved, [2.0, 2.0, *[0.5] * 6], [0.0] * 4) == 2.0  # a heavy block each
