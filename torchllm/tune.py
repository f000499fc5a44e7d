"""`[parallel] layout = "tune"`: the planner's best layouts, measured for a few steps each; the fastest trains.

All in one launch: each is built as the run would build it, takes `STEPS` steps of random tokens, and is taken down
again. What was measured is kept in tuned.json of the cache folder, by model, batch, machine and versions: the next run
that could use it measures nothing. A layout that ended a job before it had a time (out of memory) is not tried again.
"""

import gc
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchllm.config import Config, gradient_accumulation
from torchllm.data.batch import Batch
from torchllm.errors import UserError
from torchllm.initialize import initialize
from torchllm.mesh import AXES, Mesh, build_mesh
from torchllm.models.decoder import build_model
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.parallelize import parallelize
from torchllm.parallel.pipeline import build_forward_backward
from torchllm.runtime import Runtime, compute_dtype
from torchllm.train_step import TrainStep

log = logging.getLogger("torchllm")

C = TypeVar("C", bound=Config)
STEPS = 4
"""of each layout; the first is not counted"""


def fastest(configs: Sequence[C], runtime: Runtime, cache: Path) -> C:
    """Of configs that differ in their layout, the one whose steps are fastest here; of one, that one, unmeasured.

    cache: folder of what was measured before; rank 0's counts. UserError where none could be measured.
    """
    if len(configs) == 1:
        return configs[0]
    known = Known(cache, configs[0], runtime)
    times = []
    for config in configs:
        seconds = known.get(config)
        if seconds is None:
            known.put(config, float("inf"))  # so it stays if this ends the job
            seconds = measure(config, runtime)
            known.put(config, seconds)
            log.info("tune: %.4g s a step: %s", seconds, layout_of(config))
        else:
            log.info("tune: %.4g s a step, known: %s", seconds, layout_of(config))
        times.append(seconds)
    best = min(range(len(configs)), key=lambda index: times[index])
    if times[best] == float("inf"):
        raise UserError(f"parallel.layout: each of the planner's layouts has ended a job; {known.file} remembers it")
    log.info("tune: the fastest of %d is %s", len(configs), layout_of(configs[best]))
    return configs[best]


def measure(config: Config, runtime: Runtime) -> float:
    """Seconds of a step of this layout, the slowest rank's median."""
    device = runtime.device
    dtype = compute_dtype(config.training, device)
    mesh = build_mesh(config.parallel, device)
    with torch.device("meta"):
        model = build_model(config.model, config.training.loss_chunk)
    length = config.training.sequence_length
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, dtype, length)
    initialize(stages, config.model, device, config.run.seed)
    optimizer = build_optimizer(stages, config.optimizer)
    rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)
    forward_backward = build_forward_backward(stages, mesh, config.parallel, config.training, dtype)
    step = TrainStep(stages, forward_backward, optimizer, rate, mesh, config.training, device)
    batches = random_batches(config, mesh)
    seconds = []
    for n in range(1, STEPS + 1):
        runtime.barrier()
        start = time.perf_counter()
        float(step(n, batches).loss)  # waits for the device
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(sorted(seconds[1:])[len(seconds[1:]) // 2], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=runtime.host_group)
    del stages, model, optimizer, forward_backward, step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return float(slowest)


def random_batches(config: Config, mesh: Mesh) -> list[Batch]:
    """A step of this rank: random tokens, whole sequences, no documents."""
    training = config.training
    generator = torch.Generator().manual_seed(mesh.data_rank)
    shape = training.micro_batch_size, training.sequence_length
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    found = []
    for _ in range(gradient_accumulation(training, mesh.data_size)):
        tokens = torch.randint(config.model.vocab, shape, generator=generator)
        documents = torch.zeros_like(tokens) if config.data.document_mask else None
        found.append(Batch(tokens, tokens.roll(-1, 1), positions, documents))
    return found


class Known:
    """Times of layouts of one model on one machine; every rank has rank 0's."""

    def __init__(self, cache: Path, config: Config, runtime: Runtime) -> None:
        self.file, self.is_main = cache / "tuned.json", runtime.is_main
        device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else f"CPU x {os.cpu_count()}"
        training = asdict(config.training) | {"steps": 0, "micro_batch_size": 0}
        self.job = digest(asdict(config.model), training, runtime.world_size, device, torch.__version__)
        tables: list[Any] = [self._read()]
        dist.broadcast_object_list(tables, src=0, group=runtime.host_group)
        self.times: dict[str, float] = tables[0].get(self.job, {})

    def get(self, config: Config) -> float | None:
        """Seconds a step; None: not known."""
        return self.times.get(layout_of(config))

    def put(self, config: Config, seconds: float) -> None:
        """Remember, on disk at once."""
        self.times[layout_of(config)] = seconds
        if self.is_main:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.file.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(self._read() | {self.job: self.times}, indent=1) + "\n")
            temporary.replace(self.file)

    def _read(self) -> dict[str, Any]:
        try:
            table = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return table if isinstance(table, dict) else {}


def digest(*what: object) -> str:
    """A name for what a time depends on."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def layout_of(config: Config) -> str:
    """What of a config is its layout, in a line."""
    parallel, recompute = config.parallel, config.recompute
    words = [f"{axis} {getattr(parallel, axis)}" for axis in AXES if getattr(parallel, axis) > 1]
    if parallel.pp > 1:
        words.append(f"{parallel.schedule} x {parallel.stages_per_rank}")
    words += [f"micro batch {config.training.micro_batch_size}", f"zero {parallel.zero_stage}"]
    words += [parallel.cp_method] * (parallel.cp > 1) + ["sp"] * parallel.sequence_parallel
    words += [f"recompute {recompute.mode}"] * (recompute.mode != "none")
    words += [f"compile {name}" for name, on in asdict(config.compile).items() if on]
    return ", ".join(words)
