"""Writes the files of a corpus, as `data/shard.py` and `data/corpus_header.py` describe them."""

import hashlib
import json
import os
import socket
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import xxhash

from torchllm.config.files import open_regular, sha256_of
from torchllm.data.checked_file import BLOCK
from torchllm.data.corpus_header import HEADER, SHARD_TABLE, SUMS, CorpusHeader
from torchllm.data.shard import INDEX_STRIDE, SPLITS, Ids, ShardSize, Split, Targets

_SHA256_BYTES = 32


def _temporary_suffix() -> str:
    """Return the end of the name of a draft, unique: other processes may write the same files."""
    return f".{socket.gethostname()}-{os.getpid()}.tmp"


@contextmanager
def replacing(paths: Sequence[Path]) -> Iterator[Sequence[IO[bytes]]]:
    """Open files for writing; they get their names, complete and on disk, when the block ends without error."""
    temporary = [path.with_name(path.name + _temporary_suffix()) for path in paths]
    files = [path.open("wb") for path in temporary]
    try:
        yield files
        for file, source, target in zip(files, temporary, paths, strict=True):
            file.flush()
            os.fsync(file.fileno())
            os.replace(source, target)
    finally:
        for file, source in zip(files, temporary, strict=True):
            file.close()
            source.unlink(missing_ok=True)


def first_noted(path: Path, find: Callable[[], str]) -> str:
    """Return the line that the first of all processes has written into a file; if there is none, call `find` for it.

    Raises OSError.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + _temporary_suffix())
        line = f"{find()}\n"
        with replacing([draft]) as (file,):  # on disk before it has its name
            file.write(line.encode())
        try:
            os.link(draft, path)  # unlike a rename it fails if another process was first
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not path.exists():
                draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)
    return path.read_text().strip()


class ShardFileWriter:
    """Writes the file of one split of a shard, document by document; a split without documents stays empty."""

    def __init__(self, file: IO[bytes], dtype: str, has_targets: bool = False) -> None:
        """Write to `file`; `dtype` is numpy's name for the type of an id, "<u2" or "<u4".

        has_targets: each call of `extend` has a matching call of `add_targets`.
        """
        self.dtype = dtype
        self.tokens = 0
        self.largest_id = 0
        self._file = file
        self._begins = array("q")
        self._largest_before = 0
        self._has_targets = has_targets
        self._targets: list[Targets] = []

    @property
    def documents(self) -> int:
        """Return the number of documents so far."""
        return len(self._begins)

    def add(self, document: Ids) -> None:
        """Write the ids of a document, its begin and end among them."""
        self.begin_document()
        self.extend(document)

    def begin_document(self) -> None:
        """Begin a document whose ids are written by `extend`."""
        self._begins.append(self.tokens)
        self._largest_before = self.largest_id

    def extend(self, ids: Ids) -> None:
        """Write the next ids of the document."""
        if len(ids):
            self._file.write(ids.astype(self.dtype, copy=False).data)
            self.tokens += len(ids)
            self.largest_id = max(self.largest_id, int(ids.max()))

    def add_targets(self, targets: Targets) -> None:
        """Write whether each of the next ids is trained."""
        self._targets.append(targets)

    def drop_document(self) -> None:
        """Remove the unfinished last document."""
        self.largest_id = self._largest_before
        self._truncate(self._begins.pop())

    def _truncate(self, tokens: int) -> None:
        """Remove the ids behind the first `tokens`."""
        self.tokens = tokens
        self._file.seek(tokens * np.dtype(self.dtype).itemsize)
        self._file.truncate()

    def move_last(self, count: int, other: "ShardFileWriter") -> None:
        """Move the last `count` ids, which have no targets, to another file, which is empty.

        They begin in the middle of a document, which counts once.
        """
        first = self.tokens - count
        self._file.flush()
        with open(self._file.name, "rb") as written:
            written.seek(first * np.dtype(self.dtype).itemsize)
            while block := written.read(BLOCK):
                other.extend(np.frombuffer(block, self.dtype))
        begins = np.array(self._begins, dtype="<i8")
        other._begins = array("q", begins[begins >= first] - first)
        self._begins = array("q", begins[begins < first])
        self._truncate(first)

    def finish(self) -> None:
        """Write the sections after the ids, and close the file."""
        if not self.tokens:
            return
        size = ShardSize(self.tokens, self.documents, np.dtype(self.dtype).itemsize)
        begins = np.array(self._begins, dtype="<i8")
        index = np.searchsorted(begins, np.arange(size.index_entries) * INDEX_STRIDE)
        self._file.write(bytes(size.begins_offset - self.tokens * size.id_bytes))
        self._file.write(begins.data)
        self._file.write(index.astype("<i8").data)
        if self._has_targets:
            self._file.write(np.packbits(np.concatenate(self._targets), bitorder="little").data)


class FileSums(NamedTuple):
    """The checksums of a file of a shard."""

    sha256: str
    """in hex"""
    blocks: str
    """XXH3-128 of each block, one after the other, in hex"""


def file_sums(path: Path) -> FileSums:
    """Return the checksums of a file, reading it once."""
    digest = hashlib.sha256()
    blocks = ""
    with os.fdopen(open_regular(path), "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            blocks += xxhash.xxh3_128_hexdigest(block)
    return FileSums(digest.hexdigest(), blocks)


class SplitRecord(NamedTuple):
    """Size and checksums of the finished file of one split of a shard; an empty split has no file."""

    tokens: int
    documents: int
    sha256: str
    sums: str
    """see FileSums.blocks"""


class ShardTableWriter:
    """Collects the records of the shards, in order, and writes `shards.bin` and `sums.bin`."""

    def __init__(self) -> None:
        self.shards = 0
        self._tokens = {split: array("q") for split in SPLITS}
        self._documents = {split: array("q") for split in SPLITS}
        self._sha256 = {split: bytearray() for split in SPLITS}
        self._sums = bytearray()

    def add(self, records: dict[Split, SplitRecord]) -> None:
        self.shards += 1
        for split in SPLITS:
            record = records[split]
            self._tokens[split].append(record.tokens)
            self._documents[split].append(record.documents)
            self._sha256[split] += bytes.fromhex(record.sha256).ljust(_SHA256_BYTES, b"\0")
            self._sums += bytes.fromhex(record.sums)

    def write(self, folder: Path) -> tuple[str, str]:
        """Return the sha256 of both files."""
        paths = [folder / SHARD_TABLE, folder / SUMS]
        with replacing(paths) as (table, sums):
            for numbers in (self._tokens, self._documents):
                for split in SPLITS:
                    table.write(np.array(numbers[split], dtype="<i8").tobytes())
            for split in SPLITS:
                table.write(self._sha256[split])
            sums.write(self._sums)
        return sha256_of(paths[0]), sha256_of(paths[1])


def write_header(folder: Path, header: CorpusHeader) -> None:
    """Write `corpus.json`: from then on the corpus is complete."""
    with replacing([folder / HEADER]) as (file,):
        file.write(json.dumps(asdict(header), indent=1).encode())
