"""Tokenize the records of one shard and write its files; a process tokenizes shard after shard.

The files of a shard are written under temporary names and renamed, its `.json` last, so a shard that has a `.json` is
complete. The token files depend on the plan and the records alone.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np

from torchllm.config.errors import DataError
from torchllm.data.shard import SPLITS, Ids, Split, shard_path
from torchllm.data.tokenizer import Tokenizer
from torchllm.runtime.heartbeat import beat
from torchllm.tools.prepare.bad_records import FileTally, RecordTally
from torchllm.tools.prepare.corpus_writer import ShardFileWriter, SplitRecord, file_sums, replacing
from torchllm.tools.prepare.counts import ENDED, READY, UNDIVIDED, UNKNOWN, unknown_share
from torchllm.tools.prepare.pieces import LONGEST, NoPlaceToCut, cut_pieces
from torchllm.tools.prepare.plan import CorpusPlan, LoadTokenizer
from torchllm.tools.prepare.records import NO_PLACE_TO_CUT, UNREADABLE, Origin, TextRecord
from torchllm.tools.prepare.sources import RawSource, ShardRange

_RECORDS_PER_CALL = 64
"""records tokenized at a time, at most"""
_BYTES_PER_CALL = 2**19
"""text tokenized at a time, without the last record's"""
_MOST_UNKNOWN = 0.5
"""share of the tokens over which unknown ones are an error"""
ReportText = Callable[[int], None]
OVER_VOCAB = "token id over model.vocab"
"""fault of a record whose tokens the model does not have"""
NOT_OF_TOKENIZER = "token id that data.tokenizer does not have"
"""fault of a record of token ids"""
UNTOKENIZED = "text that the tokenizer fails on"


@dataclass(frozen=True)
class FinishedShard:
    """The content of a shard's `.json`."""

    key: str
    """of the plan"""
    text_bytes: int
    max_token: int
    """largest token id"""
    skipped: dict[str, int]
    """records that were skipped, by their fault; without `unreadable`"""
    splits: dict[Split, SplitRecord]
    unreadable: list[str] = field(default_factory=list)
    """files that could not be read; other shards may have them too"""
    counts: dict[str, int] = field(default_factory=dict)
    """counts of conversations, by outcome (see `conversation_writer.py`)"""
    tallies: dict[str, FileTally] = field(default_factory=dict)
    """of files with bad records, and of the first and the last file"""
    changes: str = ""
    """`changes_of` the source's files; empty: an earlier version wrote the shard"""


@dataclass(frozen=True)
class ShardTokenizer:
    """Writes shards of one corpus. It is sent to each process once."""

    source: RawSource
    plan: CorpusPlan
    load_tokenizer: LoadTokenizer
    folder: Path
    writer: "type[ShardWriter]"
    """class that writes the records"""
    changes: str
    """`changes_of` the source's files"""

    def write(self, shard: ShardRange, report: ReportText = lambda size: None) -> FinishedShard:
        """Write a shard and return the content of its .json; a finished shard of the same files is verified and kept.

        `report` is called with the bytes of text that were tokenized since its last call.
        Raises DataError, naming the first bad record, if plan.on_bad_record is "error".
        """
        finished = _finished_shard(self.folder, shard.number, self.plan.key)
        if finished is not None and finished.changes in ("", self.changes):
            return finished
        paths = [shard_path(self.folder, shard.number, split) for split in SPLITS]
        with replacing(paths) as files:
            writer = self.writer(files, self.plan, self.load_tokenizer(), self.folder)
            writer.report = report
            writer.write(self.source.records(shard))
            writer.finish()
        splits: dict[Split, SplitRecord] = {}
        for split, path, split_writer in zip(SPLITS, paths, writer.splits, strict=True):
            splits[split] = _split_record(path, split_writer)
        content = FinishedShard(
            key=self.plan.key,
            text_bytes=writer.text_bytes,
            max_token=max(split_writer.largest_id for split_writer in writer.splits),
            skipped=dict(writer.skipped),
            splits=splits,
            unreadable=sorted(writer.unreadable),
            counts=dict(writer.counts),
            tallies=writer.tally.tallies(),
            changes=self.changes,
        )
        with replacing([_marker(self.folder, shard.number)]) as (file,):
            file.write(json.dumps(asdict(content)).encode())
        return content


def id_dtype(tokenizer: Tokenizer) -> str:
    """Return numpy's name of the smallest type for the tokenizer's ids: 16 or 32 bits, little endian."""
    return "<u2" if tokenizer.vocab <= 2**16 else "<u4"


