"""`[parallel] layout = "tune"`: measures the planner's best layouts for a few steps each; the fastest trains.

All in one launch: each layout is built as the run would build it, takes some steps of random tokens, and is taken down
again. Other programs on the machine only slow a step down: a layout's time is that of its fastest step, and it takes
steps until the two fastest agree. The times are kept in tuned.json of the cache folder, by model, batch, machine and
versions: the next run measures nothing. A layout that ended a job before it had a time (out of memory) is not tried
again, unless the job was asked to stop.
"""

import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.parallel.mesh import build_mesh, destroy_mesh
from torchllm.runtime.process import Runtime
from torchllm.tools.adapt.trial import build_trial, synthetic_batches
from torchllm.tools.planner.search.layouts import Layout, layout_of

log = logging.getLogger("torchllm")

C = TypeVar("C", bound=Config)
MAX_STEPS = 16
"""of each layout; the first is not counted"""
AGREEMENT = 0.05
"""by this share the second-fastest step may be slower than the fastest one"""


def fastest(configs: Sequence[C], runtime: Runtime, cache: Path) -> C:
    """Return the config whose steps are fastest here, of several that differ in their layouts.

    cache: folder of the times measured before; rank 0's count. UserError if none could be measured.
    """
    if len(configs) == 1:
        return configs[0]
    times = LayoutTimes(cache, configs[0], runtime)
    for config in configs:
        layout = layout_of(config).text()
        if layout in times.seconds:
            log.info("tune: %.4g s per step, measured before: %s", times.seconds[layout], layout)
            continue
        runtime.stop_requests.before_early_end = partial(times.forget, layout)
        times.write(layout, math.inf)  # so it stays if measuring ends the job, unless the job is asked to stop
        times.write(layout, measure(config, runtime))
        runtime.stop_requests.before_early_end = lambda: None
        log.info("tune: %.4g s per step: %s", times.seconds[layout], layout)
    best = min(configs, key=lambda config: times.seconds[layout_of(config).text()])
    layout = layout_of(best).text()
    if times.seconds[layout] == math.inf:
        raise UserError(
            f"parallel.layout: every proposed layout crashed earlier (recorded in {times.file}); delete that file to "
            "try again"
        )
    log.info("tune: the fastest of %d is %s", len(configs), layout)
    return best


def measure(config: Config, runtime: Runtime) -> float:
    """Return the seconds of the fastest step of this layout, each as the slowest rank measures it."""
    device = runtime.device
    mesh = build_mesh(config.parallel, device)
    step = build_trial(config, runtime, mesh).step
    batches = synthetic_batches(config, mesh, device)
    seconds: list[float] = []
    for n in range(1, MAX_STEPS + 1):
        runtime.barrier()
        start = time.perf_counter()
        float(step(n, batches).loss)  # waits for the device
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=runtime.host_group)
        if n > 1:
            seconds.append(float(slowest))
        if is_settled(seconds):
            break
    else:
        log.warning(
            "tune: no two steps take equal time, %.4g to %.4g s: the machine is busy", min(seconds), max(seconds)
        )
    del step
    destroy_mesh(mesh)
    runtime.release_memory()
    return min(seconds)


def is_settled(seconds: Sequence[float]) -> bool:
    """Return whether these are three steps or more, of which the two fastest take about the same time."""
    fastest_two = sorted(seconds)[:2]
    return len(seconds) > 2 and fastest_two[1] <= (1 + AGREEMENT) * fastest_two[0]


class LayoutTimes:
    """Times of layouts of one model on one machine, from and to a file; every rank has rank 0's."""

    def __init__(self, cache: Path, config: Config, runtime: Runtime) -> None:
        self.file = cache / "tuned.json"
        self.is_main = runtime.is_main
        self.job = job_key(config, runtime)
        tables: list[Any] = [self._read()]
        dist.broadcast_object_list(tables, src=0, group=runtime.host_group)
        self.seconds: dict[str, float] = tables[0].get(self.job, {})
        """of a step, by layout; infinite for a layout that ended a job"""

    def write(self, layout: str, seconds: float) -> None:
        """Set the time of a layout, on disk at once."""
        self.seconds[layout] = seconds
        self._write()

    def forget(self, layout: str) -> None:
        """Remove the time of a layout, on disk at once. Another thread may be writing."""
        self.seconds.pop(layout, None)
        self._write()

    def _write(self) -> None:
        if not self.is_main:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        temporary.write_text(json.dumps(self._read() | {self.job: self.seconds}, indent=1) + "\n")
        temporary.replace(self.file)

    def _read(self) -> dict[str, Any]:
        """Return the file's times by job; none if it is missing or damaged."""
        try:
            table = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return table if isinstance(table, dict) else {}


def job_key(config: Config, runtime: Runtime) -> str:
    """Return a name for the conditions of a layout's time, besides the layout."""
    device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else f"CPU x {os.cpu_count()}"
    # The micro batch is part of the layout; a time does not depend on how long the run is.
    training = asdict(config.training) | {"steps": 0, "micro_batch_size": 0}
    parallel = {key: value for key, value in asdict(config.parallel).items() if key not in Layout._fields}
    recompute = asdict(config.recompute) | {"mode": ""}
    parts = (
        asdict(config.model),
        training,
        parallel | {"layout": "", "scatter_gather": ""},
        recompute,
        *(asdict(section) for section in (config.compile, config.optimizer, config.float8, config.trained)),
        config.data.document_mask,
        runtime.world_size,
        runtime.ranks_on_node,
        device,
        torch.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
