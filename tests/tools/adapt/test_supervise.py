"""What stands around a recipe's `train`."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchllm.config import Config, Run
from torchllm.config.errors import UserError
from torchllm.metrics.monitor import Monitor
from torchllm.metrics.observer import Change
from torchllm.tools.adapt.supervise import supervise

RUNTIME: Any = SimpleNamespace(
    folder=Path("unused"),
    rank=3,
    is_main=False,
    device=SimpleNamespace(type="cpu"),
    release_memory=gc.collect,
)


def test_it_trains_again_while_the_run_changes_its_config() -> None:
    seeds = []

    def train(config: Config, runtime: Any, monitor: Monitor) -> None:
        seeds.append(config.run.seed)
        following = Config(run=Run(seed=config.run.seed + 1))
        monitor.change = Change(following, "another seed") if len(seeds) < 3 else None

    supervise(train, [Config(run=Run(seed=5))], RUNTIME)
    assert seeds == [5, 6, 7]


def test_out_of_memory_is_explained_and_other_errors_pass() -> None:
    def train(text: str) -> Any:
        def failing(config: Config, runtime: Any, monitor: Monitor) -> None:
            raise RuntimeError(text)

        return failing

    with pytest.raises(UserError, match=r"rank 3 is out of memory: .*can't allocate memory"):
        supervise(train("DefaultCPUAllocator: can't allocate memory"), [Config()], RUNTIME)
    with pytest.raises(RuntimeError, match="shapes"):
        supervise(train("mat1 and mat2 shapes cannot be multiplied"), [Config()], RUNTIME)
