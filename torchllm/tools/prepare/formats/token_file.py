"""The interface of a reader of another program's token files, and the reader of files that are nothing but ids."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchllm.config.errors import DataError
from torchllm.data.checked_file import CheckedFile, CorpusFile
from torchllm.data.shard import Begins, Ids, ReadableShard


class WrongFormat(DataError):
    """A file is not of the format that its source says."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"data.sources: {path} {fault}")


class InPlaceSettings(NamedTuple):
    """Settings of the config for token files that do not contain them."""

    kind: str
    dtype: str = ""
    """data.dtype"""
    separator: int = -1
    """data.separator"""
    column: str = ""
    """text_key of the source; empty: the default"""
    cache: str = ""
    """folder for files that have to be decompressed"""


class TokenShard(NamedTuple):
    """A shard of a corpus that is read in place."""

    files: list[CorpusFile]
    tokens: int
    starts_document: bool = True
    """the first token begins a document; False: it continues the last one of the shard before"""


class OpenTokens(ReadableShard):
    """An open shard. Ids are unsigned: a negative one of a signed file is one that no model has."""

    def begins_after(self, last_id: int) -> bool:
        """Return whether the first token begins a document where the shard before ends with `last_id`."""
        return True


class TokenFormat(NamedTuple):
    """How the files of one program are found and opened."""

    pattern: str
    """name of the files in a folder that are a shard each, or that list shards"""
    list_shards: Callable[[Path, InPlaceSettings], Sequence[TokenShard]]
    """returns the shards that a file holds or lists; raises WrongFormat"""
    open_shard: Callable[[TokenShard, InPlaceSettings], OpenTokens]
    refuse: Callable[[Path, InPlaceSettings, int], None] = lambda path, settings, vocab: None
    """raises WrongFormat for a file with another content than its form promises; `vocab`: of the model"""


class SeparatedIds(OpenTokens):
    """Ids of documents whose last token is a separator."""

    def __init__(self, separator: int, starts_document: bool) -> None:
        self._separator = separator
        self._starts_document = starts_document

    def begins_after(self, last_id: int) -> bool:
        return last_id == self._separator

    def read_begins(self, first: int, end: int) -> Begins:
        start = max(0, first - 1)
        after = np.flatnonzero(self.read_ids(start, end - 1) == self._separator) + start + 1
        if first == 0 and self._starts_document:
            return np.concatenate([[0], after])
        return after


class FlatIds(SeparatedIds):
    """An open file of ids of one type, one after another from an offset on."""

    def __init__(self, shard: TokenShard, dtype: str, offset: int, separator: int) -> None:
        """`dtype`: numpy's name of the type of an id; `offset`: of the first id, in bytes."""
        super().__init__(separator, shard.starts_document)
        self._file = CheckedFile(shard.files[0])
        self._id_bytes = np.dtype(dtype).itemsize
        self._offset = offset

    def read_ids(self, first: int, end: int) -> Ids:
        return self._file.read(f"<u{self._id_bytes}", end - first, self._offset + first * self._id_bytes)

    def close(self) -> None:
        self._file.close()
