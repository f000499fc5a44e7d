"""Write the corpus of a source into a folder: cut the source into shards, write them in parallel, then the header.

`corpus.json` is written when all shards are complete. So a killed preparation never leaves a corpus that looks
complete, and starting it again keeps the finished shards if no file of the source was changed since they were written;
nothing else reads the `.json` of a shard. The content
depends on the plan and the records alone: two nodes that build one corpus in one shared folder write the same bytes.
"""

import errno
import logging
import math
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from torchllm.config.errors import DataError
from torchllm.data.corpus_header import FORMAT, CorpusHeader, corpus_fingerprint
from torchllm.runtime.heartbeat import beat
from torchllm.runtime.parent import end_with_starter
from torchllm.runtime.signs_of_life import show_progress
from torchllm.tools.prepare.bad_records import BadShare, RecordTally, check_not_empty
from torchllm.tools.prepare.corpus_writer import ShardTableWriter, write_header
from torchllm.tools.prepare.counts import untrained
from torchllm.tools.prepare.open_source import open_raw_source
from torchllm.tools.prepare.plan import CorpusPlan, LoadTokenizer
from torchllm.tools.prepare.records import UNREADABLE
from torchllm.tools.prepare.source_files import changes_of
from torchllm.tools.prepare.sources import DelimitedTextFiles, RawSource, ShardRange, TextFiles
from torchllm.tools.prepare.tokenize_shard import (
    FinishedShard,
    ShardTokenizer,
    ShardWriter,
    first_changes,
    id_dtype,
    refuse_unknown,
)

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

log = logging.getLogger(__name__)

_ADVICE = {errno.ENOSPC: "Make room there, or choose", errno.EDQUOT: "Remove files of yours there, or choose"}
"""by the errno of a failed write"""
_SMALLEST_SHARD_MIB = 64.0
_LARGEST_SHARD_MIB = 1024.0
_SHARDS = 256
"""of a corpus of medium size: enough that its processes end at about the same time"""
_HELD_OUT_DOCUMENTS = 5.0
"""least number of documents on average that a share of all documents holds out: under 1 % of such corpora have none"""
_WAITING_PER_PROCESS = 4
"""shards that are finished or in work while an earlier one is waited for"""


def write_corpus(
    plan: CorpusPlan, load: LoadTokenizer, folder: Path, processes: int = 1, max_bad_share: float = 0.01
) -> CorpusHeader:
    """Write the corpus of a plan's source into `folder` and return its header.

    max_bad_share: as data.max_bad_share.

    Raises DataError if the source cannot be read, the folder cannot be written or, naming the first bad record, if
    plan.on_bad_record is "error"; and if too many of a file are left out, or no document is found.
    """
    # No user can fix the standard library.
    most = 1.0 if plan.source.kind == "stdlib" else max_bad_share
    try:
        header = _write_shards(plan, load, folder, processes, BadShare(most))
        refuse_unknown(plan.source.path or plan.source.kind, load(), header.counts, header.tokens)
        write_header(folder, header)
        warn_of_changes(plan, folder)
        return header
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}. {_ADVICE.get(error.errno or 0, 'Choose')} another "
            "folder (data.cache for the start of a run, prepare.folder for recipes/prepare.py)"
        ) from error


def warn_of_changes(plan: CorpusPlan, folder: Path) -> None:
    """Warn if files of a plan's source were changed since its corpus in `folder` was begun."""
    if first_changes(folder) not in ("", changes_of(plan.files)):
        source = plan.source.path or plan.source.kind
        log.warning("%s: files were changed since %s was begun: if their text was, delete it first", source, folder)


def choose_split(plan: CorpusPlan) -> CorpusPlan:
    """Return a plan that holds out the last tokens if a share of its documents may be none.

    Reading ends with the first documents that are enough. Raises DataError if the source cannot be read.
    """
    if plan.held_out or not plan.validation_fraction:
        return plan
    enough = math.ceil(_HELD_OUT_DOCUMENTS / plan.validation_fraction)
    source = _open_source(plan)
    if isinstance(source, TextFiles):
        documents = sum(file.size > 0 for file in plan.files)
    else:
        records = (record for record in source.records(ShardRange(0, 0, source.total)) if not record.fault)
        documents = sum(1 for _ in islice(records, enough))
    return replace(plan, last_tokens=documents < enough)


