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

from torchllm.adapt.trial import library_step, synthetic_batches
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.parallel.mesh import build_mesh
from torchllm.planner.search.layouts import layout_of
from torchllm.runtime.process import Runtime

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
            log.info("tune: %.4g s a step: %s", seconds, layout_of(config).text())
        else:
            log.info("tune: %.4g s a step, known: %s", seconds, layout_of(config).text())
        times.append(seconds)
    best = min(range(len(configs)), key=lambda index: times[index])
    if times[best] == float("inf"):
        raise UserError(f"parallel.layout: each of the planner's layouts has ended a job; {known.file} remembers it")
    log.info("tune: the fastest of %d is %s", len(configs), layout_of(configs[best]).text())
    return configs[best]


def measure(config: Config, runtime: Runtime) -> float:
    """Seconds of a step of this layout, the slowest rank's median."""
    device = runtime.device
    mesh = build_mesh(config.parallel, device)
    step = library_step(config, runtime, mesh)[-1]
    batches = synthetic_batches(config, mesh, device)
    seconds = []
    for n in range(1, STEPS + 1):
        runtime.barrier()
        start = time.perf_counter()
        float(step(n, batches).loss)  # waits for the device
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(sorted(seconds[1:])[len(seconds[1:]) // 2], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=runtime.host_group)
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return float(slowest)


class Known:
    """Times of layouts of one model on one machine; every rank has rank 0's."""

    def __init__(self, cache: Path, config: Config, runtime: Runtime) -> None:
        self.file, self.is_main = cache / "tuned.json", runtime.is_main
        device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else f"CPU x {os.cpu_count()}"
        training = asdict(config.training) | {"steps": 0, "micro_batch_size": 0}
        compiled = asdict(config.compile)
        self.job = digest(asdict(config.model), training, compiled, runtime.world_size, device, torch.__version__)
        tables: list[Any] = [self._read()]
        dist.broadcast_object_list(tables, src=0, group=runtime.host_group)
        self.times: dict[str, float] = tables[0].get(self.job, {})

    def get(self, config: Config) -> float | None:
        """Seconds a step; None: not known."""
        return self.times.get(layout_of(config).text())

    def put(self, config: Config, seconds: float) -> None:
        """Remember, on disk at once."""
        self.times[layout_of(config).text()] = seconds
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
