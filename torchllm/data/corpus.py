"""Tokenized corpora and how they are read.

A corpus is a folder of shards (`shard.py` has the layout of their files) and a description of them
(`corpus_header.py`). The shards of a split, in order, are one stream of tokens, and sequence i of length S is
stream[i S : i S + S + 1].

A corpus of conversations was packed into sequences of one length when it was prepared: sequence i is stream[i S : i S +
S], whole examples and padding. Its last token has no target.

Opening a corpus reads only the description. The file of a shard is opened when a sequence of it is read, and a process
keeps a few files open, whatever the number of shards, sources and epochs. All reads are checked (`checked_file.py`).
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from torchllm.config.errors import DataError
from torchllm.data.checked_file import (
    BlockSums,
    CheckedFile,
    Checksums,
    CorpusFile,
    FileState,
    blocks_of,
    damaged_blocks,
    has_sum,
    look_at,
)
from torchllm.data.corpus_header import check_fingerprint, first_blocks, read_description, read_sums, read_url
from torchllm.data.shard import (
    SPLITS,
    Begins,
    Ids,
    OpenShard,
    ReadableShard,
    ShardSize,
    ShardSplit,
    Split,
    Targets,
    shard_path,
)
from torchllm.data.verified_files import VerifiedFiles, record_path

_OPEN_SHARDS = 16
"""shards that a process holds open, one descriptor each"""
CHECKING_THREADS = 16
"""threads that stat files: on a parallel file system each call takes some tenths of a millisecond"""


class Window(NamedTuple):
    """A part of a token stream: a training sequence, or a piece of one, of L tokens, and the token that follows it."""

    ids: Ids
    """(L + 1,)"""
    begins: Begins
    """indices in `ids` of the documents' first tokens, ascending"""
    document: int = 0
    """document of ids[0] in the sequence, from 0"""
    position: int = 0
    """position of ids[0], counted from the start of its document in the sequence"""
    targets: Targets | None = None
    """(L + 1,) whether each of `ids` is trained; None: all are"""


class SequenceSource(Protocol):
    """A source of training sequences."""

    fingerprint: str
    """changes if any sequence changes"""

    def count(self, split: Split, length: int) -> int:
        """Return the number of sequences of `length` tokens (and the following token)."""

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        """Return sequence `number` of `length` tokens, or a piece of it, with the following token.

        piece: positions in the sequence, without gaps, and those behind it (`SequenceReader`); None: all.
        """

    def describe(self) -> str:
        """Return how much there is, in words."""


class _Part(NamedTuple):
    """The part of a range of the stream that lies in one shard."""

    shard: ReadableShard
    offset: int
    """index of the shard's first token in the stream"""
    first: int
    """first token, as an index in the shard"""
    end: int
    """end of the tokens, as an index in the shard"""


_open_shards: OrderedDict[tuple["ShardStream", Split, int], ReadableShard] = OrderedDict()
"""open shards of this process, of all corpora together; the last used one is the last"""


def _open_shard(corpus: "ShardStream", split: Split, number: int) -> ReadableShard:
    """Return a shard, which is opened, in place of the one that was not used for longest, if it is not open."""
    key = corpus, split, number
    if key not in _open_shards:
        while len(_open_shards) >= _OPEN_SHARDS:
            _, oldest = _open_shards.popitem(last=False)
            oldest.close()
        _open_shards[key] = corpus.open_shard(split, number)
    _open_shards.move_to_end(key)
    return _open_shards[key]


def close_shards() -> None:
    """Close this process's open shards and drop their corpora; a later read opens them again."""
    for shard in _open_shards.values():
        shard.close()
    _open_shards.clear()


