"""Rows of text into a corpus folder: tokenize, split, write shards; atomically, restartably, in parallel.

A shard is some thousand rows. Its files are written under temporary names and renamed, its `.json` last: a shard with a
.json is whole. `corpus.json` is written when all shards are. So a killed preparation never leaves half a corpus, and
starting it again keeps the finished shards. What is written depends on `plan` and the rows alone: two nodes that build
the same corpus in one shared folder write the same bytes.
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
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from tqdm import tqdm

from torchllm.config import Source
from torchllm.data.corpus import FORMAT, HEADER, SPLITS, Ids, fingerprint_of, shard_file
from torchllm.data.error import DataError
from torchllm.data.order import mix_words
from torchllm.data.sources import SourceFile, read_records
from torchllm.data.tokenizer import Pattern, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import datasets

_ROWS = 64
"""rows tokenized at a time"""


@dataclass(frozen=True)
class CorpusPlan:
    """Everything that decides what is in a corpus."""

    source: Source
    files: list[SourceFile]
    tokenizer: str
    """its fingerprint"""
    vocab: int
    """ids must be under this"""
    validation_fraction: float
    on_bad_record: Literal["error", "skip"]
    shard_mib: float
    """text of a shard, about, in MiB"""

    @property
    def key(self) -> str:
        """A hash of the plan."""
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TokenizerSpec:
    """How a worker process gets its tokenizer."""

    name: str
    pattern: Pattern
    threads: int = 1

    def load(self) -> Tokenizer:
        return load_tokenizer(self.name, self.pattern, self.threads)


def write_corpus(
    dataset: "datasets.Dataset", plan: CorpusPlan, encoder: TokenizerSpec, folder: Path, processes: int = 1
) -> dict[str, Any]:
    """Write the corpus of a data set (see `sources.read_source`) into `folder` and return its header.

    DataError names the first bad record when plan.on_bad_record is "error".
    """
    tokenizer = encoder.load()
    per_shard = max(1, math.ceil(len(dataset) * plan.shard_mib * 2**20 / max(1, dataset.data.nbytes)))
    ranges = [(start, min(start + per_shard, len(dataset))) for start in range(0, len(dataset), per_shard)]
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(dataset, plan, encoder, folder, number, *span) for number, span in enumerate(ranges)]
    shards = []
    with (
        tqdm(total=len(dataset), unit="rows", desc=f"tokenizing {plan.source.kind}", disable=None) as bar,
        _running(jobs, processes) as done,
    ):
        for shard in done:
            bar.update(shard["rows"])
            shards.append(shard)
    header = {
        "format": FORMAT,
        "key": plan.key,
        "plan": asdict(plan) | {"files": len(plan.files)},
        "dtype": _dtype(tokenizer),
        "tokenizer": tokenizer.fingerprint,
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "text_bytes": sum(shard["text_bytes"] for shard in shards),
        "max_token": max((shard["max_token"] for shard in shards), default=0),
        "skipped": dict(sum((Counter(shard["skipped"]) for shard in shards), Counter())),
        "shards": shards,
    }
    header["fingerprint"] = fingerprint_of(header)
    write_json(folder / HEADER, header)
    return header


@contextmanager
def _running(jobs: list[Any], processes: int) -> Iterator[Iterator[dict[str, Any]]]:
    """The results of `_write_shard` over the jobs, in order, computed here or in `processes` of their own."""
    if processes == 1 or len(jobs) < 2:
        yield (_write_shard(*job) for job in jobs)
        return
    # spawn: the caller may hold threads and locks, and a preparation is long against an interpreter's start
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_write_shard, *job) for job in jobs]
        try:
            yield (future.result() for future in futures)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _dtype(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.vocab <= 2**16 else "<u4"


def _write_shard(
    dataset: "datasets.Dataset",
    plan: CorpusPlan,
    encoder: TokenizerSpec,
    folder: Path,
    number: int,
    start: int,
    stop: int,
) -> dict[str, Any]:
    """Write rows start <= i < stop as one shard and return what its .json says; a finished one is verified and kept."""
    marker = folder / f"{number:05d}.json"
    kept = _finished(marker, plan.key)
    if kept is not None:
        return kept
    tokenizer = encoder.load()
    held_out = _held_out(plan, start, stop)
    outputs = {split: _Output(_dtype(tokenizer)) for split in SPLITS}
    skipped: Counter[str] = Counter()
    text_bytes = 0
    with _replacing([shard_file(folder, number, split, "bin") for split in SPLITS]) as files:
        for first in range(start, stop, _ROWS):
            batch = read_records(dataset, plan.source, first, min(first + _ROWS, stop))
            encoded = iter(tokenizer.encode_documents([row.text for row in batch if not row.bad]))
            for i, row in enumerate(batch, start=first - start):
                bad, detail = row.bad, row.detail
                if not bad:
                    ids = next(encoded)
                    if len(ids) and ids.max() >= plan.vocab:
                        bad, detail = "token id over model.vocab", f" ({ids.max()}; model.vocab = {plan.vocab})"
                if not bad:
                    split = SPLITS[int(held_out[i])]
                    outputs[split].add(ids, tokenizer, files[SPLITS.index(split)])
                    text_bytes += len(row.text.encode())
                elif plan.on_bad_record == "skip":
                    skipped[bad] += 1
                else:
                    hint = 'set data.on_bad_record = "skip" to leave such records out and count them'
                    raise DataError(f"{row.where}: {bad}{detail}; {hint}")
    begins = [shard_file(folder, number, split, "begins") for split in SPLITS]
    with _replacing(begins) as files:
        for split, file in zip(SPLITS, files, strict=True):
            file.write(np.array(outputs[split].begins, dtype="<i8").tobytes())
    shard = {
        "key": plan.key,
        "rows": stop - start,
        "documents": sum(len(output.begins) for output in outputs.values()),
        "tokens": sum(output.tokens for output in outputs.values()),
        "text_bytes": text_bytes,
        "max_token": max(output.largest for output in outputs.values()),
        "skipped": dict(skipped),
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for split in SPLITS
            for path in (shard_file(folder, number, split, "bin"), shard_file(folder, number, split, "begins"))
        },
    }
    write_json(marker, shard)
    return shard


class _Output:
    """The stream of one split of one shard, as it is written."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.begins, self.tokens, self.largest = dtype, list[int](), 0, 0

    def add(self, ids: Ids, tokenizer: Tokenizer, file: IO[bytes]) -> None:
        document = np.empty(len(ids) + 2, dtype=self.dtype)
        document[0], document[1:-1], document[-1] = tokenizer.begin, ids, tokenizer.end
        file.write(document.data)
        self.begins.append(self.tokens)
        self.tokens += len(document)
        self.largest = max(self.largest, int(document.max()))