class ShardWriter:
    """Tokenizes records and writes them into the files of their splits."""

    def __init__(self, files: Sequence[IO[bytes]], plan: CorpusPlan, tokenizer: Tokenizer, folder: Path) -> None:
        """Write to `files`, one per split in the order of SPLITS; `folder` is the corpus's."""
        dtype = id_dtype(tokenizer)
        self.splits = [ShardFileWriter(file, dtype, has_targets=plan.chat is not None) for file in files]
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.unreadable: set[str] = set()
        self.text_bytes = 0
        self.tally = RecordTally(plan.source, plan.on_bad_record)
        self._plan = plan
        self._held_out = {file.path for file in plan.files[len(plan.files) - plan.held_out :]}
        self.tokenizer = tokenizer if plan.fim is None else plan.fim.made_special(tokenizer)
        self._begin = np.array(tokenizer.begins, dtype=dtype)
        self._end = np.array([tokenizer.end], dtype=dtype)
        self.report: ReportText = lambda size: None
        """is called with the bytes of text that were tokenized since its last call"""

    def write(self, records: Iterable[TextRecord]) -> None:
        """Write records in their order: short ones many at a time, a long one in pieces."""
        batch: list[TextRecord] = []
        size = 0
        for record in records:
            if record.is_long:
                self._write_batch(batch)
                batch, size = [], 0
                self._write_long(record)
                continue
            batch.append(record)
            size += record.size
            if len(batch) == _RECORDS_PER_CALL or size >= _BYTES_PER_CALL:
                self._write_batch(batch)
                batch, size = [], 0
        self._write_batch(batch)

    def finish(self) -> None:
        """Write the rest of each file, after its ids."""
        self.tally.finish()
        if self._plan.last_tokens:
            self.hold_out_last()
        for split in self.splits:
            split.finish()

    def hold_out_last(self) -> None:
        """Move the last tokens of the shard to the validation split."""
        train, validation = self.splits
        train.move_last(int(train.tokens * self._plan.validation_fraction), validation)

    def _write_batch(self, batch: Sequence[TextRecord]) -> None:
        """Tokenize and write short records."""
        beat("tokenizing")
        parts = [self._parts(record) for record in batch]
        encoded = iter(self._encode([text for texts in parts for text in texts]))
        for record, texts in zip(batch, parts, strict=True):
            if record.fault:
                self.skip(record)
                continue
            ids = self._joined([next(encoded) for _ in texts]) if record.ids is None else record.ids
            if ids is None:
                self.skip(record._replace(fault=UNTOKENIZED))
                continue
            if self.over_vocab(ids):
                self.skip_over_vocab(record, ids)
                continue
            self._count_good(record)
            self.count_unknown(ids)
            if record.ids is None:
                ids = np.concatenate([self._begin, ids, self._end], dtype=self._end.dtype, casting="unsafe")
                self.text_bytes += record.size
            elif self._plan.fim is not None:
                raise DataError(
                    f"{record.origin.describe()}: data.fim_rate cuts text, and this is token ids: set it to 0"
                )
            else:
                self.counts.update({READY: 1, ENDED: int(ids[-1] == self.tokenizer.end)})
            self.split_of(record).add(ids.astype(self._end.dtype, copy=False))
        self.report(sum(record.size for record in batch))

    def _parts(self, record: TextRecord) -> list[str]:
        """Return the texts of a short record that are tokenized one by one: all of it, or three (`FillInTheMiddle`)."""
        if record.fault or record.ids is not None:
            return []
        if self._plan.fim is None or self.split_of(record) is not self.splits[0]:
            return [record.text]
        return self._plan.fim.cut(record.text, record.text_hash)

    def _joined(self, parts: Sequence[Ids | None]) -> Ids | None:
        """Return the ids of a document from the ids of each of its parts; None if the tokenizer failed on one."""
        known = [ids for ids in parts if ids is not None]
        if len(known) < len(parts):
            return None
        return known[0] if self._plan.fim is None else self._plan.fim.join(known)

    def _write_long(self, record: TextRecord) -> None:
        """Tokenize and write a record in pieces; written pieces are removed if one of them has a fault."""
        split = self.split_of(record)
        split.begin_document()
        split.extend(self._begin)
        try:
            for piece in cut_pieces(record.blocks(), self.tokenizer.find_cut):
                (ids,) = self._encode([piece])
                if ids is None or self.over_vocab(ids):
                    split.drop_document()
                    if ids is None:
                        self.skip(record._replace(fault=UNTOKENIZED))
                    else:
                        self.skip_over_vocab(record, ids)
                    return
                split.extend(ids)
                self.count_unknown(ids)
                self.report(len(piece.encode()))
        except NoPlaceToCut:
            split.drop_document()
            detail = f" (no blank or line end in {LONGEST:,} characters at which {self.tokenizer.name!r} can cut it)"
            self.skip(record._replace(fault=NO_PLACE_TO_CUT, detail=detail))
            return
        split.extend(self._end)
        self._count_good(record)
        self.text_bytes += record.size

    def _count_good(self, record: TextRecord) -> None:
        """Count a record that is written."""
        self.tally.good(record)
        if self._plan.source.delimiter and record.origin == Origin(record.origin.name):
            self.counts[UNDIVIDED] += 1

    def split_of(self, record: TextRecord) -> ShardFileWriter:
        """Return the writer of a record's split: its file's split, if any file is held out, or else by its text.

        All are trained at first if the last tokens are held out.

        A hash of the text decides then, so that the same text is never both in training and in validation data,
        whatever its file, source or row.
        """
        train, validation = self.splits
        if self._held_out:
            return validation if record.origin.name in self._held_out else train
        if self._plan.last_tokens:
            return train
        return validation if record.is_held_out(self._plan.validation_fraction) else train

    def count_unknown(self, ids: Ids) -> None:
        """Count the tokens that stand for text that the tokenizer does not know."""
        if self.tokenizer.unknown is not None and (count := int((ids == self.tokenizer.unknown).sum())):
            self.counts[UNKNOWN] += count

    def over_vocab(self, ids: Ids) -> bool:
        """Return whether the model lacks one of these tokens."""
        return len(ids) > 0 and int(ids.max()) >= self._plan.vocab

    def skip_over_vocab(self, record: TextRecord, ids: Ids) -> None:
        """Skip a record whose tokens the model or the tokenizer does not have, or raise DataError."""
        largest, name, has = int(ids.max()), self.tokenizer.name, self.tokenizer.vocab
        if largest < has:
            fault, detail = OVER_VOCAB, f" ({largest}; model.vocab = {self._plan.vocab})"
            advice = (
                f"raise model.vocab to {has} or more, for data.tokenizer {name!r} has that many ids, or use a smaller "
                "tokenizer"
            )
        else:
            fault, detail = NOT_OF_TOKENIZER, f" ({largest}; {name!r} has {has} ids)"
            advice = "set it to the one that the ids were made with"
        if self._plan.on_bad_record == "error":
            raise DataError(f"{record.origin.describe()}: {fault}{detail}; {advice}")
        self.skip(record._replace(fault=fault, detail=detail))

    def skip(self, record: TextRecord) -> None:
        """Count a bad record, or raise DataError; an empty file is not a fault."""
        self.tally.bad(record)
        if record.fault == UNREADABLE:
            self.unreadable.add(record.origin.name)
        else:
            self.skipped[record.fault] += 1

    def _encode(self, texts: Sequence[str]) -> Sequence[Ids | None]:
        """Return the ids of each text; None for those that the tokenizer fails on."""
        try:
            return self.tokenizer.encode_documents(texts)
        except BaseException as error:
            if not is_of_tokenizer(error):
                raise
        if len(texts) == 1:
            return [None]
        return [ids for text in texts for ids in self._encode([text])]


