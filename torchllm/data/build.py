"""Write the records of a source into a corpus folder: tokenize, split, write shards, in parallel, and restartable.

The files of a shard are written under temporary names and renamed, its `.json` last, so a shard that has a `.json` is
complete. `corpus.json` is written when all shards are complete. So a killed preparation never leaves a corpus that
looks complete, and starting it again keeps the finished shards; nothing else reads the `.json` of a shard. What is
written depends on the plan and the records alone: two nodes that build one corpus in one shared folder write the same
bytes.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from torchllm.config import Source
from torchllm.data.corpus_header import (
    FORMAT,
    CorpusHeader,
    ShardTableWriter,
    SplitRecord,
    corpus_fingerprint,
    write_header,
)
from torchllm.data.error import DataError
from torchllm.data.order import mix_words
from torchllm.data.shard import (
    SPLITS,
    Ids,
    ShardFileWriter,
    Split,
    file_sums,
    replacing,
    shard_path,
)
from torchllm.data.sources import SourceFile, TextRecord, read_records
from torchllm.data.tokenizer import Pattern, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import datasets

_RECORDS_PER_CALL = 64
"""records tokenized at a time"""
_SMALLEST_SHARD_MIB = 64.0
_LARGEST_SHARD_MIB = 1024.0
_SHARDS = 256
"""of a corpus of medium size: enough that its processes end at about the same time"""
OVER_VOCAB = "token id over model.vocab"
"""fault of a record whose tokens the model does not have"""


@dataclass(frozen=True)
class CorpusPlan:
    """Everything that decides what is in a corpus. The key of a cached corpus is a hash of these fields."""

    source: Source
    files: list[SourceFile]
    tokenizer: str
    """fingerprint of the tokenizer"""
    vocab: int
    """token ids must be under this"""
    validation_fraction: float
    on_bad_record: Literal["error", "skip"]
    shard_mib: float
    """approximate size of the text of a shard, in MiB; 0: see `shard_size_mib`"""

    @property
    def key(self) -> str:
        """Return a hash of the plan."""
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TokenizerSpec:
    """The arguments of `load_tokenizer`, sent to worker processes instead of the tokenizer."""

    name: str
    pattern: Pattern
    threads: int = 1

    def load(self) -> Tokenizer:
        """Return the tokenizer."""
        return load_tokenizer(self.name, self.pattern, self.threads)


class _ShardJob(NamedTuple):
    """The records start <= i < stop of a data set, to be written as shard `number`."""

    dataset: "datasets.Dataset"
    plan: CorpusPlan
    tokenizer: TokenizerSpec
    folder: Path
    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class FinishedShard:
    """The content of a shard's `.json`."""

    key: str
    """of the plan"""
    rows: int
    """records read"""
    text_bytes: int
    max_token: int
    """largest token id"""
    skipped: dict[str, int]
    """records left out, by their fault"""
    splits: dict[Split, SplitRecord]


