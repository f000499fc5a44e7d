"""What stands around a recipe's `train`."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.parity import CPU, tiny
from torchllm.config import Config, Run
from torchllm.config.errors import UserError
from torchllm.metrics.monitor import Monitor
from torchllm.metrics.observer import Change
from torchllm.tools.adapt.supervise import is_worth_a_line, supervise

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


@pytest.mark.parametrize(
    ("settings", "device", "ranks_on_node", "expected"),
    [
        ({}, CPU, 4, False),  # the first run of a newcomer
        ({}, CPU, 2, True),  # of two nodes
        ({}, SimpleNamespace(type="cuda"), 4, True),
        ({"metrics.profile_steps": "2:4"}, CPU, 4, True),
        ({"metrics.peak_tflops": 0.05}, CPU, 4, True),
    ],
)
def test_the_log_says_where_the_time_goes_on_gpus_and_several_nodes_and_if_asked(
    settings: dict[str, Any], device: Any, ranks_on_node: int, expected: bool
) -> None:
    runtime: Any = SimpleNamespace(device=device, ranks_on_node=ranks_on_node, world_size=4)
    assert is_worth_a_line(tiny(settings), runtime) is expected
