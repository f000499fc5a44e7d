"""Corpora in the token files of other programs, read where they are.

The process that prepares for its node lists the files once and writes the result into the cache: which files, how
many ids, where the validation split begins, and a fingerprint. All ranks of the node read that description, so a file
is looked at by one process, and opened by another only when a sequence of it is read.

The files have no checksums. The fingerprint is of the size of each file and of blocks of 64 KiB: of all blocks of a
corpus of up to 256 MiB; of a larger one, blocks at even distances, first and last among them, 256 MiB together. It is
computed again when the ctime of a file is another one than in the description, also during a run.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.config.files import cache_root
from torchllm.data.checked_file import CorpusFile, DamagedFile, FileState, look_at
from torchllm.data.corpus import SequenceSource, ShardStream
from torchllm.data.path_hint import describe_missing
from torchllm.data.readers import ReaderSettings
from torchllm.data.shard import SPLITS, Begins, Ids, Split
from torchllm.tools.prepare.corpus_writer import replacing
from torchllm.tools.prepare.file_kinds import describe_kinds
from torchllm.tools.prepare.file_search import FoundFiles, find_files
from torchllm.tools.prepare.files_at_path import choose_by_name
from torchllm.tools.prepare.formats.llmc import LLMC
from torchllm.tools.prepare.formats.mds import MDS
from torchllm.tools.prepare.formats.megatron import MEGATRON
from torchllm.tools.prepare.formats.nanogpt import NANOGPT
from torchllm.tools.prepare.formats.token_file import InPlaceSettings, OpenTokens, TokenFormat, TokenShard
from torchllm.tools.prepare.source_files import ChosenFiles

_FORMATS: dict[str, TokenFormat] = {"megatron": MEGATRON, "llmc": LLMC, "nanogpt": NANOGPT, "mds": MDS}
_SAMPLED = 2**28
"""bytes that are hashed for the fingerprint; whole blocks, and two of each file at least"""
_SAMPLE = 2**16
"""bytes of a block"""
_IDS_PER_LOOK = 2**16
"""ids that are searched at a time for the next document"""
_FILES_LOOKED_AT, _LOOKED_AT = 16, 2**20
"""files, and tokens of each, that are searched for the end of a document"""
_VERSION = 3
"""of the description"""


class _Piece(NamedTuple):
    """A part of a shard that belongs to one split."""

    shard: TokenShard
    first: int
    """first token of the shard in the piece"""
    end: int
    """token of the shard before which it ends"""


class _Description(NamedTuple):
    """The content of the files."""

    pieces: dict[Split, list[_Piece]]
    fingerprint: str
    files: list[FileState]
    """all that was read, as it was before"""


def in_place_settings(source: Source, data: Data) -> InPlaceSettings:
    column = source.text_key if source.kind == "mds" and source.text_key != Source().text_key else ""
    return InPlaceSettings(source.kind, data.dtype, data.separator, column, str(cache_root(data)))


def token_files(source: Source, by_name: bool = True) -> ChosenFiles:
    """Return the files of a source that are a shard each, or list some: all in a folder, those that match a glob.

    by_name: as of `choose_files`. Raises DataError if there is none to train on.
    """
    pattern = _FORMATS[source.kind].pattern
    path = source.path
    if source.kind == "megatron" and not os.path.isdir(path):
        index = Path(path).with_suffix(".idx") if os.path.exists(path) else Path(f"{path}.idx")
        if index.is_file():  # of the .bin, or of the prefix that Megatron-LM's own options take
            path = str(index)
    found = find_files(path, lambda name: fnmatchcase(name, pattern))
    if not os.path.lexists(path):
        found = FoundFiles([file for file in found.files if Path(file.path).match(pattern)])
    if not found.files:
        hint = f"it has {describe_kinds(found.ignored)}" if found.ignored else describe_missing(source.path)
        raise DataError(f"data.sources: no file {pattern} at {source.path!r} (kind {source.kind!r}): {hint}")
    return choose_by_name(source, found, by_name)


def describe_in_place(source: Source, data: Data, vocab: int) -> Path:
    """Return the file in the cache that describes a source, after writing it if it is not there.

    Raises DataError if a file is not of the format, or has ids of `vocab` or more among its first ones.
    """
    settings = in_place_settings(source, data)
    files = token_files(source, by_name=source not in data.validation)
    listed = [_VERSION, settings._replace(cache=""), data.validation_fraction, files]
    key = hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]
    path = cache_root(data) / f"{source.kind}-{key}.json"
    if not path.is_file() or not _is_current(path):
        for chosen in [*files.train, *files.held_out]:
            _FORMATS[source.kind].refuse(Path(chosen.path), settings, vocab)
        description = _describe(settings, files, data.validation_fraction, vocab)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing([path]) as (file,):
            file.write(json.dumps(description, default=str).encode())
    return path


def _is_current(path: Path) -> bool:
    """Return whether a description in the cache is whole, and the files are as they were described."""
    try:
        pieces, _, files = _read(path)
        return list(map(look_at, _files_of(pieces))) == files
    except DataError:
        return False


def _describe(settings: InPlaceSettings, files: ChosenFiles, held_out: float, vocab: int) -> _Description:
    """Return the content of the files of a source. `held_out`: share of the validation split if no file is one."""
    reader = _FORMATS[settings.kind]
    by_split: dict[Split, list[TokenShard]] = {split: [] for split in SPLITS}
    for split, chosen in zip(SPLITS, files, strict=True):
        for file in chosen:
            by_split[split] += reader.list_shards(Path(file.path), settings)
    pieces: dict[Split, list[_Piece]] = {}
    for split, shards in by_split.items():
        pieces[split] = [_Piece(shard, 0, shard.tokens) for shard in _joined(shards, settings, vocab)]
    if not pieces["validation"] and held_out > 0:
        pieces = _cut_documents(pieces["train"], settings, held_out)
    states = list(map(look_at, _files_of(pieces)))  # before the content: a later change shows
    return _Description(pieces, _fingerprint(pieces, settings), states)


def _joined(shards: Sequence[TokenShard], settings: InPlaceSettings, vocab: int) -> list[TokenShard]:
    """Return the shards of a split, with whether each begins a document.

    Raises DataError if an id among the first ones of a shard is not under `vocab`.
    """
    joined: list[TokenShard] = []
    last_id = -1
    for shard in shards:
        tokens = _PieceTokens(_Piece(shard, 0, shard.tokens), settings, vocab)
        tokens.read_ids(0, min(shard.tokens, _IDS_PER_LOOK))
        joined.append(shard._replace(starts_document=not joined or tokens.begins_after(last_id)))
        last_id = int(tokens.read_ids(shard.tokens - 1, shard.tokens)[0])
        tokens.close()
    return joined


def _cut_documents(pieces: Sequence[_Piece], settings: InPlaceSettings, held_out: float) -> dict[Split, list[_Piece]]:
    """Return the pieces of both splits: the last documents, `held_out` of all ids, are the validation split.

    If no document begins in these ids, the last one is cut.
    """
    place = int(sum(piece.end for piece in pieces) * (1 - held_out))
    train: list[_Piece] = []
    validation: list[_Piece] = []
    for piece in pieces:
        if validation:
            validation.append(piece)
            continue
        cut = piece.end
        if place < piece.end:
            cut = _first_begin(piece, max(0, place), settings)
            if cut == piece.end and piece is pieces[-1]:
                cut = max(0, place)
        place -= piece.end
        train.append(piece._replace(end=cut))
        if cut < piece.end:
            validation.append(piece._replace(first=cut))
    return {"train": [piece for piece in train if piece.end > piece.first], "validation": validation}


def _first_begin(piece: _Piece, first: int, settings: InPlaceSettings) -> int:
    """Return the first token of a shard, from `first` on, that begins a document; the end of the shard if none does."""
    tokens = _FORMATS[settings.kind].open_shard(piece.shard, settings)
    try:
        for start in range(first, piece.end, _IDS_PER_LOOK):
            begins = tokens.read_begins(start, min(start + _IDS_PER_LOOK, piece.end))
            if len(begins):
                return int(begins[0])
        return piece.end
    finally:
        tokens.close()


def _files_of(pieces: Mapping[Split, Sequence[_Piece]]) -> list[CorpusFile]:
    """Return the files of a corpus, each once."""
    files: dict[CorpusFile, None] = {}
    for split in SPLITS:
        for piece in pieces[split]:
            files.update(dict.fromkeys(piece.shard.files))
    return list(files)


def _fingerprint(pieces: Mapping[Split, Sequence[_Piece]], settings: InPlaceSettings) -> str:
    """Return a hash of the data in the files: ids, their order, splits and document boundaries; not the folder."""
    files = _files_of(pieces)
    number_of = {file: number for number, file in enumerate(files)}
    total = sum(file.size for file in files)
    digest = hashlib.sha256(json.dumps(settings._replace(cache="")).encode())
    for split in SPLITS:
        for piece in pieces[split]:
            numbers = [number_of[file] for file in piece.shard.files]
            described = [split, numbers, piece.first, piece.end, piece.shard.starts_document]
            digest.update(json.dumps(described).encode())
    for file in files:
        digest.update(f"{file.size}".encode())
        with file.path.open("rb") as content:
            for block in _sampled_blocks(file.size, total):
                content.seek(block * _SAMPLE)
                digest.update(content.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _sampled_blocks(size: int, total: int) -> list[int]:
    """Return the blocks of a file of `size` bytes that are hashed, in a corpus of `total` bytes."""
    blocks = max(1, math.ceil(size / _SAMPLE))
    share = blocks * _SAMPLED // total
    wanted = min(blocks, max(2, share))
    places = np.linspace(0, blocks - 1, wanted).astype(int)
    return np.unique(places).tolist()


def _read(path: Path) -> _Description:
    """Return a description that is in the cache. Raises DataError if it is damaged."""
    try:
        content_pieces, fingerprint, files = json.loads(path.read_bytes())
        pieces: dict[Split, list[_Piece]] = {}
        for split in SPLITS:
            pieces[split] = []
            for (paths, tokens, starts_document), first, end in content_pieces[split]:
                corpus_files = [CorpusFile(Path(path), size) for path, size in paths]
                pieces[split].append(_Piece(TokenShard(corpus_files, tokens, starts_document), first, end))
        return _Description(pieces, fingerprint, [FileState(Path(path), changed_ns) for path, changed_ns in files])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path} is damaged: the next start writes it anew") from error


class _PieceTokens(OpenTokens):
    """The open ids of a piece of a shard, counted from its beginning, which are checked to be under a vocabulary."""

    def __init__(self, piece: _Piece, settings: InPlaceSettings, vocab: int) -> None:
        self._tokens = _FORMATS[settings.kind].open_shard(piece.shard, settings)
        self._piece = piece
        self._vocab = vocab

    def read_ids(self, first: int, end: int) -> Ids:
        """See ReadableShard. Raises DataError if an id is not under the vocabulary."""
        offset = self._piece.first
        ids = self._tokens.read_ids(first + offset, end + offset)
        if len(ids) and ids.max() >= self._vocab:
            index = int(np.argmax(ids >= self._vocab))
            raise DataError(
                f"{self._piece.shard.files[0].path}: its token {first + offset + index:,} has the id {ids[index]} >= "
                f"model.vocab = {self._vocab}: raise model.vocab, or see whether kind and data.dtype are right"
            )
        return ids

    def read_begins(self, first: int, end: int) -> Begins:
        offset = self._piece.first
        return self._tokens.read_begins(first + offset, end + offset) - offset

    def begins_after(self, last_id: int) -> bool:
        return self._tokens.begins_after(last_id)

    def close(self) -> None:
        self._tokens.close()


class InPlaceCorpus(ShardStream):
    """A corpus in the files of another program, as a description in the cache says."""

    def __init__(self, description: Path, settings: InPlaceSettings, vocab: int) -> None:
        """Read a description. `vocab`: ids must be under this."""
        self._description_path = description
        self._settings = settings
        self._vocab = vocab
        self._pieces, self.fingerprint, files = _read(description)
        self._changed_ns = dict(files)
        """ctime of each file whose content is as the fingerprint says"""
        super().__init__({split: [piece.end - piece.first for piece in self._pieces[split]] for split in SPLITS})

    def __reduce__(self) -> tuple[type["InPlaceCorpus"], tuple[Path, InPlaceSettings, int]]:
        return InPlaceCorpus, (self._description_path, self._settings, self._vocab)  # it is read again, not sent

    def open_shard(self, split: Split, number: int) -> OpenTokens:
        return _PieceTokens(self._pieces[split][number], self._settings, self._vocab)

    def unverified_file(self, split: Split, number: int) -> FileState | None:
        """See ShardStream: a file that was changed since the fingerprint was computed."""
        states = map(look_at, self._pieces[split][number].shard.files)
        return next((file for file in states if file.changed_ns != self._changed_ns[file.path]), None)

    def verify(self, split: Split, number: int, pace: Callable[[int], None] = lambda size: None) -> None:
        """See ShardStream: compute the fingerprint of the corpus again, if the shard's files were changed."""
        changed = self.unverified_file(split, number)
        if changed is None:
            return
        states = dict(map(look_at, _files_of(self._pieces)))  # before the content: a later change shows
        if _fingerprint(self._pieces, self._settings) != self.fingerprint:
            raise DamagedFile(changed.path, "has another content than when the run began")
        self._changed_ns = states

    def describe(self) -> str:
        files = len(_files_of(self._pieces))
        train, held_out = self.tokens("train"), self.tokens("validation")
        return f"{files:,} files, {train:,} tokens to train on, {held_out:,} held out{self._describe_no_end()}"

    def _describe_no_end(self) -> str:
        """Return that no document ends, as with a separator that never comes; "" if one does in the first tokens."""
        settings = self._settings
        for piece in self._pieces["train"][:_FILES_LOOKED_AT]:
            tokens = _FORMATS[settings.kind].open_shard(piece.shard, settings)
            begins = tokens.read_begins(piece.first + 1, min(piece.end, piece.first + _LOOKED_AT))
            tokens.close()
            if len(begins):
                return ""
        named = f" (data.separator = {settings.separator})" if settings.separator >= 0 else ""
        return f"; no document ends in the first {_LOOKED_AT:,} tokens of each file{named}"


class InPlaceReader:
    """Reads token files of another program where they are, after describing them in the cache."""

    def prepare(self, source: Source, settings: ReaderSettings) -> str:
        """See SourceReader: write the description if it is not cached."""
        return str(describe_in_place(source, settings.data, settings.vocab))

    def open(self, source: Source, folder: str, settings: ReaderSettings) -> SequenceSource:
        return InPlaceCorpus(Path(folder), in_place_settings(source, settings.data), settings.vocab)
