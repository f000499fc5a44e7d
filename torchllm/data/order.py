"""The order of a run's sequences: the n-th is a pure function of (seed, n), with no state and no list in memory.

There are two steps. A mixture table, repeated without end, gives the source of the n-th sequence and the number of
earlier sequences of that source: in each block of the table every source has exactly its share, spread as evenly as
possible. A run may have stages, each with a different table. Then each pass over a source (an epoch) visits its
sequences in a different order, by a keyed permutation of 0 ... size-1.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

_WORD = 2**64 - 1
_ROUNDS = 6
_LONGEST_BLOCK = 10_000
"""sequences in a mixture block; weights that need a longer block to be exact are rounded to this one"""


def _mix_word(x: int) -> int:
    """Return a hash of a 64-bit word: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


class Permutation:
    """A keyed permutation of 0 <= i < size in O(1) memory.

    It is a balanced Feistel network over the next power of four, applied until the result is under `size` (cycle
    walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002, section 4). The power of four is under
    4 x size, so the network is applied 4 times on average at most.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        """Permute 0 <= i < `size`; another `key` gives another permutation."""
        digest = blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._round_keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)

    def __call__(self, i: int) -> int:
        i = self._feistel(i)
        while i >= self._size:
            i = self._feistel(i)
        return i

    def _feistel(self, i: int) -> int:
        """Permute 0 <= i < 4 ** half_bits: each round replaces one half of i's bits by their xor with a hash."""
        mask = (1 << self._half_bits) - 1
        high, low = i >> self._half_bits, i & mask
        for key in self._round_keys:
            high, low = low, high ^ (_mix_word((low ^ key) & _WORD) & mask)
        return high << self._half_bits | low


@lru_cache(maxsize=256)
def _permutation(size: int, *key: int | str) -> Permutation:
    return Permutation(size, *key)


def mixture_shares(weights: Sequence[float]) -> list[Fraction]:
    """Return the exact share of each source; weights are read as decimals (0.1 is one tenth)."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    return [weight / total for weight in exact]


def mixture_counts(shares: Sequence[Fraction]) -> list[int]:
    """Return the sequences of each source in one block: the shares as whole numbers in lowest terms, each at least 1.

    Shares that need a longer block than `_LONGEST_BLOCK` are rounded.
    """
    exact_block = math.lcm(*(share.denominator for share in shares))
    block = min(exact_block, max(_LONGEST_BLOCK, len(shares)))
    counts = [max(1, math.floor(share * block)) for share in shares]
    # The remainder of rounding down goes to the sources with the largest remainders.
    by_loss = sorted(range(len(shares)), key=lambda source: counts[source] - shares[source] * block)
    for source in by_loss[: max(0, block - sum(counts))]:
        counts[source] += 1
    return counts


class MixtureSlot(NamedTuple):
    """One entry of a mixture block."""

    source: int
    earlier: int
    """entries of the same source that come earlier in the block"""


def mixture_table(counts: Sequence[int]) -> list[MixtureSlot]:
    """Return one block with `counts[s]` entries of source s; each entry goes to the source that lags its share most.

    With d entries among the first n, source s lags by counts[s] * n - d * block; ties go to the first source.
    """
    block, growth = sum(counts), np.array(counts)
    lag = np.zeros_like(growth)
    taken = [0] * len(counts)
    table = []
    for _ in range(block):
        lag += growth
        source = int(lag.argmax())
        table.append(MixtureSlot(source, taken[source]))
        taken[source] += 1
        lag[source] -= block
    return table


class Mixture:
    """Sources drawn by weights (0: never drawn): one block of entries, repeated without end."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: one per source, one of them over 0."""
        drawn = [source for source, weight in enumerate(weights) if weight > 0]
        counts = mixture_counts(mixture_shares([weights[source] for source in drawn]))
        self._block = [slot._replace(source=drawn[slot.source]) for slot in mixture_table(counts)]
        self._entries: list[list[int]] = [[] for _ in weights]
        """indices in the block of each source's entries"""
        for index, slot in enumerate(self._block):
            self._entries[slot.source].append(index)

    def slot(self, index: int) -> MixtureSlot:
        """Return the entry at an index; `earlier` counts the entries of all blocks before it."""
        block, index_in_block = divmod(index, len(self._block))
        source, earlier = self._block[index_in_block]
        return MixtureSlot(source, block * len(self._entries[source]) + earlier)

    def uses(self, source: int, end: int) -> int:
        """Return the number of a source's entries among the first `end` entries."""
        blocks, rest = divmod(end, len(self._block))
        entries = self._entries[source]
        return blocks * len(entries) + bisect_left(entries, rest)

    def end_of(self, source: int, uses: int) -> int:
        """Return the number of entries up to the `uses`-th of a source that is drawn, counted from 1."""
        index = self.index(source, uses - 1)
        assert index is not None
        return index + 1

    def index(self, source: int, use: int) -> int | None:
        """Return the index of a source's entry number `use`, from 0; None if it has no entries."""
        entries = self._entries[source]
        if not entries:
            return None
        block, entry = divmod(use, len(entries))
        return block * len(self._block) + entries[entry]


