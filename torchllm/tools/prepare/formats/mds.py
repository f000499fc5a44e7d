"""MDS, the shards of mosaicml-streaming: index.json, and samples of named columns; one is an array of ids.

Written by `MDSWriter` of `streaming/base/format/mds/writer.py` of mosaicml/streaming (commit 89e7bb9), arrays by
`NDArray` of `encodings.py` in the same folder. A shard is, little endian:

    uint32               n, number of samples
    (n + 1) x uint32     offset of each sample in the file, and the end of the last
    JSON                 the shard's record in index.json, too
    n samples            uint32 per column without a fixed size: its bytes; then the columns in the order of names

A column "ndarray:uint16:2048" has ids alone. One without a shape, "ndarray:uint16", has before them a byte 4 x (number
of dimensions) + c and the dimensions as integers of 2^c bytes, the smallest that hold them.

A shard that is compressed by zstd is decompressed into the cache when it is first read.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchllm.data.checked_file import CheckedFile, CorpusFile
from torchllm.data.shard import Begins, Ids
from torchllm.tools.prepare.corpus_writer import replacing
from torchllm.tools.prepare.formats.token_file import (
    InPlaceSettings,
    SeparatedIds,
    TokenFormat,
    TokenShard,
    WrongFormat,
)

_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_SHAPE_BYTES = (1, 2, 4, 8)
_ONE_DIMENSION = 4
"""the byte before an array of one dimension, without the code of its size in the two low bits"""

_BLOCK = 2**20
"""bytes that are decompressed at a time"""

Numbers = npt.NDArray[np.int64]


class _Column(NamedTuple):
    """How the arrays of ids are stored."""

    number: int
    """of the column"""
    id_bytes: int
    shape: tuple[int, ...]
    """() if each array says its own"""
    sizes: list[int]
    """bytes of each column of a sample, 0 if they vary"""


def _column_of(path: Path, record: dict[str, Any], name: str) -> _Column:
    """Return the column with the ids. Raises WrongFormat if none, or not one, is an array of integers."""
    encodings = dict(zip(record["column_names"], record["column_encodings"], strict=True))
    arrays = [column for column, encoding in encodings.items() if encoding.split(":")[0] == "ndarray"]
    if name in encodings:
        chosen = name
    elif len(arrays) == 1:
        chosen = arrays[0]
    else:
        listed = ", ".join(f"{column} ({encoding})" for column, encoding in encodings.items())
        raise WrongFormat(path, f"has the columns {listed}: name the column of the ids by text_key")
    kind, _, rest = encodings[chosen].partition(":")
    dtype, _, shape = rest.partition(":")
    if kind != "ndarray" or dtype not in _INTEGERS:
        raise WrongFormat(
            path,
            f"has the column {chosen!r} of type {encodings[chosen]!r}, but arrays of one integer type are read",
        )
    dimensions = tuple(int(size) for size in shape.split(",")) if shape else ()
    return _Column(
        number=record["column_names"].index(chosen),
        id_bytes=np.dtype(dtype).itemsize,
        shape=dimensions,
        sizes=[size or 0 for size in record["column_sizes"]],
    )


def _read_records(path: Path) -> list[dict[str, Any]]:
    """Return the record of each shard in an index.json. Raises WrongFormat if it is not of version 2."""
    try:
        content = json.loads(path.read_bytes())
        records: list[dict[str, Any]] = content["shards"]
        versions = {content["version"], *(record["version"] for record in records)}
        formats = {record["format"] for record in records}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WrongFormat(path, f"is no index of mosaicml-streaming ({error})") from None
    if versions != {2} or formats - {"mds"}:
        raise WrongFormat(path, f"has shards of format {sorted(formats)}, version {sorted(versions)}: mds, 2 is read")
    return records


def _record_of(index: Path, name: str) -> dict[str, Any]:
    """Return the record of the shard whose file, compressed or not, has this name, from an index.json."""
    for record in _read_records(index):
        for data in (record["raw_data"], record["zip_data"]):
            if data is not None and data["basename"] == name:
                return record
    raise WrongFormat(index, f"does not list {name}")


def _shard_file(path: Path, record: dict[str, Any]) -> CorpusFile:
    """Return the file of a shard: as it was before it was compressed, if that is there."""
    choices = [record["raw_data"], record["zip_data"]]
    for choice in choices:
        if choice is None:
            continue
        if Path(choice["basename"]).name != choice["basename"]:
            raise WrongFormat(path, f"names the file {choice['basename']!r} outside of its folder")
        file = CorpusFile(path.with_name(choice["basename"]), choice["bytes"])
        if file.path.is_file():
            return file
    names = " nor ".join(choice["basename"] for choice in choices if choice)
    raise WrongFormat(path, f"names a shard that is missing: there is no {names}")


def _list_shards(path: Path, settings: InPlaceSettings) -> Sequence[TokenShard]:
    """Return the shards that an index.json lists. Raises WrongFormat if one has no ids that can be read."""
    shards = []
    for record in _read_records(path):
        column = _column_of(path, record, settings.column)
        file = _shard_file(path, record)
        is_compressed = file.path.name != record["raw_data"]["basename"]
        if is_compressed and str(record["compression"]).split(":")[0] != "zstd":
            raise WrongFormat(file.path, f"is compressed by {record['compression']!r}: decompress it, or use zstd")
        shard = TokenShard([file, CorpusFile(path, path.stat().st_size)], 0)
        if column.shape:
            tokens = record["samples"] * prod(column.shape)
        else:
            opened = _OpenMds(shard, settings)
            tokens = opened.tokens
            opened.close()
        shards.append(shard._replace(tokens=tokens))
    return shards


def _decompressed(file: CorpusFile, size: int, cache: str) -> CorpusFile:
    """Return a decompressed shard of `size` bytes in the cache. Any process may write it: it appears whole."""
    import pyarrow

    status = file.path.stat()
    identity = f"{os.path.realpath(file.path)} {status.st_size} {status.st_ctime_ns}"  # programs can set the mtime
    target = Path(cache, f"mds-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.mds")
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        left = size
        with replacing([target]) as (output,):
            try:
                with pyarrow.input_stream(str(file.path), compression="zstd") as stream:
                    while left >= 0 and (block := stream.read(_BLOCK)):
                        left -= len(block)
                        output.write(block)
            except OSError as error:
                raise WrongFormat(file.path, f"cannot be decompressed ({error}): copy it again") from error
            if left:
                more = "more" if left < 0 else f"{left:,} bytes less"
                raise WrongFormat(file.path, f"unpacks to {more} than the {size:,} bytes of its index: copy it again")
    return CorpusFile(target, size)


class _OpenMds(SeparatedIds):
    """An open shard of MDS."""

    def __init__(self, shard: TokenShard, settings: InPlaceSettings) -> None:
        super().__init__(settings.separator, shard.starts_document)
        self._samples_are_documents = settings.separator < 0
        file, index = shard.files
        record = _record_of(index.path, file.path.name)
        self._column = _column_of(index.path, record, settings.column)
        raw = record["raw_data"]
        if file.path.name != raw["basename"]:
            file = _decompressed(file, raw["bytes"], settings.cache)
        self._file = CheckedFile(file)
        offsets = self._file.read("<u4", record["samples"] + 1, 4).astype(np.int64)
        column = self._column
        varying = [number for number, size in enumerate(column.sizes) if size == 0]
        column_sizes = self._column_sizes(offsets, varying)
        sizes = column_sizes[:, column.number]
        """(samples,), bytes of each array of ids"""
        self._array_begins = offsets[:-1] + 4 * len(varying) + column_sizes[:, : column.number].sum(axis=1)
        """(samples,), byte of the file"""
        self._headers = self._header_sizes(sizes)
        self._firsts = np.concatenate([[0], np.cumsum((sizes - self._headers) // column.id_bytes)])
        """first token of each sample, and the number of tokens"""

    @property
    def tokens(self) -> int:
        return int(self._firsts[-1])

    def begins_after(self, last_id: int) -> bool:
        return self._samples_are_documents or super().begins_after(last_id)

    def _column_sizes(self, offsets: Numbers, varying: list[int]) -> Numbers:
        """Return the bytes of each column of each sample, (samples, columns). varying: columns whose bytes vary.

        offsets: of the samples in the file, and the end of the last.
        """
        bytes_of_sizes = 4 * len(varying)
        sizes = np.tile(np.array(self._column.sizes, dtype=np.int64), (len(offsets) - 1, 1))
        if len(varying) == 1:
            sizes[:, varying[0]] = np.diff(offsets) - bytes_of_sizes - sum(self._column.sizes)
        elif varying:  # only the samples say their sizes
            content = self._file.read("u1", self._file.file.size, 0)
            for sample, offset in enumerate(offsets[:-1]):
                sizes[sample, varying] = content[offset : offset + bytes_of_sizes].view("<u4")
        return sizes

    def _header_sizes(self, sizes: Numbers) -> Numbers:
        """Return how many bytes of each array are not ids; `sizes`: of arrays of one dimension."""
        headers = np.zeros_like(sizes)
        if self._column.shape:
            return headers
        for shape_bytes in reversed(_SHAPE_BYTES):  # the smallest that holds the number of ids is set last
            header = 1 + shape_bytes
            count = (sizes - header) // self._column.id_bytes
            headers[count < 256**shape_bytes] = header
        return headers

    def read_ids(self, first: int, end: int) -> Ids:
        """See ReadableShard. Raises WrongFormat if an array has more than one dimension."""
        dtype = f"<u{self._column.id_bytes}"
        if first >= end:
            return np.zeros(0, dtype=dtype)
        first_sample, last_sample = (np.searchsorted(self._firsts, [first, end - 1], side="right") - 1).tolist()
        start = int(self._array_begins[first_sample])
        ids_of_last = self._count(last_sample) * self._column.id_bytes
        stop = int(self._array_begins[last_sample] + self._headers[last_sample]) + ids_of_last
        content = self._file.read("u1", stop - start, start)
        parts = []
        for sample in range(first_sample, last_sample + 1):
            begin = int(self._array_begins[sample]) - start
            header = int(self._headers[sample])
            if header and content[begin] - content[begin] % 4 != _ONE_DIMENSION:
                raise WrongFormat(self._file.file.path, f"has an array of more dimensions than one in sample {sample}")
            parts.append(np.frombuffer(content, dtype, self._count(sample), begin + header))
        skipped = first - int(self._firsts[first_sample])
        return np.concatenate(parts)[skipped : skipped + end - first]

    def _count(self, sample: int) -> int:
        return int(self._firsts[sample + 1] - self._firsts[sample])

    def read_begins(self, first: int, end: int) -> Begins:
        """See ReadableShard: a sample is a document, or the text after a separator."""
        if not self._samples_are_documents:
            return super().read_begins(first, end)
        low, high = np.searchsorted(self._firsts[:-1], [first, end])
        return self._firsts[low:high]

    def close(self) -> None:
        self._file.close()


MDS = TokenFormat("index.json", _list_shards, _OpenMds)
