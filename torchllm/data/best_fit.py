"""Best-fit packing (data.packing): documents become sequences whole; one that is longer than a sequence is cut.

The documents of a shard are packed in groups of 4,096, in their order, by their lengths alone, which the shard's index
has: no token is read, and a process packs a group when it reads a sequence of it, and keeps some. Which documents share
a sequence is the same in each epoch; the order of the sequences is not (`order.py`), and it scatters the long ones and
the short, and the pieces of a document. The number of sequences of each group, without which there is no order, is
counted once for a corpus and a length, by the process that prepares, on all cores, and kept in the cache.

A document of more than L tokens becomes pieces of L and a rest. Positions start again in each piece, and nothing
attends to the piece before it; the last token of a piece still has its label, the first of the next one. So it is for
held-out tokens that begin within a document.
"""

import os
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.config.files import cache_root
from torchllm.data.checked_file import blocks_of
from torchllm.data.corpus import Corpus, SequenceSource, Window
from torchllm.data.readers import describe_source, verified_records
from torchllm.data.shard import SPLITS, Split
from torchllm.data.synthetic import Synthetic
from torchllm.runtime.heartbeat import beat
from torchllm.runtime.host_limits import usable_cores
from torchllm.runtime.signs_of_life import show_progress

PACKED_TOGETHER = 4096
"""documents, or examples of conversations, that share sequences"""
RULES = 2
"""version of the rules of packing: numbers of sequences are kept by it"""
IN_ONE_PROCESS = 500
"""groups that one process counts, within seconds"""
_KEPT_GROUPS = 256
"""groups whose sequences a process keeps, of about 100 KB each, and of some MB where documents are long"""

Ints = npt.NDArray[np.int64]


class _Bin(NamedTuple):
    """A sequence with room."""

    room: int
    """in tokens"""
    number: int
    """among the sequences"""


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the documents in each sequence of `capacity` tokens, by their index; none is longer than that.

    Best fit decreasing: the longest document first, each into the fullest sequence with room for it, else into a new
    one (Ding et al. 2024, Fewer Truncations Improve Language Modeling, arXiv 2404.10830, section 3.2). It takes
    O(n log n) comparisons for n documents, and depends on the lengths alone.
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


class PackedGroup(NamedTuple):
    """The sequences of some documents."""

    starts: Ints
    """first token of each piece in the shard; pieces are in the order of the sequences"""
    ends: Ints
    """end of each piece"""
    limits: Ints
    """end of each piece's document"""
    first: Ints
    """first piece of each sequence, and the number of pieces"""


def pack_group(borders: Ints, length: int) -> PackedGroup:
    """Pack documents into sequences of `length` tokens. borders: their first tokens, and the end of the last one."""
    sizes = np.diff(borders)
    pieces = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), pieces)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = borders[document] + piece * length
    limits = borders[document + 1]
    ends = np.minimum(starts + length, limits)
    whole = np.flatnonzero(ends - starts == length)  # each fills a sequence, before those of shorter pieces
    rests = np.flatnonzero(ends - starts < length)
    sequences = best_fit((ends - starts)[rests].tolist(), length)
    fitted = np.fromiter((index for sequence in sequences for index in sequence), dtype=np.int64, count=len(rests))
    order = np.concatenate([whole, rests[fitted]])
    pieces_each = np.append(np.ones_like(whole), [len(sequence) for sequence in sequences])
    first = np.append(0, np.cumsum(pieces_each)).astype(np.int64)
    return PackedGroup(starts[order], ends[order], limits[order], first)


