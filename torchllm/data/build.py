"""Write the corpus of a source into a folder: cut the source into shards, write them in parallel, then the header.

`corpus.json` is written when all shards are complete. So a killed preparation never leaves a corpus that looks
complete, and starting it again keeps the finished shards; nothing else reads the `.json` of a shard. What is written
depends on the plan and the records alone: two nodes that build one corpus in one shared folder write the same bytes.
"""

import math
import os
import signal
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from torchllm.data.corpus_header import FORMAT, CorpusHeader, ShardTableWriter, corpus_fingerprint, write_header
from torchllm.data.error import DataError
from torchllm.data.plan import CorpusPlan, TokenizerSpec
from torchllm.data.records import UNREADABLE
from torchllm.data.sources import ShardRange, open_raw_source
from torchllm.data.tokenize_shard import FinishedShard, ShardTokenizer, id_dtype
from torchllm.runtime.heartbeat import beat
from torchllm.runtime.parent import end_with_starter

_SMALLEST_SHARD_MIB = 64.0
_LARGEST_SHARD_MIB = 1024.0
_SHARDS = 256
"""of a corpus of medium size: enough that its processes end at about the same time"""
_WAITING_PER_PROCESS = 4
"""shards that are finished or in work while an earlier one is waited for"""


def write_corpus(plan: CorpusPlan, tokenizer: TokenizerSpec, folder: Path, processes: int = 1) -> CorpusHeader:
    """Write the corpus of a plan's source into `folder` and return its header.

    Raises DataError if the source cannot be read, the folder cannot be written or, naming the first bad record, if
    plan.on_bad_record is "error".
    """
    try:
        return _write_shards_and_header(plan, tokenizer, folder, processes)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}. Make room there, or choose another folder "
            "(data.cache for the start of a run, prepare.folder for recipes/prepare.py)"
        ) from error


def _write_shards_and_header(plan: CorpusPlan, tokenizer: TokenizerSpec, folder: Path, processes: int) -> CorpusHeader:
    """Write a corpus; raises OSError if that fails."""
    source = open_raw_source(plan.source, plan.files)
    shards = source.cut_shards(math.ceil(source.mib / shard_size_mib(source.mib, plan.shard_mib)) or 1)
    folder.mkdir(parents=True, exist_ok=True)
    table = ShardTableWriter()
    totals: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    unreadable: set[str] = set()
    largest_id = 0
    shard_tokenizer = ShardTokenizer(source, plan, plan.key, tokenizer, folder)
    name = f"tokenizing {plan.source.kind}"
    with (
        tqdm(total=source.total, unit=source.unit, unit_scale=True, desc=name, disable=None) as bar,
        closing(_finished_shards(shard_tokenizer, shards, processes)) as finished_shards,
    ):
        for shard, finished in zip(shards, finished_shards, strict=True):
            bar.update(shard.stop - shard.start)
            table.add(finished.splits)
            for split in finished.splits.values():
                totals["documents"] += split.documents
                totals["tokens"] += split.tokens
            totals["text_bytes"] += finished.text_bytes
            skipped.update(finished.skipped)
            unreadable.update(finished.unreadable)
            largest_id = max(largest_id, finished.max_token)
    if unreadable:
        skipped[UNREADABLE] = len(unreadable)  # a file may be in many shards
    loaded = tokenizer.load()
    sums = table.write(folder)
    header = CorpusHeader(
        format=FORMAT,
        key=plan.key,
        plan=asdict(plan) | {"files": len(plan.files)},
        dtype=id_dtype(loaded),
        tokenizer=loaded.fingerprint,
        documents=totals["documents"],
        tokens=totals["tokens"],
        text_bytes=totals["text_bytes"],
        max_token=largest_id,
        skipped=dict(skipped),
        shards=table.shards,
        fingerprint=corpus_fingerprint(id_dtype(loaded), loaded.fingerprint, sums.table),
        table_sha256=sums.table,
        sums_sha256=sums.sums,
    )
    write_header(folder, header)
    return header


def shard_size_mib(source_mib: float, shard_mib: float) -> float:
    """Return the size of a shard's part of the source, in MiB: `shard_mib` or, if that is 0, one that fits the source.

    Then a source has 256 shards, of 64 MiB to 1 GiB: up to 16 GiB they are 64 MiB, which as many processes as possible
    share, from 256 GiB on they are 1 GiB, so that the table of a corpus of 15T tokens (60,000 shards) stays small. It
    does not depend on the number of processes, which must not decide what is in a corpus.
    """
    return shard_mib or min(max(source_mib / _SHARDS, _SMALLEST_SHARD_MIB), _LARGEST_SHARD_MIB)


_shard_tokenizer: ShardTokenizer
"""of this worker process"""


def _start_worker(starter: int, shard_tokenizer: ShardTokenizer) -> None:
    """Keep what all shards of this worker process have in common, so that a job is a few numbers.

    It ends with the process `starter`.
    """
    global _shard_tokenizer
    end_with_starter(starter)
    _shard_tokenizer = shard_tokenizer


def _write_shard(shard: ShardRange) -> FinishedShard:
    """Write a shard in a worker process."""
    return _shard_tokenizer.write(shard)


@contextmanager
def _user_signals_blocked() -> Iterator[None]:
    """Let processes started here never hear SIGUSR1 and SIGUSR2, from their first instruction on.

    With these a scheduler tells all processes of a job that their time is nearly over; their parent decides.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _finished_shards(
    shard_tokenizer: ShardTokenizer, shards: Sequence[ShardRange], processes: int
) -> Generator[FinishedShard, None, None]:
    """Yield the shards in their order, written here or in `processes` other processes."""
    processes = min(processes, len(shards))
    if processes <= 1:
        yield from map(shard_tokenizer.write, shards)
        return
    # spawn: the caller may hold threads and locks, and a preparation is long against an interpreter's start
    spawn = get_context("spawn")
    waiting: deque[Future[FinishedShard]] = deque()
    with ProcessPoolExecutor(
        processes, spawn, initializer=_start_worker, initargs=(os.getpid(), shard_tokenizer)
    ) as pool:
        try:
            for shard in shards:
                with _user_signals_blocked():  # submitting starts processes
                    waiting.append(pool.submit(_write_shard, shard))
                if len(waiting) == processes * _WAITING_PER_PROCESS:
                    yield waiting.popleft().result()
                    beat("tokenizing")
            while waiting:
                yield waiting.popleft().result()
                beat("tokenizing")
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