class PlannedStage(NamedTuple):
    """A part of a run with one mixture; it starts where the previous stage ends."""

    until: int
    """last step; 0: to the end of the run"""
    end: int
    """number of the run's sequences up to the end of the stage; 0: to the end of the run"""
    weights: tuple[float, ...]
    """share of each source; 0: not drawn"""
    length: int = 0
    """tokens in a sequence; 0: training.sequence_length"""


class UsedUp(NamedTuple):
    """A source that has had its epochs."""

    source: int
    end: int
    """number of the run's sequences until then"""


class LimitedStages(NamedTuple):
    """The stages of a run, cut where a source has had its epochs."""

    stages: Sequence[PlannedStage]
    used_up: Sequence[UsedUp] = ()
    end: int = 0
    """number of the run's sequences until all sources of a stage have had their epochs; 0: never"""


def uses_in_length(used: Sequence[int], sizes: Sequence[int], new_sizes: Sequence[int]) -> list[int]:
    """Return the numbers of sequences of another length that are as large a part of the sources, rounded up.

    used, sizes: used sequences of each source, and all of them. new_sizes: all of the other length.
    """
    return [-(-count * new // old) for count, old, new in zip(used, sizes, new_sizes, strict=True)]


class _OrderedStage(NamedTuple):
    """A stage, and the numbers of sequences before it."""

    first: int
    """number of the run's sequences before it"""
    mixture: Mixture
    used: list[int]
    """number of sequences of each source before it"""
    sizes: Sequence[int]
    """number of sequences of each source"""


class Location(NamedTuple):
    """The place of a run's sequence in the data."""

    source: int
    epoch: int
    """number of earlier passes over the source"""
    number: int
    """index of the sequence in its source"""


class DataOrder:
    """The order of a run over sources of `sizes` sequences each (all at least 1).

    A stage continues each source where the previous stage stopped, so that no sequence repeats within an epoch. One of
    another length continues with the same part of the epoch, of other sequences in another order.
    """

    def __init__(
        self,
        seed: int | str,
        sizes: Sequence[int],
        weights: Sequence[float],
        stages: Sequence[PlannedStage] = (),
        sizes_of_length: Mapping[int, Sequence[int]] = MappingProxyType({}),
        length: int = 0,
    ) -> None:
        """Draw by the weights of each of `stages`, in order, and then by `weights` in a `length` without end.

        sizes_of_length: by the length of stages that have another one.
        """
        self._seed = seed
        self._sizes = list(sizes)
        self._stages: list[_OrderedStage] = []
        self._ends = [stage.end for stage in stages]
        first, used, before = 0, [0] * len(sizes), self._sizes
        for stage in [*stages, PlannedStage(0, 0, tuple(weights), length)]:
            mixture = Mixture(stage.weights)
            own_sizes = list(sizes_of_length.get(stage.length, sizes))
            used = uses_in_length(used, before, own_sizes)
            self._stages.append(_OrderedStage(first, mixture, used, own_sizes))
            used = [count + mixture.uses(source, stage.end - first) for source, count in enumerate(used)]
            first, before = stage.end, own_sizes

    def locate(self, n: int) -> Location:
        """Return the place of the n-th sequence of the run, n >= 0."""
        stage = self._stages[bisect_right(self._ends, n)]
        source, earlier = stage.mixture.slot(n - stage.first)
        size = stage.sizes[source]
        epoch, i = divmod(stage.used[source] + earlier, size)
        return Location(source, epoch, _permutation(size, self._seed, source, epoch)(i))

    def uses(self, source: int, end: int) -> int:
        """Return how many of a source are among the run's first `end` sequences, in the length of the last of them."""
        stage = self._stages[bisect_right(self._ends, end)]
        return stage.used[source] + stage.mixture.uses(source, end - stage.first)

    def epochs(self, source: int, sequences: int) -> float:
        """Return the number of epochs over a source in the first `sequences` sequences of the run."""
        stage = self._stages[bisect_right(self._ends, sequences)]
        return self.uses(source, sequences) / stage.sizes[source]