def refuse_first(plan: CorpusPlan) -> None:
    """Raise the DataError that a source gives when it is opened, or by its first records, as when it is written."""
    if plan.source.kind == "hub" and plan.on_bad_record == "skip":
        return  # opening it is a request to the hub
    source = _open_source(plan)
    tally = RecordTally(plan.source, plan.on_bad_record)
    for record in source.records(ShardRange(0, 0, source.total)):
        if not record.fault:
            tally.good(record)
            return
        tally.bad(record)
    tally.finish()


def _open_source(plan: CorpusPlan) -> RawSource:
    """Return the reader of a plan's source. Raises DataError if no text file has the delimiter of documents."""
    source = open_raw_source(plan.source, plan.files)
    if isinstance(source, DelimitedTextFiles):
        source.refuse_undivided(plan.source.path)
    return source


def _write_shards(
    plan: CorpusPlan, load: LoadTokenizer, folder: Path, processes: int, bad_share: BadShare
) -> CorpusHeader:
    """Write all of a corpus but its header, which is returned; raises OSError if that fails."""
    source = _open_source(plan)
    writer: type[ShardWriter] = ShardWriter
    if plan.chat is not None:
        from torchllm.tools.prepare.conversation_writer import ConversationWriter

        writer = ConversationWriter
    shards = source.cut_shards(math.ceil(source.mib / shard_size_mib(source.mib, plan.shard_mib)) or 1)
    folder.mkdir(parents=True, exist_ok=True)
    table = ShardTableWriter()
    totals: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    unreadable: set[str] = set()
    largest_id = 0
    shard_tokenizer = ShardTokenizer(source, plan, load, folder, writer, changes_of(plan.files))
    progress = TokenizingProgress(source)
    show_progress(progress.describe)
    with ExitStack() as ended:
        ended.callback(show_progress, None)
        finished_shards = ended.enter_context(closing(_finished_shards(shard_tokenizer, shards, processes, progress)))
        for shard, finished in zip(shards, finished_shards, strict=True):
            progress.finish(shard)
            bad_share.add(finished.tallies)
            table.add(finished.splits)
            for split in finished.splits.values():
                totals["documents"] += split.documents
                totals["tokens"] += split.tokens
            totals["text_bytes"] += finished.text_bytes
            skipped.update(finished.skipped)
            counts.update(finished.counts)
            unreadable.update(finished.unreadable)
            largest_id = max(largest_id, finished.max_token)
    bad_share.finish()
    if unreadable:
        skipped[UNREADABLE] = len(unreadable)  # a file may be in many shards
    if reason := untrained(counts):
        raise DataError(f"data.sources: {plan.source.path!r}: {reason}")
    check_not_empty(f"data.sources: {plan.source.path!r}", totals["documents"], skipped)
    dtype = id_dtype(load())
    sequence_length = plan.chat.sequence_length if plan.chat else 0
    table_sha256, sums_sha256 = table.write(folder)
    return CorpusHeader(
        format=FORMAT,
        key=plan.key,
        plan=asdict(plan) | {"files": len(plan.files)},
        dtype=dtype,
        tokenizer=plan.tokenizer,
        documents=totals["documents"],
        tokens=totals["tokens"],
        text_bytes=totals["text_bytes"],
        max_token=largest_id,
        skipped=dict(skipped),
        shards=table.shards,
        fingerprint=corpus_fingerprint(dtype, plan.tokenizer, table_sha256, sequence_length),
        table_sha256=table_sha256,
        sums_sha256=sums_sha256,
        sequence_length=sequence_length,
        counts=dict(counts),
    )