class BestFitCorpus(Corpus):
    """A corpus of texts, whose documents are packed into sequences of one length."""

    def __init__(
        self, folder: Path, records: Path | None, length: int, cache: Path, counts: Ints | None = None
    ) -> None:
        """Read the description of a corpus, and from `cache` how many sequences each group has, or count them.

        counts: these numbers; None: they are to be found.
        """
        super().__init__(folder, records)
        self._length, self._cache = length, cache
        self._first_groups: dict[Split, Ints] = {}
        """first group of each shard, and the number of groups"""
        for split in SPLITS:
            documents = self.documents[split].astype(np.int64)
            has_rest_alone = (documents == 0) & (np.diff(self._starts[split]) > 0)
            groups = -(-documents // PACKED_TOGETHER) + has_rest_alone
            self._first_groups[split] = np.concatenate([[0], np.cumsum(groups)])
        self._group = lru_cache(maxsize=_KEPT_GROUPS)(self._pack)
        self._first_sequences: dict[Split, Ints] = {}
        """first sequence of each group, and the number of sequences"""
        counts = self._counts() if counts is None else counts
        for split in SPLITS:
            own, counts = np.split(counts, [self._first_groups[split][-1]])
            self._first_sequences[split] = np.concatenate([[0], np.cumsum(own)])

    # A worker of the loader opens the corpus anew. The base class returns its own arguments, of another type.
    def __reduce__(self) -> tuple[Callable[..., "BestFitCorpus"], tuple[Path, Path | None, int, Path]]:  # type: ignore[override]
        return BestFitCorpus, (self.folder, self._records, self._length, self._cache)

    @property
    def is_packed(self) -> bool:
        return True

    def count(self, split: Split, length: int) -> int:
        """Return the number of sequences; `length` is the one that it was packed for."""
        assert length == self._length
        return int(self._first_sequences[split][-1])

    def read_ahead(self, split: Split, numbers: Sequence[int], length: int) -> None:
        """See Corpus. A group has to be packed before it is known where its sequences are."""
        if not self.url:
            return
        from torchllm.data.remote_shards import fetch  # most runs need none

        borders = defaultdict[int, set[int]](set)  # blocks of each shard
        for group in np.unique(np.searchsorted(self._first_sequences[split], numbers, side="right") - 1).tolist():
            shard, first = self._place(split, group)
            size = self._size(split, shard)
            begins = range(size.begins_offset + 8 * first, size.index_offset)[: 8 * (PACKED_TOGETHER + 1)]
            borders[shard].update(blocks_of(begins), blocks_of(range(size.index_offset, size.targets_offset)))
        fetch([(self._open_file(split, shard), blocks) for shard, blocks in borders.items()])
        in_stream = set[int]()  # sequences of the stream, as it is not packed; a piece has tokens of two at most
        for number in numbers:
            shard, packed, pieces = self._sequence(split, number)
            for places in (packed.starts, packed.ends):
                in_stream.update(((places[pieces] + self._starts[split][shard]) // length).tolist())
        super().read_ahead(split, sorted(in_stream), length)

    def with_length(self, length: int) -> "BestFitCorpus":
        """Return the corpus with its documents packed into sequences of another length."""
        return BestFitCorpus(self.folder, self._records, length, self._cache)

    def _counts(self) -> Ints:
        """Return the number of sequences of each group, in the order of SPLITS."""
        file = self._cache / f"{self.fingerprint}-{self._length}-{RULES}.npy"
        groups = [(split, group) for split in SPLITS for group in range(self._first_groups[split][-1])]
        if file.is_file():
            known: Ints = np.load(file)
            if known.shape == (len(groups),):
                return known
        counts = self._count(groups)
        self._cache.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{os.uname().nodename}-{os.getpid()}-{file.name}")
        np.save(temporary, counts)
        os.replace(temporary, file)
        return counts

    def _count(self, groups: Sequence[tuple[Split, int]]) -> Ints:
        """Return the number of sequences of each group. Other ranks wait, so all cores count if there are many."""
        counts = np.zeros(len(groups), dtype=np.int64)

        def note(found: Iterable[int]) -> None:
            for index, count in enumerate(found):
                beat("packing")
                show_progress(f"{index:,} of {len(groups):,} groups of documents packed".format)
                counts[index] = count

        if len(groups) < IN_ONE_PROCESS:
            note(map(self.count_in_group, groups))
            return counts
        from concurrent.futures import ProcessPoolExecutor  # of few runs
        from multiprocessing import get_context

        unknown = self.folder, self._records, self._length, self._cache, counts
        with ProcessPoolExecutor(usable_cores(), get_context("spawn"), _open_here, unknown) as pool:
            note(pool.map(_count_here, groups, chunksize=32))
        return counts

    def count_in_group(self, group: tuple[Split, int]) -> int:
        """Return the number of sequences of a group."""
        return len(self._group(*group).first) - 1

    def _place(self, split: Split, group: int) -> tuple[int, int]:
        """Return the shard of a group, and the first document there."""
        shards = self._first_groups[split]
        number = int(np.searchsorted(shards, group, side="right")) - 1
        return number, (group - int(shards[number])) * PACKED_TOGETHER

    def _sequence(self, split: Split, number: int) -> tuple[int, PackedGroup, slice]:
        """Return the shard and the group of a sequence, and its pieces among those of the group."""
        group = int(np.searchsorted(self._first_sequences[split], number, side="right")) - 1
        packed = self._group(split, group)
        number -= int(self._first_sequences[split][group])
        return self._place(split, group)[0], packed, slice(*packed.first[number : number + 2])

    def _pack(self, split: Split, group: int) -> PackedGroup:
        """Pack a group. Reads the first tokens of its documents."""
        number, first = self._place(split, group)
        documents = int(self.documents[split][number])
        borders = self.shard(split, number).read_documents(first, min(first + PACKED_TOGETHER + 1, documents))
        if first + PACKED_TOGETHER >= documents:
            borders = np.append(borders, self._starts[split][number + 1] - self._starts[split][number])
        if first == 0 and borders[0] > 0:  # of a document that began in the tokens to train on
            borders = np.insert(borders, 0, 0)
        return pack_group(borders, self._length)

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        """See SequenceSource. Behind the documents of a sequence are tokens with id 0, which are not trained."""
        piece = piece or range(length)
        first, end = piece.start, piece.stop + 1
        shard_number, packed, pieces = self._sequence(split, number)
        starts, ends = packed.starts[pieces], packed.ends[pieces]
        if ends[0] - starts[0] == length:  # its document may go on behind the sequence
            ends = np.minimum(starts + max(end, length), packed.limits[pieces])
        offsets = np.concatenate([[0], np.cumsum(ends - starts)])
        shard = self.shard(split, shard_number)
        ids = [np.empty(0, dtype=np.uint32)]
        for start, low, high in zip(starts, offsets[:-1], offsets[1:], strict=True):
            if low < end and high > first:
                ids.append(shard.read_ids(int(start + max(first - low, 0)), int(start + min(end, high) - low)))
        total = int(offsets[-1])
        ids.append(np.zeros(end - max(first, min(end, total)), dtype=np.uint32))
        begins = np.append(offsets[:-1], max(total, length))
        document = int(np.searchsorted(offsets[:-1], first, side="right")) - 1
        return Window(
            np.concatenate(ids),
            begins[(begins >= first) & (begins < end)] - first,
            document,
            first - int(offsets[document]),
            np.arange(first, end) < total,
        )


_opened: list[BestFitCorpus] = []
"""in a process of the pool: the corpus"""


def _open_here(*arguments: Any) -> None:
    _opened[:] = [BestFitCorpus(*arguments)]


def _count_here(group: tuple[Split, int]) -> int:
    return _opened[0].count_in_group(group)


def pack(source: Source, sequences: SequenceSource, data: Data, length: int) -> SequenceSource:
    """Return a source with its documents packed; conversations are already, and random tokens are one document.

    Raises DataError if its documents are not known.
    """
    if isinstance(sequences, Corpus) and not sequences.is_packed:
        return BestFitCorpus(sequences.folder, verified_records(data), length, cache_root(data) / "best_fit")
    if isinstance(sequences, (Corpus, Synthetic)):
        return sequences
    raise DataError(
        f'data.packing: "best_fit" needs whole documents, which {describe_source(source.kind, source.path)}, in files '
        'of another program, may cut between shards: set "concatenate", or prepare the text with recipes/prepare.py'
    )


def with_length(source: SequenceSource, length: int) -> SequenceSource:
    """Return a source of `pack` for sequences of another length."""
    return source.with_length(length) if isinstance(source, BestFitCorpus) else source
