"""The files with the tokens of a corpus: their layout, how they are written and how they are read.

A shard has a file for each of its splits that is not empty. The file of T tokens in D documents holds, little endian:

    ids      T x uint16 or uint32            token ids: documents one after another, each <begin> tokens <end>
    zeros    up to a multiple of 8 bytes
    begins   D x int64                       index in ids of each document's first token, ascending
    index    (ceil(T / 65,536) + 1) x int64  index[k]: number of documents that begin before token 65,536 k
    targets  ceil(T / 8) bytes               in a corpus of conversations: bit i % 8 of byte i // 8 is 1 if token i is
                                             trained, 0 if it is only read; padding behind the documents is not

The index finds the documents of a sequence without a search: a sequence anywhere in the file costs one read of its ids
and one of about 65,536 tokens' worth of begins. Ids and begins are in one file because a sequence drawn at random from
many shards has to open a file, and on a parallel file system an open costs as much as a read. For the same reason the
targets are in the same file; its sha256, part of the corpus's fingerprint, covers them.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from torchllm.data.checked_file import CheckedFile, DamagedFile

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

Ids = npt.NDArray[np.unsignedinteger[Any]]
Begins = npt.NDArray[np.int64]
Targets = npt.NDArray[np.bool_]
"""whether the model is trained to predict each token"""
INDEX_STRIDE = 2**16
"""tokens between two entries of the index"""


class DocumentsInRange(NamedTuple):
    """The documents that begin in a range of tokens."""

    number: int
    last_begin: int
    """start of the last of them; -1 if there is none"""


class ShardSize(NamedTuple):
    """Sizes and offsets, in bytes, in the file of one split of a shard."""

    tokens: int
    documents: int
    id_bytes: int
    """bytes per token id: 2 or 4"""
    has_targets: bool = False
    """the file has a bit per token whether it is trained"""

    @property
    def begins_offset(self) -> int:
        return -(-self.tokens * self.id_bytes // 8) * 8

    @property
    def index_offset(self) -> int:
        return self.begins_offset + 8 * self.documents

    @property
    def index_entries(self) -> int:
        return -(-self.tokens // INDEX_STRIDE) + 1

    @property
    def targets_offset(self) -> int:
        return self.index_offset + 8 * self.index_entries

    @property
    def file_bytes(self) -> int:
        """Return the size of the file in bytes; without tokens there is no file."""
        if not self.tokens:
            return 0
        return self.targets_offset + (-(-self.tokens // 8) if self.has_targets else 0)


class ShardSplit(NamedTuple):
    split: Split
    number: int
    """of the shard"""


def shard_path(folder: Path, number: int, split: Split) -> Path:
    return folder / f"{number:05d}.{split}.bin"


class ReadableShard(ABC):
    """An open split of a shard, of ours or of another program; tokens are counted from its start."""

    @abstractmethod
    def read_ids(self, first: int, end: int) -> Ids:
        """Return the ids of the tokens first <= i < end."""

    @abstractmethod
    def read_begins(self, first: int, end: int) -> Begins:
        """Return the tokens first <= i < end that begin a document, ascending, each once."""

    def read_targets(self, first: int, end: int) -> Targets:
        """Return whether each of the tokens first <= i < end is trained."""
        return np.ones(end - first, dtype=np.bool_)

    def documents_in(self, first: int, end: int) -> DocumentsInRange:
        """Return how many documents begin in the tokens first <= i < end, and where the last of them does."""
        begins = self.read_begins(first, end)
        return DocumentsInRange(len(begins), int(begins[-1]) if len(begins) else -1)

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


class OpenShard(ReadableShard):
    """The open file of one split of a shard."""

    def __init__(self, file: CheckedFile, size: ShardSize, max_token: int) -> None:
        """Read the index. max_token: of the corpus. Every method raises DataError if the bytes it reads are damaged."""
        self._size = size
        self._max_token = max_token
        self._dtype = f"<u{size.id_bytes}"
        self._file = file
        self._index = self._file.read("<i8", size.index_entries, size.index_offset)

    def read_ids(self, first: int, end: int) -> Ids:
        ids = self._file.read(self._dtype, end - first, first * self._size.id_bytes)
        if len(ids) and ids.max() > self._max_token:
            raise self._unknown_id(ids, first)
        return ids

    def _unknown_id(self, ids: Ids, first: int) -> DamagedFile:
        """Return the error of an id that the corpus does not have; ids[0] is token `first` of the shard."""
        index = int(np.argmax(ids > self._max_token))
        byte = (first + index) * self._size.id_bytes
        fault = f"is damaged: at byte {byte:,} is token id {ids[index]}, but the corpus has none over {self._max_token}"
        return DamagedFile(self._file.file.path, fault)

    def read_begins(self, first: int, end: int) -> Begins:
        begins = self.read_documents(
            int(self._index[first // INDEX_STRIDE]),
            int(self._index[-(-end // INDEX_STRIDE)]),
        )
        low, high = np.searchsorted(begins, [first, end])
        return begins[low:high]

    def read_targets(self, first: int, end: int) -> Targets:
        first_byte = first // 8
        packed = self._file.read("u1", -(-end // 8) - first_byte, self._size.targets_offset + first_byte)
        bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        return bits[first - 8 * first_byte : end - 8 * first_byte]

    def documents_in(self, first: int, end: int) -> DocumentsInRange:
        """See ReadableShard; reads boundaries near both ends."""
        earlier, document = self._documents_before(first), self._documents_before(end)
        if earlier == document:
            return DocumentsInRange(0, -1)
        return DocumentsInRange(document - earlier, int(self.read_documents(document - 1, document)[0]))

    def _documents_before(self, token: int) -> int:
        """Return the number of documents of the shard that begin before a token; reads boundaries near it."""
        first = int(self._index[token // INDEX_STRIDE])
        end = int(self._index[-(-token // INDEX_STRIDE)])
        return first + int(np.searchsorted(self.read_documents(first, end), token))

    def read_documents(self, first: int, end: int) -> Begins:
        """Return the first tokens of the documents first <= i < end."""
        return self._file.read("<i8", end - first, self._size.begins_offset + 8 * first)

    def close(self) -> None:
        self._file.close()