def shard_size_mib(source_mib: float, shard_mib: float) -> float:
    """Return the size of a shard's part of the source, in MiB: `shard_mib` or, if that is 0, one that fits the source.

    Then a source has 256 shards, of 64 MiB to 1 GiB: up to 16 GiB they are 64 MiB, to share them among many processes,
    from 256 GiB on they are 1 GiB, so that the table of a corpus of 15T tokens (60,000 shards) stays small. It
    does not depend on the number of processes, because that must not change a corpus.
    """
    return shard_mib or min(max(source_mib / _SHARDS, _SMALLEST_SHARD_MIB), _LARGEST_SHARD_MIB)


class TokenizingProgress:
    """The progress of tokenizing a source, shown in the lines of `signs_of_life`."""

    def __init__(self, source: RawSource) -> None:
        self.text_bytes: Callable[[], int] = lambda: self._text_bytes
        """tokenized so far, in shards that are not finished, too"""
        self._text_bytes = 0
        """by this process"""
        self._source = source
        self._position = 0
        """of the source: all before it is finished"""
        self._started = time.monotonic()

    def finish(self, shard: ShardRange) -> None:
        self._position = shard.stop

    def add(self, text_bytes: int) -> None:
        """Count text that this process has tokenized."""
        self._text_bytes += text_bytes

    def describe(self) -> str:
        """Return the progress in words."""
        text_bytes = self.text_bytes()
        place = self._position
        if self._source.unit == "B":  # there a shard that is in work is known to be so far, at least
            place = max(place, min(text_bytes, self._source.total))
        rate = text_bytes / 1e6 / (time.monotonic() - self._started)
        return f"tokenizing: {place / self._source.total:.0%}, {text_bytes / 1e6:,.0f} MB of text, {rate:.1f} MB/s"


_shard_tokenizer: ShardTokenizer
"""of this worker process"""
_text_bytes: "Synchronized[int]"
"""tokenized by all worker processes"""


def _start_worker(starter: int, shard_tokenizer: ShardTokenizer, text_bytes: "Synchronized[int]") -> None:
    """Store the parts that all shards of this worker process share, so that a job is a few numbers.

    It ends with the process `starter`.
    """
    global _shard_tokenizer, _text_bytes
    end_with_starter(starter)
    _shard_tokenizer = shard_tokenizer
    _text_bytes = text_bytes


def _write_shard(shard: ShardRange) -> FinishedShard:
    """Write a shard in this worker process, and count its text for all of them."""

    def count(size: int) -> None:
        with _text_bytes.get_lock():
            _text_bytes.value += size

    return _shard_tokenizer.write(shard, count)


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
    shard_tokenizer: ShardTokenizer, shards: Sequence[ShardRange], processes: int, progress: TokenizingProgress
) -> Generator[FinishedShard, None, None]:
    """Yield the shards in their order, written here or in `processes` other processes.

    Raises DataError if one of them is killed.
    """
    processes = min(processes, len(shards))
    if processes <= 1:
        for shard in shards:
            yield shard_tokenizer.write(shard, progress.add)
        return
    # spawn: the caller may hold threads and locks, and a preparation is long against an interpreter's start
    spawn = get_context("spawn")
    waiting: deque[Future[FinishedShard]] = deque()
    text_bytes: Synchronized[int] = spawn.Value("q", 0)
    progress.text_bytes = lambda: text_bytes.value
    arguments = (os.getpid(), shard_tokenizer, text_bytes)

    def result(future: Future[FinishedShard]) -> FinishedShard:
        finished = future.result()
        beat("tokenizing")
        return finished

    with ProcessPoolExecutor(processes, spawn, initializer=_start_worker, initargs=arguments) as pool:
        try:
            for shard in shards:
                with _user_signals_blocked():  # submitting starts processes
                    waiting.append(pool.submit(_write_shard, shard))
                if len(waiting) == processes * _WAITING_PER_PROCESS:
                    yield result(waiting.popleft())
            while waiting:
                yield result(waiting.popleft())
        except BrokenProcessPool as error:
            raise DataError(
                "a process that tokenizes was killed: most likely the machine has run out of memory: start it again "
                "with fewer, --prepare.processes=N; finished shards are kept"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
