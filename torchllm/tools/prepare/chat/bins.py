"""Pack whole examples into sequences.

Best fit decreasing: the longest example first, each into the fullest sequence with room for it, else into a new one
(Ding et al. 2024, Fewer Truncations Improve Language Modeling, arXiv 2404.10830, section 3.2).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple


class _Bin(NamedTuple):
    """A sequence with room."""

    room: int
    """in tokens"""
    number: int
    """among the sequences"""


def pack_examples(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the examples in each sequence of `capacity` tokens, by their index; none is longer than that.

    It takes O(n log n) comparisons for n examples, and depends on the lengths alone.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    sequences: list[list[int]] = []
    bins: list[_Bin] = []
    """ascending"""
    for index in by_length:
        length = lengths[index]
        position = bisect_left(bins, _Bin(length, -1))
        if position < len(bins):
            chosen = bins.pop(position)
        else:
            chosen = _Bin(capacity, len(sequences))
            sequences.append([])
        sequences[chosen.number].append(index)
        room = chosen.room - length
        if room:
            insort(bins, _Bin(room, chosen.number))
    return sequences