def _held_out(plan: CorpusPlan, start: int, stop: int) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Which rows are held out: a hash of (source, row) under data.validation_fraction, whatever else there is."""
    name = f"{plan.source.kind}:{Path(plan.source.path).name}:{plan.source.split}"
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    hashed = mix_words(np.arange(start, stop, dtype=np.uint64) ^ np.uint64(key))
    return (hashed >> np.uint64(11)) * 2.0**-53 < plan.validation_fraction


def _finished(marker: Path, key: str) -> dict[str, Any] | None:
    """What a shard's .json says if the shard is of this plan and its files are what it says."""
    try:
        shard: dict[str, Any] = json.loads(marker.read_bytes())
        whole = shard["key"] == key and all(
            _sha256(marker.parent / name) == said["sha256"] for name, said in shard["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return None
    return shard if whole else None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _replacing(paths: list[Path]) -> Iterator[Sequence[IO[bytes]]]:
    """Files to write that appear under their names, whole and on disk, when the block ends; else not at all."""
    mine = f".{socket.gethostname()}-{os.getpid()}.tmp"
    temporary = [path.with_name(path.name + mine) for path in paths]
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
    """Write a JSON file that is there whole or not at all."""
    with _replacing([path]) as (file,):
        file.write(json.dumps(content, indent=1).encode())
