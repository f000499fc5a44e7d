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


def intersection(left: list[Stretch], right: list[Stretch]) -> list[Stretch]:
    """Return what is in both."""
    return difference(left, difference(left, right))


def difference(left: list[Stretch], right: list[Stretch]) -> list[Stretch]:
    """Return what is in `left` and not in `right`. Linear: each list is walked once."""
    remaining = []
    first = 0  # of `right`, that does not end before the current stretch
    for start, end in left:
        while first < len(right) and right[first][1] <= start:
            first += 1
        index = first
        while index < len(right) and right[index][0] < end:
            cut_start, cut_end = right[index]
            if cut_start > start:
                remaining.append((start, cut_start))
            start = max(start, cut_end)
            index += 1
        if start < end:
            remaining.append((start, end))
    return remaining


def length(stretches: Iterable[Stretch]) -> int:
    """Return the total length."""
    return sum(end - start for start, end in stretches)
