"""Arithmetic of stretches of time, compared with sets of integers."""

import itertools
import random

from torchllm.tools.watch.intervals import Stretch, difference, intersection, length, union


def points(stretches: list[Stretch]) -> set[int]:
    return {point for start, end in stretches for point in range(start, end)}


def drawn(random: random.Random) -> list[Stretch]:
    starts = [random.randrange(60) for _ in range(random.randrange(6))]
    return [(start, start + random.randrange(1, 12)) for start in starts]


def test_stretches_are_sets_of_points() -> None:
    generator = random.Random(0)
    for _ in range(500):
        first, second = union(drawn(generator)), union(drawn(generator))
        assert points(intersection(first, second)) == points(first) & points(second)
        assert points(difference(first, second)) == points(first) - points(second)
        assert length(first) == len(points(first))
        for result in (first, intersection(first, second), difference(first, second)):
            assert result == sorted(result)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(result))


def test_a_union_bridges_short_gaps() -> None:
    assert union([(0, 2), (4, 6), (9, 10)], bridge=2) == [(0, 6), (9, 10)]
    assert union([(5, 6), (0, 9), (1, 2)]) == [(0, 9)]