class ShardStream(ABC):
    """The token streams of the splits of a corpus, each the concatenation of its shards."""

    def __init__(self, lengths: Mapping[Split, Sequence[int] | npt.NDArray[np.int64]]) -> None:
        """`lengths`: tokens of each shard of each split, in order."""
        self._starts: dict[Split, npt.NDArray[np.int64]] = {}
        """start of each shard in the stream, and the length of the stream"""
        for split in SPLITS:
            self._starts[split] = np.concatenate([[0], np.cumsum(lengths[split])]).astype(np.int64)

    @property
    def is_packed(self) -> bool:
        """Return whether no document crosses the end of a sequence, and some tokens are not trained."""
        return False

    @abstractmethod
    def open_shard(self, split: Split, number: int) -> ReadableShard:
        """Open a shard that is not empty. Raises DataError if a file is missing or has another size."""

    def check(self, part: int = 0, parts: int = 1, threads: int = CHECKING_THREADS) -> dict[ShardSplit, FileState]:
        """Check the size of the files of every `parts`-th shard from shard `part` on.

        It takes O(shards): one process per node calls it, and the nodes divide the shards. Raises DataError that names
        a file that is missing or has another size. Returns the shards that have to be verified, because no run has
        verified them since they were last changed, each with its file.
        """
        shards = []
        for split in SPLITS:
            sizes = np.diff(self._starts[split])
            shards += [ShardSplit(split, number) for number in range(part, len(sizes), parts) if sizes[number]]
        shards.sort(key=lambda shard: (shard.number, shard.split))
        if threads == 1:
            return self._unverified_among(shards)
        shares = [shards[thread::threads] for thread in range(threads)]
        unverified: dict[ShardSplit, FileState] = {}
        with ThreadPoolExecutor(threads) as pool:
            for share in pool.map(self._unverified_among, shares):
                unverified |= share
        return {shard: unverified[shard] for shard in shards if shard in unverified}

    def _unverified_among(self, shards: Sequence[ShardSplit]) -> dict[ShardSplit, FileState]:
        return {shard: file for shard in shards if (file := self.unverified_file(*shard)) is not None}

    def unverified_file(self, split: Split, number: int) -> FileState | None:
        """Return the state of a shard's file that is not verified; None if it is, or if it cannot be.

        Raises DataError if the file is missing or has another size.
        """
        return None

    def verify(self, split: Split, number: int, pace: Callable[[int], None] = lambda size: None) -> None:
        """Check that a shard's file is as it was written, and record it as verified. Raises DamagedFile."""
        raise NotImplementedError  # a subclass whose `unverified_file` returns files defines it

    def bytes_of(self, split: Split, number: int) -> int:
        """Return the number of bytes that `verify` reads."""
        return 0

    def tokens(self, split: Split) -> int:
        return int(self._starts[split][-1])

    def count(self, split: Split, length: int) -> int:
        return max(0, self.tokens(split) - 1) // length

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        """See SequenceSource. Before the piece, only the document boundaries nearest to both ends are read."""
        piece = piece or range(length)
        first = number * length
        end = min(piece.stop + 1, length) if self.is_packed else piece.stop + 1
        end = min(end, self.tokens(split) - first)
        ids, begins, targets = [], [], []
        for part in self._parts(split, first + piece.start, first + end):
            ids.append(part.shard.read_ids(part.first, part.end))
            begins.append(part.shard.read_begins(part.first, part.end) + (part.offset - first - piece.start))
            if self.is_packed:
                targets.append(part.shard.read_targets(part.first, part.end))
        if missing := piece.stop + 1 - end:  # behind a packed sequence, or the stream: of another document
            ids.append(np.zeros(missing, dtype=ids[0].dtype))
            begins.append(np.array([end - piece.start]))
            targets.append(np.zeros(missing, dtype=np.bool_))
        document, document_begin = 0, 0
        if piece.start > 0:
            for part in self._parts(split, first + 1, first + piece.start + 1):
                documents = part.shard.documents_in(part.first, part.end)
                if documents.number:
                    document += documents.number
                    document_begin = documents.last_begin + part.offset - first
        return Window(
            np.concatenate(ids),
            np.concatenate(begins),
            document,
            piece.start - document_begin,
            np.concatenate(targets) if self.is_packed else None,
        )

    def _parts(self, split: Split, first: int, end: int) -> Iterator[_Part]:
        """Yield the part in each shard of the tokens first <= i < end of a split's stream."""
        for number, offset, part in self._ranges(split, first, end):
            yield _Part(_open_shard(self, split, number), offset, part.start, part.stop)

    def _ranges(self, split: Split, first: int, end: int) -> Iterator[tuple[int, int, range]]:
        """Yield for each shard with tokens first <= i < end its number, its offset in the stream, and its tokens."""
        starts = self._starts[split]
        index = int(np.searchsorted(starts, first, side="right")) - 1
        while index < len(starts) - 1 and starts[index] < end:
            start, stop = int(starts[index]), int(starts[index + 1])
            if start < stop:
                yield index, start, range(max(first, start) - start, min(end, stop) - start)
            index += 1


