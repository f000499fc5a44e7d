"""Arithmetic of stretches of time: sorted lists of disjoint (start, end), in nanoseconds."""

from collections.abc import Iterable

Stretch = tuple[int, int]


def union(stretches: Iterable[Stretch], bridge: int = 0) -> list[Stretch]:
    """All of them, overlapping or not, as disjoint ones; gaps of up to `bridge` between two are taken in."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1] + bridge:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def intersection(some: list[Stretch], others: list[Stretch]) -> list[Stretch]:
    """What is in both."""
    return difference(some, difference(some, others))


def difference(some: list[Stretch], others: list[Stretch]) -> list[Stretch]:
    """What is in `some` alone."""
    found, at = [], 0
    for start, end in some:
        while at < len(others) and others[at][1] <= start:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            if others[here][0] > start:
                found.append((start, others[here][0]))
            start = max(start, others[here][1])
            here += 1
        if start < end:
            found.append((start, end))
    return found


def length(stretches: Iterable[Stretch]) -> int:
    """Of all of them."""
    return sum(end - start for start, end in stretches)
