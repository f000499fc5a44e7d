"""recipes/pretrain.py with a probe: every few steps each rank notes what its process holds. `run.py` starts it.

Environment: SOAK_SAMPLES is the folder for `rank_N.jsonl`; SOAK_EVERY the steps between two notes; SOAK_REBUILD=1
builds model, mesh and optimizer anew at each checkpoint, as a run does that changes its own config; SOAK_PROFILE=1
profiles every step that `metrics.breakdown_interval` allows, whatever it costs.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from torchllm.tools.front.start import load_configs

if __name__ == "__main__":  # before torch is imported, as in the recipe
    CONFIGS = load_configs(sys.argv[1:])

import torch.distributed as dist

import torchllm.tools.adapt.supervise
from recipes import pretrain
from torchllm.config import Config
from torchllm.metrics.observer import Change
from torchllm.tools.adapt.adaptation import Adaptation
from torchllm.tools.watch import step_profiler
from torchllm.tools.watch.bottlenecks import Bottlenecks
from torchllm.train.step import StepResult, TrainStep

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


def memory_kib(process: str) -> int:
    """Return the memory of a process that is in RAM."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE_KIB


def children() -> list[str]:
    """Return the processes that this one has started: the data loader's workers."""
    pids: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        pids += (task / "children").read_text().split()
    return pids


def held() -> dict[str, int]:
    return {
        "memory_kib": memory_kib("self"),
        "workers_kib": sum(memory_kib(child) for child in children()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


class ProbedStep(TrainStep):
    """A training step, after which this rank may note what it holds."""

    def __call__(self, step: int, batches: Any) -> StepResult:
        result = super().__call__(step, batches)
        if step % int(os.environ["SOAK_EVERY"]) == 0:
            file = Path(os.environ["SOAK_SAMPLES"], f"rank_{dist.get_rank()}.jsonl")
            with file.open("a") as lines:
                lines.write(json.dumps({"step": step, **held()}) + "\n")
        return result


def rebuild(config: Config, bottlenecks: Bottlenecks) -> Change:
    """Go on from the checkpoint with the same config: what a run that adapts does, without a reason."""
    return Change(config, "rebuilt")


def rebuilding(starved_seconds: float) -> Adaptation:
    """Return an observer that asks for another config at each checkpoint."""
    return Adaptation(rebuild, starved_seconds)


def main() -> None:
    adaptation = rebuilding if os.environ.get("SOAK_REBUILD") else Adaptation
    max_cost = math.inf if os.environ.get("SOAK_PROFILE") else step_profiler.MAX_COST
    with (
        mock.patch.object(pretrain, "TrainStep", ProbedStep),
        mock.patch.object(step_profiler, "MAX_COST", max_cost),
        mock.patch.object(torchllm.tools.adapt.supervise, "Adaptation", adaptation),
    ):
        pretrain.main(*CONFIGS)


if __name__ == "__main__":
    main()
