"""Which sequence is the n-th of the run: a pure function of (seed, n), with no state and no list in memory.

Two steps. A mixture table, repeated for ever, says which source the n-th sequence comes from and how many of that
source came before it: in each block of the table every source has exactly its share, spread as evenly as can be. Then
each pass over a source (an epoch) visits its sequences in an order of its own, by a keyed permutation of 0 ... size-1.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_WORD = 2**64 - 1
_ROUNDS = 6
_LONGEST_BLOCK = 10_000
"""sequences in a mixture block; weights that need a longer one to be exact are rounded to it"""


def mix_words(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A hash of each 64-bit word: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A keyed permutation of 0 <= i < size in O(1) memory.

    A balanced Feistel network over the next power of four, walked until it lands inside (cycle walking: Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002, section 4); the domain is under 4 sizes, so 4 walks on average
    at most. Rounds are `mix_words` in plain integers, which for one number are faster than numpy.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        digest = blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]
        self._size, self._half = size, max(1, ((size - 1).bit_length() + 1) // 2)

    def __call__(self, i: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        while True:
            left, right = i >> half, i & mask
            for key in self._keys:
                x = (right ^ key) & _WORD
                x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
                x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
                left, right = right, left ^ ((x ^ (x >> 31)) & mask)
            i = left << half | right
            if i < self._size:
                return i


@lru_cache(maxsize=256)
def _permutation(size: int, *key: int | str) -> Permutation:
    return Permutation(size, *key)


def mixture_counts(weights: Sequence[float]) -> list[int]:
    """Sequences of each source in one block: the weights as whole numbers in lowest terms, each at least 1.

    The weights are read as the decimals the user wrote (0.1 is one tenth).
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    block = min(math.lcm(*(share.denominator for share in shares)), max(_LONGEST_BLOCK, len(shares)))
    counts = [max(1, math.floor(share * block)) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda s: counts[s] - shares[s] * block)
    for s in by_rest[: max(0, block - sum(counts))]:
        counts[s] += 1
    return counts


def mixture_table(counts: Sequence[int]) -> list[tuple[int, int]]:
    """One block: (source, how many of that source came before) at each place.

    Each place goes to the source that lags its share most.
    """
    block = sum(counts)
    taken, table = [0] * len(counts), []
    for place in range(block):
        s = max(range(len(counts)), key=lambda s: counts[s] * (place + 1) - taken[s] * block)
        table.append((s, taken[s]))
        taken[s] += 1
    return table


class DataOrder:
    """The order of a run over sources of `sizes` sequences each (all at least 1), drawn by `weights`."""

    def __init__(self, seed: int | str, sizes: Sequence[int], weights: Sequence[float]) -> None:
        self._seed, self._sizes = seed, list(sizes)
        self._counts = mixture_counts(weights)
        self._table = mixture_table(self._counts)

    def locate(self, n: int) -> tuple[int, int, int]:
        """Of the n-th sequence of the run, n >= 0: its source, the epoch of that source, its number in the source."""
        block, place = divmod(n, len(self._table))
        source, before = self._table[place]
        epoch, i = divmod(block * self._counts[source] + before, self._sizes[source])
        return source, epoch, _permutation(self._sizes[source], self._seed, source, epoch)(i)

    def first(self, count: int) -> list[tuple[int, int]]:
        """(source, number) of the first `count` sequences of epoch 0, fewer if the sources have fewer."""
        found: list[tuple[int, int]] = []
        count, n = min(count, sum(self._sizes)), 0
        while len(found) < count:
            source, epoch, number = self.locate(n)
            if epoch == 0:
                found.append((source, number))
            n += 1
        return found
