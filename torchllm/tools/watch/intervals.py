"""Arithmetic of stretches of time: sorted lists of disjoint (start, end), in nanoseconds."""

from collections.abc import Iterable

Stretch = tuple[int, int]


def union(stretches: Iterable[Stretch], bridge: int = 0) -> list[Stretch]:
    """Return overlapping or unsorted stretches as disjoint ones; gaps of up to `bridge` between two are closed."""
    joined: list[Stretch] = []
    for start, end in sorted(stretches):
        if joined and start <= joined[-1][1] + bridge:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def intersection(first: list[Stretch], second: list[Stretch]) -> list[Stretch]:
    """Return the parts that are in both."""
    return difference(first, difference(first, second))


def difference(first: list[Stretch], second: list[Stretch]) -> list[Stretch]:
    """Return the parts of `first` that are not in `second`. Linear: each list is walked once."""
    remaining = []
    passed = 0  # stretches of `second` that end before the current one begins
    for start, end in first:
        while passed < len(second) and second[passed][1] <= start:
            passed += 1
        index = passed
        while index < len(second) and second[index][0] < end:
            cut_start, cut_end = second[index]
            if cut_start > start:
                remaining.append((start, cut_start))
            start = max(start, cut_end)
            index += 1
        if start < end:
            remaining.append((start, end))
    return remaining


def length(stretches: Iterable[Stretch]) -> int:
    return sum(end - start for start, end in stretches)
