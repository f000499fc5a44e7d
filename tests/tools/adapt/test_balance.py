"""The split that evens out measured stage times."""

import itertools
from statistics import median

import pytest
import torch

from torchllm.tools.adapt.balance import MAX_SPLITS, Costs, Rebalancer, best_partition
from torchllm.tools.adapt.balance import better_split as better_split_of_times
from torchllm.tools.watch.stage_times import ForwardTimes


def better_split(
    split: tuple[int, ...], stage_seconds: tuple[float, ...], head: int, noise: float = 0.0
) -> tuple[int, ...] | None:
    """Of blocks that cost 1 each. head: its cost."""
    return better_split_of_times(split, ForwardTimes(list(stage_seconds), noise), Costs(0, [1] * sum(split), head))


def slowest(split: tuple[int, ...], blocks: list[float], fixed: list[float]) -> float:
    seconds = []
    start = 0
    for count, end in zip(split, fixed, strict=True):
        seconds.append(sum(blocks[start : start + count]) + end)
        start += count
    return max(seconds)


def test_no_split_is_better() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        stages = 2 + seed % 3
        blocks = torch.rand(stages + 1 + seed % 5, generator=generator).tolist()
        fixed = torch.rand(stages, generator=generator).tolist()
        all_counts = itertools.product(range(1, len(blocks)), repeat=stages)
        splits = [split for split in all_counts if sum(split) == len(blocks)]
        best = best_partition(blocks, fixed)
        assert best.slowest == pytest.approx(slowest(best.blocks, blocks, fixed)), seed
        assert best.slowest == pytest.approx(min(slowest(split, blocks, fixed) for split in splits)), seed


def test_blocks_leave_a_slow_stage() -> None:
    assert better_split((4, 4), (1.0, 1.04), head=1) is None  # 2 % over the mean
    assert better_split((1, 1), (1.0, 3.0), head=0) is None  # nothing to move
    assert better_split((4, 4), (1.0, 3.0), head=0, noise=0.7) == (5, 3)  # from 3 to 2.25, more than the noise
    assert better_split((4, 4), (1.0, 3.0), head=0, noise=0.8) is None
    assert better_split((4, 4), (1.0, 3.0), head=0) == (5, 3)  # 2, 2.25: 6 of 1/4 and 2 of 3/4 would be 3
    # Half of the last stage's time is the head's, which stays there.
    assert better_split((4, 4), (1.0, 2.0), head=4) == (6, 2)  # 6 quarters; 2 and the head's 4
    moved = better_split((2, 2, 2, 2), (4.0, 1.0, 1.0, 1.0), head=0)
    assert moved is not None
    assert slowest(moved, [2.0, 2.0, *[0.5] * 6], [0.0] * 4) == 2.0  # a heavy block each


def test_dense_and_sparse_blocks_of_a_stage_share_its_time_by_their_costs() -> None:
    """Three dense blocks take 1 second each, three sparse ones 5."""
    costs = Costs(0, [10, 10, 10, 50, 50, 50], 0)
    times = ForwardTimes([13.0, 5.0], noise=0.0)
    assert better_split_of_times((5, 1), times, costs) == (4, 2)  # 8, 10: equal blocks of 2.6 would be best as 3 + 3
    with_embedding = Costs(20, [10, 10, 10, 50, 50, 50], 0)  # 2 seconds that stay with the first stage
    assert better_split_of_times((5, 1), ForwardTimes([15.0, 5.0], noise=0.0), with_embedding) == (4, 2)


class Pipeline:
    """A pipeline of equal blocks, but for the first stage's, whose measured times are noisy."""

    def __init__(self, seed: int, noise: float, drift: float, first: float = 1.0) -> None:
        """noise: relative, of each half of a measurement; drift: of both halves; first: a block of the first stage."""
        self.generator = torch.Generator().manual_seed(seed)
        self.noise, self.drift = noise, drift
        self.split = (4,) * 16
        self.block_seconds = [first] * 4 + [1.0] * 60

    def factors(self, deviation: float) -> list[float]:
        return (1 + deviation * torch.randn(16, generator=self.generator)).tolist()

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage, without noise."""
        return slowest(self.split, self.block_seconds, [0.0] * 16)

    def measure(self) -> ForwardTimes:
        seconds, noise, start = [], 0.0, 0
        drift, first_half, second_half = self.factors(self.drift), self.factors(self.noise), self.factors(self.noise)
        for stage, blocks in enumerate(self.split):
            true_seconds = drift[stage] * sum(self.block_seconds[start : start + blocks])
            start += blocks
            seconds.append(true_seconds * (first_half[stage] + second_half[stage]) / 2)
            noise = max(noise, true_seconds * abs(first_half[stage] - second_half[stage]))
        return ForwardTimes(seconds, noise)

    def rebuilds(self) -> int:
        """How often a run changes its split before it goes on with one for good."""
        rebalancer = Rebalancer()
        for count in range(100):
            times = self.measure()
            split = rebalancer.next_split(self.split, times, Costs(0, [1] * 64, 0))
            if split is None:
                return count
            self.split = split
        raise AssertionError("a rebuild at each checkpoint")


SEEDS = range(25)


def test_noise_of_a_tenth_causes_no_rebuild() -> None:
    assert [Pipeline(seed, noise=0.1, drift=0.0).rebuilds() for seed in SEEDS] == [0] * len(SEEDS)


def test_noise_that_lasts_as_long_as_a_measurement_causes_few_rebuilds_and_most_are_undone() -> None:
    """Each split meets other times, as on machines that are slow for minutes."""
    pipelines = [Pipeline(seed, noise=0.01, drift=0.1) for seed in SEEDS]
    rebuilds = [pipeline.rebuilds() for pipeline in pipelines]
    assert max(rebuilds) == MAX_SPLITS + 1
    assert median(rebuilds) == 2  # one split is tried, and undone
    slower = [pipeline for pipeline in pipelines if pipeline.slowest > 4.0]
    assert len(slower) < len(pipelines) / 3  # the noise hid that they are


def test_a_stage_that_is_really_slow_loses_a_block_in_spite_of_noise() -> None:
    for seed in SEEDS:
        pipeline = Pipeline(seed, noise=0.02, drift=0.01, first=1.5)
        assert pipeline.slowest == 6.0
        assert 1 <= pipeline.rebuilds() <= MAX_SPLITS
        assert pipeline.slowest <= 5.0
