"""benchmark data: how long a step waits for its batches."""

import time
from statistics import median
from typing import TYPE_CHECKING

import torch

from torchllm.data.loader import DataRanks, build_loader
from torchllm.parallel.mesh import build_mesh, sequence_pieces
from torchllm.runtime.process import Runtime
from torchllm.tools.adapt.trial import build_trial

from .tools import TableRow, Tables, seconds_of

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def data(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
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
    row: TableRow = {
        "workers": config.data.workers,
        "step_ms": median(steps) * 1e3,
        "wait_ms": median(waits) * 1e3,
        "wait_share": sum(waits) / sum(steps),
        "loader_alone_ms": alone * 1e3,
        "loader_alone_tokens_per_second": tokens / alone,
    }
    return {"batches of one rank": [row]}
