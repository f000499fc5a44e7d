"""The description of a corpus in its folder: a small `corpus.json`, and binary columns about its shards.

`corpus.json` is written last, so a folder that has one is complete. It holds a CorpusHeader as JSON: how the corpus was
made, totals, the number N of shards, its fingerprint, and the sha256 of the other files. These are, little endian:

    shards.bin   2 x N x int64       tokens: N numbers of the train split, then N of the validation split
                 2 x N x int64       documents, likewise
                 2 x N x 32 bytes    sha256 of the files, likewise; zeros where a split of a shard is empty
    sums.bin     16 bytes per MiB    XXH3-128 of each MiB of the files: shard 0 train, shard 0 validation, shard 1 ...

A process that opens a corpus reads `corpus.json` and the first 32 N bytes of `shards.bin`. Of `sums.bin` it reads the
sums of files that it checks. 15T tokens in shards of 1 GiB of text are 60,000 shards: 2 MB of columns to read.

The fingerprint of a corpus is a hash of its tokens, their order, splits and document boundaries, through the sha256 of
its files, and does not depend on the folder. In a corpus of format 2 the sums are CRC-32, uint32.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchllm.config.errors import DataError
from torchllm.config.files import read_regular, sha256_of
from torchllm.data.checked_file import BLOCK, BlockSums
from torchllm.data.shard import SPLITS, ShardSize, Split

HEADER = "corpus.json"
SHARD_TABLE = "shards.bin"
SUMS = "sums.bin"
REMOTE = "remote.json"
"""URL of the shards, in a description that was copied from object storage (`remote_shards.py`)"""
FORMAT = 3
"""version of the format that is written"""
SUM_BYTES = {2: 4, FORMAT: 16}
"""size of the sum of a MiB in the formats that are read"""

Column = npt.NDArray[np.int64]
"""(shards,)"""


@dataclass(frozen=True)
class CorpusHeader:
    """The content of `corpus.json`."""

    format: int
    key: str
    """hash of the plan (see `build.CorpusPlan`)"""
    plan: dict[str, Any]
    dtype: str
    """numpy's dtype of an id, "<u2" or "<u4" """
    tokenizer: str
    """fingerprint of the tokenizer"""
    documents: int
    tokens: int
    text_bytes: int
    max_token: int
    """largest token id"""
    skipped: dict[str, int]
    """number of skipped records by error"""
    shards: int
    """number of shards"""
    fingerprint: str
    table_sha256: str
    """sha256 of shards.bin"""
    sums_sha256: str
    """sha256 of sums.bin"""
    sequence_length: int = 0
    """over 0: the corpus holds whole examples, packed into sequences of this length, and marks the trained tokens; it
    can be read with this training.sequence_length only; 0: documents, for any length"""
    counts: dict[str, int] = field(default_factory=dict)
    """counts of the conversations and their outcome (see `conversation_writer.py`)"""

    @property
    def id_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    def shard_size(self, tokens: int, documents: int) -> ShardSize:
        return ShardSize(tokens, documents, self.id_bytes, has_targets=self.sequence_length > 0)


def read_url(folder: Path) -> str:
    """Return the URL of the shards of a corpus; "" if they are in its folder."""
    path = folder / REMOTE
    return str(json.loads(path.read_bytes())["url"]) if path.exists() else ""


class ShardColumns(NamedTuple):
    """Tokens and documents of every shard of one split."""

    tokens: Column
    documents: Column


class CorpusDescription(NamedTuple):
    """The parts of a description that every process reads to open a corpus."""

    header: CorpusHeader
    columns: dict[Split, ShardColumns]


def read_description(folder: Path) -> CorpusDescription:
    """Read header and columns of a corpus. Raises DataError if they are missing, of another format, or damaged."""
    content = _read_json(folder)
    try:
        header = CorpusHeader(**content)
    except TypeError as error:
        raise DataError(f"{folder / HEADER} is damaged ({error}): prepare the corpus again") from None
    fingerprint = corpus_fingerprint(header.dtype, header.tokenizer, header.table_sha256, header.sequence_length)
    if header.fingerprint != fingerprint:
        raise _changed(folder / HEADER)
    table = folder / SHARD_TABLE
    try:
        numbers = np.fromfile(table, dtype="<i8", count=4 * header.shards)
    except OSError as error:
        raise _unreadable(table, error) from None
    if len(numbers) != 4 * header.shards:
        raise _changed(table)
    tokens, documents = numbers.reshape(2, len(SPLITS), header.shards)
    columns = {split: ShardColumns(tokens[row], documents[row]) for row, split in enumerate(SPLITS)}
    return CorpusDescription(header, columns)


def check_fingerprint(folder: Path) -> None:
    """Raise DataError if records or checksums of the shards differ from the written ones. O(shards + MiB)."""
    content = _read_json(folder)
    for name, sha256 in ((SHARD_TABLE, content["table_sha256"]), (SUMS, content["sums_sha256"])):
        try:
            is_as_written = sha256_of(folder / name) == sha256
        except OSError as error:
            raise _unreadable(folder / name, error) from None
        if not is_as_written:
            raise _changed(folder / name)


def corpus_fingerprint(dtype: str, tokenizer: str, table_sha256: str, sequence_length: int = 0) -> str:
    """Return a hash of a corpus: its tokens, their order, splits and document boundaries, but not its folder."""
    parts: list[Any] = [dtype, tokenizer, table_sha256]
    if sequence_length:
        parts.append(sequence_length)
    content = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


LARGEST_HEADER = 1 << 30
"""bytes; its plan names every file of the source"""


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / HEADER
    try:
        content = json.loads(read_regular(path, LARGEST_HEADER))
    except FileNotFoundError:
        from torchllm.data.path_hint import describe_missing  # of no use where there is one

        raise DataError(
            f"{folder} holds no token shards: there is no {HEADER} (recipes/prepare.py writes it last; "
            f"if it was stopped, run it again); {describe_missing(str(folder))}"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): prepare the corpus again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged (it holds no JSON object): prepare the corpus again")
    if content.get("format") not in [*SUM_BYTES]:
        raise DataError(
            f"{path}: a corpus of format {content.get('format')!r}; this version of torchllm reads 2 and 3: "
            "prepare the corpus again"
        )
    return content


def _changed(path: Path) -> DataError:
    return DataError(f"{path} was changed after it was written: copy or prepare the corpus again")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror}): copy or prepare the corpus again")


def first_blocks(description: CorpusDescription) -> Column:
    """Return for each file, in the order of `sums.bin`, how many blocks the files before it have; then the total.

    The result has 2 x shards + 1 entries; file 2 n + s is split s of shard n.
    """
    header, columns = description
    blocks = np.zeros((header.shards, len(SPLITS)), dtype=np.int64)
    for position, split in enumerate(SPLITS):
        for number, (tokens, documents) in enumerate(zip(*columns[split], strict=True)):
            file_bytes = header.shard_size(int(tokens), int(documents)).file_bytes
            blocks[number, position] = -(-file_bytes // BLOCK)
    return np.concatenate([[0], np.cumsum(blocks)])


def read_sums(folder: Path, header: CorpusHeader, first: int, end: int) -> BlockSums:
    """Return the sums of the blocks first <= i < end of a corpus. Raises DataError if they cannot be read."""
    path = folder / SUMS
    width = SUM_BYTES[header.format]
    try:
        sums = np.fromfile(path, dtype=f"V{width}", count=end - first, offset=width * first)
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(sums) != end - first:
        raise _changed(path)
    return sums
