"""Bytes that an optimizer keeps per parameter, as the planner counts them, against the tensors that there are."""

from dataclasses import replace
from typing import Any

import pytest

from torchllm.config import Model, Optimizer
from torchllm.models.decoder import build_model
from torchllm.optim.average import WeightAverage
from torchllm.optim.optimizer import build_optimizer
from torchllm.planner.evidence.stacks import STACKS
from torchllm.planner.optimizer_states import with_optimizer_states

DENSE = Model(layers=2, hidden=32, heads=4, ffn=64, vocab=48)
SPARSE = replace(DENSE, experts=4, top_k=2, expert_ffn=16, shared_experts=1, dense_layers=1)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("sizes", [DENSE, SPARSE])
def test_states_are_those_that_exist(name: Any, ema_decay: float, momentum: float, sizes: Model) -> None:
    settings = Optimizer(name=name, momentum=momentum, ema_decay=ema_decay)
    model = build_model(sizes)
    optimizer = build_optimizer([model], settings)
    tensors = list(WeightAverage([model], ema_decay).tensors.values())
    for state in optimizer.state.values():
        tensors += [entry for entry in state.values() if entry.dim()]  # not the counters of steps
    parameters = sum(parameter.numel() for parameter in model.parameters())
    held = 4 * parameters + sum(tensor.nbytes for tensor in tensors)
    software = with_optimizer_states(STACKS["torchllm"], sizes, settings)
    assert software.states * parameters == pytest.approx(held, rel=1e-9)
