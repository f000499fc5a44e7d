"""Tokenized corpora and how they are read.

A corpus is a folder of shards (`shard.py` has the layout of their files) and a description of them
(`corpus_header.py`). The shards of a split, in order, are one stream of tokens, and sequence i of length S is
stream[i S : i S + S + 1].

Opening a corpus reads the description only. The file of a shard is opened when a sequence of it is read, and a process
holds the last few open, whatever the number of shards, sources and epochs.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from torchllm.data.corpus_header import (
    check_fingerprint,
    first_blocks,
    read_description,
    read_sums,
)
from torchllm.data.error import DataError
from torchllm.data.shard import (
    SPLITS,
    Begins,
    BlockSums,
    Ids,
    OpenShard,
    ShardFile,
    ShardSize,
    Split,
    check_size,
    shard_files,
)

_OPEN_SHARDS = 16
"""shards that a process holds open: one descriptor each, two in format 1"""
_CHECKING_THREADS = 16
"""that ask for the size of files: on a parallel file system an answer takes some tenths of a millisecond"""


class Window(NamedTuple):
    """A part of a token stream: a training sequence, or a piece of one, of L tokens, and the token that follows it."""

    ids: Ids
    """(L + 1,)"""
    begins: Begins
    """indices in `ids` at which a document begins, ascending"""
    document: int = 0
    """which document of the sequence ids[0] belongs to, from 0"""
    position: int = 0
    """of ids[0], counted from where that document begins in the sequence"""


class SequenceSource(Protocol):
    """Where training sequences come from."""

    fingerprint: str
    """changes if any sequence does"""

    def count(self, split: Split, length: int) -> int:
        """Return how many sequences of `length` tokens (and the token that follows) there are."""

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        """Return sequence `number` of `length` tokens, or only a piece of it, and the token that follows.

        piece: positions in the sequence, without gaps; None: all.
        """


class _ShardKey(NamedTuple):
    corpus: "Corpus"
    split: Split
    number: int


class _OpenShards:
    """The shards that this process holds open: the `limit` that were used last, of all corpora together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shards: OrderedDict[_ShardKey, OpenShard] = OrderedDict()

    def get(self, key: _ShardKey) -> OpenShard:
        """Return an open shard."""
        shard = self._shards.get(key)
        if shard is None:
            while len(self._shards) >= self._limit:
                _, oldest = self._shards.popitem(last=False)
                oldest.close()
            shard = key.corpus.open_shard(key.split, key.number)
            self._shards[key] = shard
        self._shards.move_to_end(key)
        return shard

    def close(self) -> None:
        """Close all of them, and forget their corpora; the next use of a shard opens it again."""
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()


class _Part(NamedTuple):
    """What one shard holds of a range of the stream."""

    shard: OpenShard
    offset: int
    """index of the shard's first token in the stream"""
    first: int
    """first token, as an index in the shard"""
    end: int
    """end of the tokens, as an index in the shard"""


_open_shards = _OpenShards(_OPEN_SHARDS)


def close_shards() -> None:
    """Close the shards that this process holds open; a later read opens them again."""
    _open_shards.close()