class Corpus(ShardStream):
    """A corpus folder; `header` is the content of its corpus.json."""

    def __init__(self, folder: str | Path, records: Path | None = None) -> None:
        """Read the description of a corpus. `records`: folder with the records of verified files.

        Raises DataError if the description is missing or damaged; `check` and `verify` look at the rest.
        """
        self.folder = Path(folder).expanduser()
        self._records = records
        self._description = read_description(self.folder)
        self.header = self._description.header
        self.fingerprint = self.header.fingerprint
        super().__init__({split: self._description.columns[split].tokens for split in SPLITS})
        record = record_path(records, self.folder, self.fingerprint) if records is not None else None
        self.url = read_url(self.folder)
        """of the shards in object storage; "" if they are in the folder"""
        self.documents = {split: self._description.columns[split].documents for split in SPLITS}
        """documents of each shard of each split"""
        self._verified = VerifiedFiles(record, len(SPLITS) * self.header.shards)
        self._checked_blocks: dict[tuple[ShardSplit, int], npt.NDArray[np.bool_]] = {}
        """blocks that this process has checked, of files that are not recorded as verified; by shard and ctime"""

    def __reduce__(self) -> tuple[Callable[[Path, Path | None], "Corpus"], tuple[Path, Path | None]]:
        return Corpus, (self.folder, self._records)  # pickle sends the folder only; the columns are read again

    @property
    def is_packed(self) -> bool:
        """Return whether the corpus holds conversations, packed into sequences of one length."""
        return self.header.sequence_length > 0

    def describe(self) -> str:
        train, held_out = self.tokens("train"), self.tokens("validation")
        last = "the last " if self.header.plan.get("last_tokens") else ""
        return f"{self.header.documents:,} documents, {train:,} tokens to train on, {last}{held_out:,} held out"

    def check(self, part: int = 0, parts: int = 1, threads: int = CHECKING_THREADS) -> dict[ShardSplit, FileState]:
        """Check the fingerprint, and the files as `ShardStream.check` does."""
        check_fingerprint(self.folder)
        return super().check(part, parts, threads)

    def unverified_file(self, split: Split, number: int) -> FileState | None:
        if self.url:  # its blocks are verified as they are read
            return None
        file = look_at(self._file(split, number))
        return None if self._verified.has(self._file_number(split, number), file.changed_ns) else file

    def bytes_of(self, split: Split, number: int) -> int:
        """Return the size of the file of one split of a shard."""
        return self._size(split, number).file_bytes

    def verify(self, split: Split, number: int, pace: Callable[[int], None] = lambda size: None) -> None:
        """Read the file of one split of a shard, compare it with its checksums, and record it as verified.

        `pace` is called with the number of bytes after each MiB. Raises DataError that names a damaged file.
        """
        if not self.bytes_of(split, number):
            return
        file = CheckedFile(self._file(split, number))
        try:
            self._verify_blocks(file, self.block_sums(split, number), pace)
        finally:
            file.close()
        self._verified.add(self._file_number(split, number), file.changed_ns)

    def _verify_blocks(self, file: CheckedFile, sums: BlockSums, pace: Callable[[int], None]) -> None:
        """Read all blocks of a file. Raises DamagedFile that names those without their checksum."""
        damaged = []
        for block, checksum in enumerate(sums):
            content = file.read_block(block)
            if not has_sum(content, checksum):
                damaged.append(block)
            pace(len(content))
        if damaged:
            raise damaged_blocks(file.file, damaged)

    def _file_number(self, split: Split, number: int) -> int:
        """Return the place of a shard's split among the files of the corpus, in the order of `sums.bin`."""
        return number * len(SPLITS) + SPLITS.index(split)

    def _size(self, split: Split, number: int) -> ShardSize:
        tokens, documents = self._description.columns[split]
        return self.header.shard_size(int(tokens[number]), int(documents[number]))

    def _file(self, split: Split, number: int) -> CorpusFile:
        return CorpusFile(shard_path(self.folder, number, split), self.bytes_of(split, number))

    def open_shard(self, split: Split, number: int) -> OpenShard:
        file = self._open_file(split, number)
        return OpenShard(file, self._size(split, number), self.header.max_token)

    def _open_file(self, split: Split, number: int) -> CheckedFile:
        file, find_checksums = self._file(split, number), partial(self._checksums, split, number)
        if not self.url:
            return CheckedFile(file, find_checksums)
        from torchllm.data.remote_shards import RemoteFile  # most runs need none

        return RemoteFile(file, self.url, find_checksums)

    def shard(self, split: Split, number: int) -> OpenShard:
        """Return a shard that is not empty, open until enough others have been used."""
        shard = _open_shard(self, split, number)
        assert isinstance(shard, OpenShard)
        return shard

    def read_ahead(self, split: Split, numbers: Sequence[int], length: int) -> None:
        """Read the ids of sequences from object storage into the cache, several requests at a time; else do nothing."""
        if not self.url:
            return
        from torchllm.data.remote_shards import fetch

        wanted: dict[int, set[int]] = {}
        for number in numbers:
            for shard, _, tokens in self._ranges(split, number * length, (number + 1) * length + 1):
                size = self._size(split, shard)
                ids = range(tokens.start * size.id_bytes, tokens.stop * size.id_bytes)
                index = range(size.index_offset, size.targets_offset)
                wanted.setdefault(shard, set()).update(blocks_of(ids), blocks_of(index))
        fetch([(self._open_file(split, shard), blocks) for shard, blocks in wanted.items()])

    def _checksums(self, split: Split, number: int, changed_ns: int) -> Checksums | None:
        """Return the checks of a shard's file with this ctime; None if it is verified."""
        if self._verified.has(self._file_number(split, number), changed_ns):
            return None
        sums = self.block_sums(split, number)
        key = ShardSplit(split, number), changed_ns
        is_checked = self._checked_blocks.setdefault(key, np.zeros(len(sums), dtype=np.bool_))
        return Checksums(sums, is_checked)

    def block_sums(self, split: Split, number: int) -> BlockSums:
        """Return the sum of each MiB of the file of one split of a shard."""
        file = self._file_number(split, number)
        first, end = self._first_blocks[file : file + 2]
        return read_sums(self.folder, self.header, int(first), int(end))

    @cached_property
    def _first_blocks(self) -> npt.NDArray[np.int64]:
        return first_blocks(self._description)

    def count(self, split: Split, length: int) -> int:
        """Return how many sequences of `length` tokens a split has; unless it is packed, with the token that follows.

        Raises DataError if the corpus was packed into sequences of another length.
        """
        packed = self.header.sequence_length
        if not packed:
            return super().count(split, length)
        if packed != length:
            raise DataError(
                f"{self.folder} holds conversations packed into sequences of {packed} tokens, but "
                f"training.sequence_length is {length}: set it to {packed}, or prepare the conversations again"
            )
        return self.tokens(split) // length
