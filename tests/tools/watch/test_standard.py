"""Which runs say in their log where their time goes."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.parity import CPU, tiny
from torchllm.tools.watch.standard import is_worth_a_line


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