def write_corpus(
    dataset: "datasets.Dataset", plan: CorpusPlan, tokenizer: TokenizerSpec, folder: Path, processes: int = 1
) -> CorpusHeader:
    """Write the corpus of a data set (see `sources.read_source`) into `folder` and return its header.

    Raises DataError, naming the first bad record, if plan.on_bad_record is "error".
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = _shard_jobs(dataset, plan, tokenizer, folder)
    table = ShardTableWriter()
    totals: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    largest_id = 0
    with (
        tqdm(total=len(dataset), unit="rows", desc=f"tokenizing {plan.source.kind}", disable=None) as bar,
        _running(jobs, processes) as results,
    ):
        for shard in results:
            bar.update(shard.rows)
            table.add(shard.splits)
            for split in shard.splits.values():
                totals["documents"] += split.documents
                totals["tokens"] += split.tokens
            totals["text_bytes"] += shard.text_bytes
            skipped.update(shard.skipped)
            largest_id = max(largest_id, shard.max_token)
    loaded = tokenizer.load()
    sums = table.write(folder)
    header = CorpusHeader(
        format=FORMAT,
        key=plan.key,
        plan=asdict(plan) | {"files": len(plan.files)},
        dtype=_id_dtype(loaded),
        tokenizer=loaded.fingerprint,
        documents=totals["documents"],
        tokens=totals["tokens"],
        text_bytes=totals["text_bytes"],
        max_token=largest_id,
        skipped=dict(skipped),
        shards=table.shards,
        fingerprint=corpus_fingerprint(_id_dtype(loaded), loaded.fingerprint, sums.table),
        table_sha256=sums.table,
        sums_sha256=sums.sums,
    )
    write_header(folder, header)
    return header


def shard_size_mib(text_mib: float, shard_mib: float) -> float:
    """Return the text of a shard in MiB: `shard_mib` or, if that is 0, a size that fits a source of `text_mib`.

    Then a source has 256 shards, of 64 MiB to 1 GiB: up to 16 GiB they are 64 MiB, which as many processes as possible
    share, from 256 GiB on they are 1 GiB, so that the table of a corpus of 15T tokens (60,000 shards) stays small. It
    does not depend on the number of processes, which must not decide what is in a corpus.
    """
    return shard_mib or min(max(text_mib / _SHARDS, _SMALLEST_SHARD_MIB), _LARGEST_SHARD_MIB)


def _shard_jobs(
    dataset: "datasets.Dataset", plan: CorpusPlan, tokenizer: TokenizerSpec, folder: Path
) -> list[_ShardJob]:
    """Cut a data set into shards of about the same text each."""
    records = len(dataset)
    text_mib = dataset.data.nbytes / 2**20
    shards = max(1.0, text_mib / shard_size_mib(text_mib, plan.shard_mib))
    per_shard = max(1, math.ceil(records / shards))
    jobs = []
    for number, start in enumerate(range(0, records, per_shard)):
        stop = min(start + per_shard, records)
        jobs.append(_ShardJob(dataset, plan, tokenizer, folder, number, start, stop))
    return jobs


@contextmanager
def _running(jobs: list[_ShardJob], processes: int) -> Iterator[Iterator[FinishedShard]]:
    """Yield the results of `_write_shard` on the jobs, in order, computed here or in `processes` other processes."""
    if processes == 1 or len(jobs) < 2:
        yield map(_write_shard, jobs)
        return
    # spawn: the caller may hold threads and locks, and a preparation is long against an interpreter's start
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_write_shard, job) for job in jobs]
        try:
            yield (future.result() for future in futures)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _id_dtype(tokenizer: Tokenizer) -> str:
    """Return numpy's name of the smallest type for the tokenizer's ids: 16 or 32 bits, little endian."""
    return "<u2" if tokenizer.vocab <= 2**16 else "<u4"


def _write_shard(job: _ShardJob) -> FinishedShard:
    """Write a shard and return the content of its .json; a finished shard is verified and kept."""
    finished = _finished_shard(job.folder, job.number, job.plan.key)
    if finished is not None:
        return finished
    tokenizer = job.tokenizer.load()
    held_out = _held_out(job.plan, job.start, job.stop)
    skipped: Counter[str] = Counter()
    text_bytes = 0
    paths = [shard_path(job.folder, job.number, split) for split in SPLITS]
    with replacing(paths) as files:
        train, validation = writers = [ShardFileWriter(file, _id_dtype(tokenizer)) for file in files]
        for document, is_held_out in zip(_tokenized(job, tokenizer), held_out, strict=True):
            record = document.record
            if not record.fault:
                writer = validation if is_held_out else train
                writer.add(_between_begin_and_end(document.ids, tokenizer))
                text_bytes += len(record.text.encode())
            elif job.plan.on_bad_record == "skip":
                skipped[record.fault] += 1
            else:
                raise DataError(f"{record.where}: {record.fault}{record.detail}; {_advice(record, tokenizer)}")
        for writer in writers:
            writer.finish()
    splits: dict[Split, SplitRecord] = {}
    for split, path, writer in zip(SPLITS, paths, writers, strict=True):
        splits[split] = _split_record(path, writer)
    shard = FinishedShard(
        key=job.plan.key,
        rows=job.stop - job.start,
        text_bytes=text_bytes,
        max_token=max(writer.largest_id for writer in writers),
        skipped=dict(skipped),
        splits=splits,
    )
    with replacing([_marker(job.folder, job.number)]) as (file,):
        file.write(json.dumps(asdict(shard)).encode())
    return shard


def _split_record(path: Path, writer: ShardFileWriter) -> SplitRecord:
    """Return the record of a file that was written; an empty one is removed."""
    if not writer.tokens:
        path.unlink(missing_ok=True)
        return SplitRecord(tokens=0, documents=0, sha256="", sums=[])
    sums = file_sums(path)
    return SplitRecord(writer.tokens, writer.documents, sums.sha256, sums.blocks)


def _between_begin_and_end(ids: Ids, tokenizer: Tokenizer) -> Ids:
    """Return a document: its begin token, its ids, its end token."""
    document = np.empty(len(ids) + 2, dtype=_id_dtype(tokenizer))
    document[0] = tokenizer.begin
    document[1:-1] = ids
    document[-1] = tokenizer.end
    return document


class _Document(NamedTuple):
    """A record and its token ids, empty if the record has a fault."""

    record: TextRecord
    ids: Ids


def _tokenized(job: _ShardJob, tokenizer: Tokenizer) -> Iterator[_Document]:
    """Yield the records of a shard, tokenized; a token id over the vocabulary is a fault of its record."""
    no_ids = np.empty(0, dtype=np.uint32)
    for start in range(job.start, job.stop, _RECORDS_PER_CALL):
        stop = min(start + _RECORDS_PER_CALL, job.stop)
        records = read_records(job.dataset, job.plan.source, start, stop)
        encoded = iter(tokenizer.encode_documents([record.text for record in records if not record.fault]))
        for record in records:
            ids = no_ids if record.fault else next(encoded)
            if len(ids) and ids.max() >= job.plan.vocab:
                detail = f" ({ids.max()}; model.vocab = {job.plan.vocab})"
                record = record._replace(fault=OVER_VOCAB, detail=detail)
            yield _Document(record, ids)


def _advice(record: TextRecord, tokenizer: Tokenizer) -> str:
    """Return what the user can do about a bad record."""
    if record.fault == OVER_VOCAB:
        return (
            f"raise model.vocab to {tokenizer.vocab} or more, for data.tokenizer {tokenizer.name!r} has that many ids, "
            "or use a smaller tokenizer"
        )
    return 'set data.on_bad_record = "skip" to leave such records out and count them'


def _held_out(plan: CorpusPlan, start: int, stop: int) -> npt.NDArray[np.bool_]:
    """Return whether each record start <= i < stop is held out: if a hash of (source, i) is under validation_fraction.

    So it does not depend on the other records, nor on the number of shards.
    """
    name = f"{plan.source.kind}:{Path(plan.source.path).name}:{plan.source.split}"
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    hashed = mix_words(np.arange(start, stop, dtype=np.uint64) ^ np.uint64(key))
    uniform = (hashed >> np.uint64(11)) * 2.0**-53  # 53 bits as a float in [0, 1)
    return uniform < plan.validation_fraction


def _marker(folder: Path, number: int) -> Path:
    """Return the path of the file that says that a shard is complete."""
    return folder / f"{number:05d}.json"


def _finished_shard(folder: Path, number: int, key: str) -> FinishedShard | None:
    """Return the content of a shard's .json if the shard is of this plan and its files are as written; else None."""
    try:
        shard = FinishedShard(**json.loads(_marker(folder, number).read_bytes()))
        splits = {split: SplitRecord(*shard.splits[split]) for split in SPLITS}
        if shard.key != key:
            return None
        for split, record in splits.items():
            if record.tokens and file_sums(shard_path(folder, number, split)).blocks != record.sums:
                return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return replace(shard, splits=splits)