def is_of_tokenizer(error: BaseException) -> bool:
    """Return whether Hugging Face's tokenizers raised an error: it has no exception class, or is a panic of Rust."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def refuse_unknown(name: str, tokenizer: Tokenizer, counts: Mapping[str, int], tokens: int) -> None:
    """Raise DataError if most tokens of a source stand for text that the tokenizer does not know."""
    share = unknown_share(counts, tokens)
    if tokenizer.unknown is not None and share > _MOST_UNKNOWN:
        raise DataError(
            f"data.tokenizer: {tokenizer.name} does not know the text of {name}: {share:.0%} of its tokens are "
            f'{tokenizer.decode([tokenizer.unknown])}. Use a tokenizer that was made for this text, or "bytes"'
        )


def _split_record(path: Path, writer: ShardFileWriter) -> SplitRecord:
    """Return the record of a file that was written; an empty one is removed."""
    if not writer.tokens:
        path.unlink(missing_ok=True)
        return SplitRecord(tokens=0, documents=0, sha256="", sums="")
    sums = file_sums(path)
    return SplitRecord(writer.tokens, writer.documents, sums.sha256, sums.blocks)


def _marker(folder: Path, number: int) -> Path:
    """Return the path of the file that says that a shard is complete."""
    return folder / f"{number:05d}.json"


def first_changes(folder: Path) -> str:
    """Return the `changes` of the first shard of a corpus; "" if they are not known."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        return str(json.loads(_marker(folder, 0).read_bytes())["changes"])
    return ""


def _finished_shard(folder: Path, number: int, key: str) -> FinishedShard | None:
    """Return the content of a shard's .json if the shard is of this plan and its files are as written; else None."""
    try:
        shard = FinishedShard(**json.loads(_marker(folder, number).read_bytes()))
        splits = {split: SplitRecord(*shard.splits[split]) for split in SPLITS}
        tallies = {name: _read_tally(tally) for name, tally in shard.tallies.items()}
        if shard.key != key:
            return None
        for split, record in splits.items():
            sums = file_sums(shard_path(folder, number, split)).blocks if record.tokens else ""
            if record.sums != sums:
                return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return replace(shard, splits=splits, tallies=tallies)


def _read_tally(tally: FileTally) -> FileTally:
    """Return a tally that was written as JSON, with the type of each part."""
    records, bad, first = tally
    return FileTally(records, bad, None if first is None else Origin(*first))
