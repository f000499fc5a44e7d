"""Muon with its momentum in bfloat16 or 8 bits: every layout against one process to the bit, and resumes."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.optim.test_muon import MUON, check_layout
from tests.optim.test_optimizer import DENSE, give_gradients, plain
from tests.optim.test_rounded import resumed_as
from tests.parity import Settings
from torchllm.config import Model
from torchllm.optim.eightbit import EightBitState
from torchllm.optim.optimizer import apply_if_finite, build_optimizer
from torchllm.optim.rounded_muon import RoundedMuon

EXPERTS = replace(DENSE, experts=6, expert_ffn=64, dense_layers=1)
DTYPES: tuple[Literal["bfloat16", "int8"], ...] = ("bfloat16", "int8")
LAYOUTS: dict[str, tuple[Model, Settings]] = {
    "fsdp2xtp2": (DENSE, {"parallel.dp_shard": 2, "parallel.tp": 2}),
    "pp2xfsdp2": (DENSE, {"parallel.pp": 2, "parallel.dp_shard": 2}),
    # 6 experts on 2 ranks, which divide the matrices of each; and 3 experts of a rank along the hidden states
    "experts fsdp2xtp2": (EXPERTS, {"parallel.dp_shard": 2, "parallel.tp": 2}),
    "experts fsdp4+ep2": (EXPERTS, {"parallel.dp_shard": 4, "parallel.ep": 2}),
}


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_rounds_momenta_equally_to_the_bit(name: str, state_dtype: Any) -> None:
    model, settings = LAYOUTS[name]
    names = check_layout(settings, model, replace(MUON, state_dtype=state_dtype))
    assert ("optimizer.layers.1.self_attn.q_proj.weight.momentum_buffer_scale" in names) == (state_dtype == "int8")


def momentum(optimizer: Any, state: dict[str, Tensor]) -> Tensor:
    """Return the momentum of a matrix as float32."""
    return optimizer.storage.load(state, "momentum_buffer") if "step" in state else state["momentum_buffer"]


@pytest.mark.parametrize("state_dtype", DTYPES)
def test_momenta_are_those_of_float32_on_average(state_dtype: Any) -> None:
    """Rounded at random: over the elements the error is the rounding's, and its mean is 0."""
    momenta = []
    for dtype in ("float32", state_dtype):
        model = plain(DENSE)
        optimizer = build_optimizer([model], replace(MUON, state_dtype=dtype))
        for step in range(4):
            give_gradients([model], step)
            apply_if_finite(optimizer, 0.0, torch.tensor(True))
        momenta.append(momentum(optimizer, optimizer.state[model.get_parameter("layers.0.mlp.gate_proj.weight")]))
    error, size = (momenta[1] - momenta[0]).double(), float(momenta[0].abs().mean())
    largest = {"bfloat16": 0.01, "int8": 0.03}[state_dtype]
    assert 0.0 < float(error.abs().mean()) < largest * size
    assert abs(float(error.mean())) < 4 * float(error.std()) / math.sqrt(error.numel())


def test_a_momentum_without_blocks_is_the_one_of_float32() -> None:
    """int8 keeps float32 where rows are no multiple of 32."""
    momenta = []
    for dtype in ("float32", "int8"):
        model = plain(replace(DENSE, hidden=48, ffn=80))
        optimizer = build_optimizer([model], replace(MUON, state_dtype=dtype))
        for step in range(3):
            give_gradients([model], step)
            apply_if_finite(optimizer, 0.0, torch.tensor(True))
        momenta.append(optimizer.state[model.get_parameter("layers.0.mlp.down_proj.weight")]["momentum_buffer"])
    assert momenta[1].dtype == torch.float32
    assert float(momenta[0].abs().sum()) > 0
    assert torch.equal(momenta[0], momenta[1])


def test_the_roundings_of_each_step_are_others() -> None:
    """A constant momentum is rounded up in some steps, and down in others."""
    weight = torch.nn.Parameter(torch.ones(32, 32))
    layer = torch.nn.Module()
    layer.weight = weight
    group = {"params": [weight], "weight_decay": 0.0, "orthogonalized": True}
    optimizer = RoundedMuon([group], replace(MUON, muon_momentum=0.0), EightBitState([layer]))
    gradient = torch.rand(32, 32, generator=torch.Generator().manual_seed(0))
    codes = []
    for _ in range(2):
        weight.grad = gradient.clone()
        apply_if_finite(optimizer, 0.0, torch.tensor(True))
        codes.append(optimizer.state[weight]["momentum_buffer"].clone())
    assert 0.2 < float((codes[0] != codes[1]).float().mean()) < 0.6


@pytest.mark.parametrize(
    "dtypes", [("float32", "int8"), ("int8", "float32"), ("bfloat16", "int8"), ("float32", "bfloat16")]
)
def test_a_run_may_change_the_dtype_of_its_momentum(dtypes: Any, tmp_path: Path) -> None:
    before, after = (replace(MUON, state_dtype=dtype) for dtype in dtypes)
    momenta = [
        momentum(optimizer, optimizer.state[model.get_parameter("layers.0.mlp.gate_proj.weight")])
        for model, optimizer in resumed_as(before, after, tmp_path, DENSE)
    ]
    largest = float(momenta[0].abs().max())
    torch.testing.assert_close(momenta[1], momenta[0], rtol=0.0, atol=0.02 * largest)
