"""Megatron-LM's indexed data sets: NAME.bin with the ids, NAME.idx with where sequences and documents begin.

Written by `IndexedDatasetBuilder` of `megatron/core/datasets/indexed_dataset.py` of NVIDIA/Megatron-LM (commit
00caa53), by its `tools/preprocess_data.py`. The index is, little endian:

    bytes     0 ...  8   "MMIDIDX\\0\\0"
    uint64    at  9      version, 1
    uint8     at 17      type of an id: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16
    uint64    at 18      S, number of sequences (sentences or whole documents)
    uint64    at 26      D, number of entries that tell documents apart: one more than documents
    int32     at 34      S lengths of the sequences, in ids
    int64                S offsets of the sequences in the .bin, in bytes; they follow one another
    int64                D numbers of the documents' first sequences; the last is S
    int8                 S modes, in multimodal data sets only

The index is searched where it is, so a process holds none of it in memory.
"""

import struct
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchllm.data.checked_file import CheckedFile, CorpusFile
from torchllm.data.shard import Begins, Ids
from torchllm.tools.prepare.formats.token_file import InPlaceSettings, OpenTokens, TokenFormat, TokenShard, WrongFormat

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_DTYPES = {4: "<u4", 8: "<u2"}
"""code -> the type as which ids are read"""
_DOCUMENTS_PER_READ = 512
_ENTRIES_PER_READ = 2**17
_WRITE_AGAIN = "write it again, with Megatron-LM's tools/preprocess_data.py"


class _Index(NamedTuple):
    """The header of an index. Offsets and sizes are in bytes."""

    dtype: str
    sequences: int
    document_entries: int

    @property
    def id_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def lengths_offset(self) -> int:
        return _HEADER.size

    @property
    def pointers_offset(self) -> int:
        return self.lengths_offset + 4 * self.sequences

    @property
    def documents_offset(self) -> int:
        return self.pointers_offset + 8 * self.sequences

    @property
    def size(self) -> int:
        return self.documents_offset + 8 * self.document_entries


def _read_header(path: Path) -> _Index:
    """Return the header of an index. Raises WrongFormat if it is not of version 1 with ids of uint16 or int32."""
    with path.open("rb") as file:
        content = file.read(_HEADER.size)
    if len(content) < _HEADER.size or content[: len(_MAGIC)] != _MAGIC:
        raise WrongFormat(path, "is no index of Megatron-LM: it does not begin with MMIDIDX")
    _, version, code, sequences, document_entries = _HEADER.unpack(content)
    if version != 1:
        raise WrongFormat(path, f"has version {version} of Megatron-LM's index, and version 1 is read")
    if code not in _DTYPES:
        raise WrongFormat(path, f"has ids of type {_TYPES.get(code, code)}, and uint16 and int32 are read")
    return _Index(_DTYPES[code], sequences, document_entries)


def _list_shards(path: Path, settings: InPlaceSettings) -> Sequence[TokenShard]:
    """Return the shard of an index and its .bin. Raises WrongFormat if they do not fit together."""
    index = _read_header(path)
    size = path.stat().st_size
    if index.sequences and size == index.size + index.sequences:
        raise WrongFormat(path, "is the index of a multimodal data set, and text is read")
    if size != index.size:
        raise WrongFormat(path, f"has {size:,} bytes, but its header says {index.size:,}")
    file = CheckedFile(CorpusFile(path, size))
    tokens = 0
    if index.sequences:
        last = index.sequences - 1
        length = int(file.read("<i4", 1, index.lengths_offset + 4 * last)[0])
        tokens = int(file.read("<i8", 1, index.pointers_offset + 8 * last)[0]) // index.id_bytes + length
    file.close()
    ids = path.with_suffix(".bin")
    if not ids.is_file():
        raise WrongFormat(path, f"has no {ids.name} with its ids in the same folder")
    ids_size = ids.stat().st_size
    if ids_size != tokens * index.id_bytes:
        needed = f"{tokens * index.id_bytes:,} bytes of {tokens:,} ids"
        raise WrongFormat(ids, f"has {ids_size:,} bytes, but {path.name} says {needed}")
    return [TokenShard([CorpusFile(ids, ids_size), CorpusFile(path, size)], tokens)] if tokens else []


