"""Write the records of a source into a corpus folder: tokenize, split, write shards, in parallel, and restartable.

A shard holds some thousand records. Its files are written under temporary names and renamed, its `.json` last, so a
shard that has a `.json` is complete. `corpus.json` is written when all shards are complete. So a killed preparation
never leaves a corpus that looks complete, and starting it again keeps the finished shards. What is written depends on
the plan and the records alone: two nodes that build one corpus in one shared folder write the same bytes.
"""

import hashlib
import json
import math
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from torchllm.config import Source
from torchllm.data.corpus import FORMAT, HEADER, SPLITS, Ids, corpus_fingerprint, shard_file
from torchllm.data.error import DataError
from torchllm.data.order import mix_words
from torchllm.data.sources import SourceFile, TextRecord, read_records
from torchllm.data.tokenizer import Pattern, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import datasets

_RECORDS_PER_CALL = 64
"""records tokenized at a time"""
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
    """approximate size of the text of a shard, in MiB"""

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


def write_corpus(
    dataset: "datasets.Dataset", plan: CorpusPlan, tokenizer: TokenizerSpec, folder: Path, processes: int = 1
) -> dict[str, Any]:
    """Write the corpus of a data set (see `sources.read_source`) into `folder` and return its header.

    Raises DataError, naming the first bad record, if plan.on_bad_record is "error".
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = _shard_jobs(dataset, plan, tokenizer, folder)
    shards = []
    with (
        tqdm(total=len(dataset), unit="rows", desc=f"tokenizing {plan.source.kind}", disable=None) as bar,
        _running(jobs, processes) as results,
    ):
        for shard in results:
            bar.update(shard["rows"])
            shards.append(shard)
    totals: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    largest_id = 0
    for shard in shards:
        for key in ("documents", "tokens", "text_bytes"):
            totals[key] += shard[key]
        skipped.update(shard["skipped"])
        largest_id = max(largest_id, shard["max_token"])
    loaded = tokenizer.load()
    header = {
        "format": FORMAT,
        "key": plan.key,
        "plan": asdict(plan) | {"files": len(plan.files)},
        "dtype": _id_dtype(loaded),
        "tokenizer": loaded.fingerprint,
        "documents": totals["documents"],
        "tokens": totals["tokens"],
        "text_bytes": totals["text_bytes"],
        "max_token": largest_id,
        "skipped": dict(skipped),
        "shards": shards,
    }
    header["fingerprint"] = corpus_fingerprint(header)
    write_json(folder / HEADER, header)
    return header


def _shard_jobs(
    dataset: "datasets.Dataset", plan: CorpusPlan, tokenizer: TokenizerSpec, folder: Path
) -> list[_ShardJob]:
    """Cut a data set into shards of about plan.shard_mib of text each."""
    records = len(dataset)
    per_shard = max(1, math.ceil(records * plan.shard_mib * 2**20 / max(1, dataset.data.nbytes)))
    jobs = []
    for number, start in enumerate(range(0, records, per_shard)):
        stop = min(start + per_shard, records)
        jobs.append(_ShardJob(dataset, plan, tokenizer, folder, number, start, stop))
    return jobs


@contextmanager
def _running(jobs: list[_ShardJob], processes: int) -> Iterator[Iterator[dict[str, Any]]]:
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


def _write_shard(job: _ShardJob) -> dict[str, Any]:
    """Write a shard and return the content of its .json; a finished shard is verified and kept."""
    marker = job.folder / f"{job.number:05d}.json"
    finished = _finished_shard(marker, job.plan.key)
    if finished is not None:
        return finished
    tokenizer = job.tokenizer.load()
    held_out = _held_out(job.plan, job.start, job.stop)
    skipped: Counter[str] = Counter()
    text_bytes = 0
    id_files = [shard_file(job.folder, job.number, split, "bin") for split in SPLITS]
    begin_files = [shard_file(job.folder, job.number, split, "begins") for split in SPLITS]
    with _replacing(id_files) as files:
        train, validation = (_SplitWriter(file, tokenizer) for file in files)
        for document, is_held_out in zip(_tokenized(job, tokenizer), held_out, strict=True):
            record = document.record
            if not record.fault:
                writer = validation if is_held_out else train
                writer.add(document.ids)
                text_bytes += len(record.text.encode())
            elif job.plan.on_bad_record == "skip":
                skipped[record.fault] += 1
            else:
                raise DataError(f"{record.where}: {record.fault}{record.detail}; {_advice(record, tokenizer)}")
    with _replacing(begin_files) as files:
        for file, writer in zip(files, (train, validation), strict=True):
            file.write(np.array(writer.begins, dtype="<i8").tobytes())
    files_on_disk = {}
    for split in SPLITS:
        for suffix in ("bin", "begins"):
            path = shard_file(job.folder, job.number, split, suffix)
            files_on_disk[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    shard = {
        "key": job.plan.key,
        "rows": job.stop - job.start,
        "documents": len(train.begins) + len(validation.begins),
        "tokens": train.tokens + validation.tokens,
        "text_bytes": text_bytes,
        "max_token": max(train.largest_id, validation.largest_id),
        "skipped": dict(skipped),
        "files": files_on_disk,
    }
    write_json(marker, shard)
    return shard


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


class _SplitWriter:
    """Writes the token stream of one split of a shard."""

    def __init__(self, file: IO[bytes], tokenizer: Tokenizer) -> None:
        self.file = file
        self.tokenizer = tokenizer
        self.dtype = _id_dtype(tokenizer)
        self.begins: list[int] = []
        """index in the stream at which each document begins"""
        self.tokens = 0
        self.largest_id = 0

    def add(self, ids: Ids) -> None:
        """Write a document: its begin token, its ids, its end token."""
        document = np.empty(len(ids) + 2, dtype=self.dtype)
        document[0] = self.tokenizer.begin
        document[1:-1] = ids
        document[-1] = self.tokenizer.end
        self.file.write(document.data)
        self.begins.append(self.tokens)
        self.tokens += len(document)
        self.largest_id = max(self.largest_id, int(document.max()))


def _held_out(plan: CorpusPlan, start: int, stop: int) -> npt.NDArray[np.bool_]:
    """Return whether each record start <= i < stop is held out: if a hash of (source, i) is under validation_fraction.

    So it does not depend on the other records, nor on the number of shards.
    """
    name = f"{plan.source.kind}:{Path(plan.source.path).name}:{plan.source.split}"
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    hashed = mix_words(np.arange(start, stop, dtype=np.uint64) ^ np.uint64(key))
    uniform = (hashed >> np.uint64(11)) * 2.0**-53  # 53 bits as a float in [0, 1)
    return uniform < plan.validation_fraction


def _finished_shard(marker: Path, key: str) -> dict[str, Any] | None:
    """Return the content of a shard's .json if the shard is of this plan and its files are as written; else None."""
    try:
        shard: dict[str, Any] = json.loads(marker.read_bytes())
        if shard["key"] != key:
            return None
        for name, file in shard["files"].items():
            if _sha256(marker.parent / name) != file["sha256"]:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return shard


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _replacing(paths: list[Path]) -> Iterator[Sequence[IO[bytes]]]:
    """Open files for writing that appear under their names, complete and on disk, when the block ends without error."""
    suffix = f".{socket.gethostname()}-{os.getpid()}.tmp"  # other processes may write the same files
    temporary = [path.with_name(path.name + suffix) for path in paths]
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that appears complete or not at all."""
    with _replacing([path]) as (file,):
        file.write(json.dumps(content, indent=1).encode())