class Corpus:
    """A corpus folder; `header` is the content of its corpus.json."""

    def __init__(self, folder: str | Path) -> None:
        """Read the description of a corpus. Raises DataError if it is missing or damaged; `check` looks at the rest."""
        self.folder = Path(folder).expanduser()
        self._description = read_description(self.folder)
        self.header = self._description.header
        self.fingerprint = self.header.fingerprint
        self._starts: dict[Split, npt.NDArray[np.int64]] = {}
        """index in the stream at which each shard starts, and the length of the stream"""
        for split in SPLITS:
            tokens = self._description.columns[split].tokens
            self._starts[split] = np.concatenate([[0], np.cumsum(tokens)])

    def __reduce__(self) -> tuple[Callable[[Path], "Corpus"], tuple[Path]]:
        return Corpus, (self.folder,)  # the columns are read again, not sent

    def check(self, part: int = 0, parts: int = 1) -> None:
        """Check the fingerprint, and the size of the files of every `parts`-th shard from shard `part` on.

        It takes O(shards): of a job, one process per node does it, and the nodes share the shards out. Raises DataError
        that names a file that is missing or has another size.
        """
        check_fingerprint(self.folder)
        numbers = range(part, self.header.shards, parts)
        shares = [numbers[thread::_CHECKING_THREADS] for thread in range(_CHECKING_THREADS)]
        with ThreadPoolExecutor(_CHECKING_THREADS) as threads:
            for _ in threads.map(self._check_sizes, shares):
                pass

    def _check_sizes(self, numbers: range) -> None:
        for number in numbers:
            for split in SPLITS:
                for file in self._files(split, number):
                    check_size(file)

    def _size(self, split: Split, number: int) -> ShardSize:
        tokens, documents = self._description.columns[split]
        return ShardSize(int(tokens[number]), int(documents[number]), self.header.id_bytes)

    def _files(self, split: Split, number: int) -> list[ShardFile]:
        return shard_files(self.folder, number, split, self._size(split, number), self.header.format)

    def open_shard(self, split: Split, number: int) -> OpenShard:
        """Open a shard that is not empty. Raises DataError if a file is missing or has another size."""
        return OpenShard(self._files(split, number), self._size(split, number))

    def block_sums(self, split: Split, number: int) -> BlockSums:
        """Return the CRC-32 (zlib) of each MiB of the file of one split of a shard.

        Raises DataError for a corpus of format 1, which has no such sums.
        """
        if self.header.format == 1:
            raise DataError(f"{self.folder} has no checksums of blocks (format 1): prepare the corpus again")
        file = number * len(SPLITS) + SPLITS.index(split)
        first, end = self._first_blocks[file : file + 2]
        return read_sums(self.folder, int(first), int(end))

    @cached_property
    def _first_blocks(self) -> npt.NDArray[np.int64]:
        return first_blocks(self._description)

    def tokens(self, split: Split) -> int:
        """Return the number of tokens in a split."""
        return int(self._starts[split][-1])

    def count(self, split: Split, length: int) -> int:
        """Return how many sequences of `length` tokens (and the token that follows) a split has."""
        return max(0, self.tokens(split) - 1) // length

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        """Return sequence `number` of `length` tokens, or only a piece of it, and the token that follows.

        It may cross shards. Of what is before the piece, only the document boundaries nearest to both ends are read.
        """
        piece = piece or range(length)
        first = number * length
        ids, begins = [], []
        for part in self._parts(split, first + piece.start, first + piece.stop + 1):
            ids.append(part.shard.read_ids(part.first, part.end))
            begins.append(part.shard.read_begins(part.first, part.end) + (part.offset - first - piece.start))
        document, document_begin = 0, 0
        if piece.start > 0:
            for part in self._parts(split, first + 1, first + piece.start + 1):
                earlier, end = part.shard.documents_before(part.first), part.shard.documents_before(part.end)
                if earlier < end:
                    document += end - earlier
                    document_begin = part.shard.read_begin(end - 1) + part.offset - first
        return Window(np.concatenate(ids), np.concatenate(begins), document, piece.start - document_begin)

    def _parts(self, split: Split, first: int, end: int) -> Iterator[_Part]:
        """Yield what each shard holds of the tokens first <= i < end of a split's stream."""
        starts = self._starts[split]
        index = int(np.searchsorted(starts, first, side="right")) - 1
        while index < len(starts) - 1 and starts[index] < end:
            start, stop = int(starts[index]), int(starts[index + 1])
            if start < stop:
                shard = _open_shards.get(_ShardKey(self, split, index))
                yield _Part(shard, start, max(first, start) - start, min(end, stop) - start)
            index += 1


class Synthetic:
    """Uniformly random tokens 0 <= id < vocab, each sequence one document: for benchmarks. Needs no file."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.fingerprint = f"synthetic-{vocab}"

    def count(self, split: Split, length: int) -> int:
        """Return a number that no run reaches."""
        return 2**40

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        """Return sequence `number` or a piece of it: always the same tokens for the same split, number and length."""
        piece = piece or range(length)
        random = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), number]))
        ids = random.integers(self.vocab, size=length + 1, dtype=np.uint32)[piece.start : piece.stop + 1]
        begins = np.zeros(1 if piece.start == 0 else 0, dtype=np.int64)
        return Window(ids, begins, position=piece.start)