def _refuse_disorder(path: Path, settings: InPlaceSettings, vocab: int) -> None:
    """Raise WrongFormat if sequences do not follow one another, or documents do not, from the first to the last.

    Where they don't, a search in the index finds another document, and tokens outside of all documents are in one.
    """
    if not _list_shards(path, settings):
        return
    index = _read_header(path)
    file = CheckedFile(CorpusFile(path, index.size))
    try:
        _check_sequences(file, index)
        _check_documents(file, index)
    finally:
        file.close()


def _check_sequences(file: CheckedFile, index: _Index) -> None:
    """Raise WrongFormat if a sequence is not behind the one before it."""
    place = 0
    for start in range(0, index.sequences, _ENTRIES_PER_READ):
        count = min(_ENTRIES_PER_READ, index.sequences - start)
        lengths = file.read("<i4", count, index.lengths_offset + 4 * start)
        pointers = file.read("<i8", count, index.pointers_offset + 8 * start)
        sizes = lengths.astype(np.int64) * index.id_bytes
        ends = place + np.cumsum(sizes)
        wrong = np.flatnonzero(pointers != ends - sizes)
        if len(wrong):
            fault = f"has sequence {start + wrong[0]:,} not behind the one before it"
            raise WrongFormat(file.file.path, f"{fault}: {_WRITE_AGAIN}")
        place = int(ends[-1])


def _check_documents(file: CheckedFile, index: _Index) -> None:
    """Raise WrongFormat if the entries of documents do not ascend from the first sequence to the last."""
    last = 0
    for start in range(0, index.document_entries, _ENTRIES_PER_READ):
        count = min(_ENTRIES_PER_READ, index.document_entries - start)
        entries = file.read("<i8", count, index.documents_offset + 8 * start)
        is_wrong = np.diff(entries, prepend=last) < 0
        if start == 0:
            is_wrong[0] = entries[0] != 0
        if is_wrong.any():
            number = start + int(is_wrong.argmax())
            raise WrongFormat(file.file.path, f"has document {number:,} out of order: {_WRITE_AGAIN}")
        last = int(entries[-1])
    if last != index.sequences:
        fault = f"has {index.sequences:,} sequences, {last:,} of them in documents"
        raise WrongFormat(file.file.path, f"{fault}: {_WRITE_AGAIN}")


class _OpenMegatron(OpenTokens):
    """An open data set of Megatron-LM."""

    def __init__(self, shard: TokenShard, settings: InPlaceSettings) -> None:
        ids, index = shard.files
        self._header = _read_header(index.path)
        self._ids, self._index = CheckedFile(ids), CheckedFile(index)

    def read_ids(self, first: int, end: int) -> Ids:
        return self._ids.read(self._header.dtype, end - first, first * self._header.id_bytes)

    def read_begins(self, first: int, end: int) -> Begins:
        """See ReadableShard. A document without tokens begins where the next one does."""
        documents = range(self._header.document_entries - 1)
        document = bisect_left(documents, first, key=lambda number: int(self._begins_of(number, 1)[0]))
        begins: list[int] = []
        while document < len(documents):
            count = min(_DOCUMENTS_PER_READ, len(documents) - document)
            some = self._begins_of(document, count)
            begins += some[some < end].tolist()
            if some[-1] >= end:
                break
            document += count
        return np.unique(np.array(begins, dtype=np.int64))

    def _begins_of(self, document: int, count: int) -> Begins:
        """Return the first tokens of `count` documents; documents after the last token begin at its end."""
        header = self._header
        sequences = self._index.read("<i8", count, header.documents_offset + 8 * document)
        inside = sequences[sequences < header.sequences]
        end = self._ids.file.size // header.id_bytes
        if not len(inside):
            return np.full(count, end)
        first, last = int(inside[0]), int(inside[-1])
        pointers = self._index.read("<i8", last - first + 1, header.pointers_offset + 8 * first)
        begins = pointers[inside - first] // header.id_bytes
        return np.concatenate([begins, np.full(count - len(inside), end)])

    def close(self) -> None:
        self._ids.close()
        self._index.close()


MEGATRON = TokenFormat("*.idx", _list_shards, _OpenMegatron, _refuse_disorder)
