"""Bytes that an optimizer keeps per parameter, as the planner counts them, against the tensors that there are."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchllm.config import Model, Optimizer, Training
from torchllm.models.decoder import Decoder, build_model
from torchllm.optim.average import WeightAverage
from torchllm.optim.eightbit import EightBitState
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.rounded import MOMENTS, RoundedState
from torchllm.runtime.torch_compat import TorchDispatchMode
from torchllm.tools.planner.optimizer_states import ROUNDED, with_optimizer_states
from torchllm.tools.planner.software import TORCHLLM

DENSE = Model(layers=2, hidden=32, heads=4, ffn=64, vocab=48)
SPARSE = replace(DENSE, experts=4, top_k=2, expert_ffn=16, shared_experts=1, dense_layers=1)
WEIGHT_BYTES = 4


def parameter_count(model: Decoder) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def held_bytes(model: Decoder, settings: Optimizer) -> int:
    """Return the bytes of the weights, and of all tensors that an optimizer and an average keep beside them."""
    held = WEIGHT_BYTES * parameter_count(model)
    average = WeightAverage([model], settings.ema_decay)
    for tensor in average.tensors.values():
        held += tensor.nbytes
    optimizer = build_optimizer([model], settings)
    for state in optimizer.state.values():
        for entry in state.values():
            if entry.dim() > 0:  # not a counter of steps
                held += entry.nbytes
    return held


def test_states_are_those_that_exist() -> None:
    dtypes = ("float32", "bfloat16", "int8")
    for name, state_dtype in [("sgd", "float32"), *product(["adamw", "muon"], dtypes)]:
        for ema_decay, momentum, sizes in product([0.0, 0.9], [0.0, 0.9], [DENSE, SPARSE]):
            settings = Optimizer(name=name, state_dtype=state_dtype, momentum=momentum, ema_decay=ema_decay)
            software = with_optimizer_states(TORCHLLM, sizes, Training(), settings)
            model = build_model(sizes)
            planned = software.states * parameter_count(model)
            assert planned == pytest.approx(held_bytes(model, settings), rel=1e-9), settings


def test_moments_on_the_host_are_none_of_the_device() -> None:
    for ema_decay in (0.0, 0.9):
        settings = Optimizer(offload=True, ema_decay=ema_decay)
        software = with_optimizer_states(TORCHLLM, DENSE, Training(), settings)
        on_host = 8 * parameter_count(build_model(DENSE))
        held = held_bytes(build_model(DENSE), settings) - on_host
        assert software.states * parameter_count(build_model(DENSE)) == pytest.approx(held, rel=1e-9)


def test_weights_in_bfloat16_are_those_that_exist() -> None:
    """All but the routers', which are float32."""
    training = Training(weights_dtype="bfloat16")
    software = with_optimizer_states(TORCHLLM, DENSE, training, Optimizer(state_dtype="bfloat16"))
    model = build_model(DENSE, weights_dtype="bfloat16")
    average = WeightAverage([model], 0.9)
    averaged = with_optimizer_states(TORCHLLM, DENSE, training, Optimizer(state_dtype="bfloat16", ema_decay=0.9))
    size = sum(tensor.nbytes for tensor in average.tensors.values())
    assert (averaged.states - software.states) * parameter_count(model) == size
    assert software.shards * parameter_count(model) == sum(parameter.nbytes for parameter in model.parameters())
    assert software.states == software.shards + 2 * 2


class Moved(TorchDispatchMode):
    """Adds up the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return result


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_rounding_moves_the_bytes_that_its_operations_do(state_dtype: str) -> None:
    module = nn.Module()
    module.weight = parameter = nn.Parameter(torch.ones(1024, 1024))
    storage = EightBitState([module]) if state_dtype == "int8" else RoundedState([module], torch.bfloat16)
    state = storage.start(parameter, MOMENTS)
    exact = torch.rand(1024, 1024)
    for name in MOMENTS:
        with Moved() as moved:
            storage.load(state, name)
            storage.store(parameter, state, name, exact, torch.zeros(()))
        assert moved.bytes / exact.numel() == pytest.approx(ROUNDED[state_dtype], rel=0.01)


def test_every_number_that_is_rounded_has_its_price() -> None:
    def rounding(optimizer: Optimizer, training: Training) -> float:
        return with_optimizer_states(TORCHLLM, DENSE, training, optimizer).rounding

    rounded, training = ROUNDED["bfloat16"], Training(weights_dtype="bfloat16")
    assert rounding(Optimizer(), Training()) == 0
    assert rounding(Optimizer(state_dtype="bfloat16"), training) == 3 * rounded
    assert rounding(Optimizer(state_dtype="int8"), Training()) == 2 * ROUNDED["int8"]
    assert rounded < rounding(Optimizer(name="muon", state_dtype="bfloat16"), Training()) < 2 * rounded
