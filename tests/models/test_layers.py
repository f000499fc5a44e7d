"""Norms, feed-forward layers and rotary positions against their formulas in float64."""

import copy
import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.operations import Operations
from torchllm.config import Model
from torchllm.models.activations import squared_relu
from torchllm.models.gpt_layers import LayerNorm, UngatedFeedForward
from torchllm.models.layers import (
    RMSNorm,
    SwiGLU,
    rms_norm,
    rotary_angles,
    rotary_frequencies,
    rotate,
)
from torchllm.models.offset_norm import offset_rms_norm

pytestmark = pytest.mark.quick
MODEL = Model(hidden=24, heads=4, ffn=40, norm_epsilon=1e-2)  # an epsilon large enough to be seen if it is misplaced
ROUNDING = {"rtol": 0.0, "atol": 2e-6}  # float32 sums of a few dozen numbers of size 1


def filled(module: nn.Module) -> nn.Module:
    """The module with random weights of size 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values)
    return module


def inputs(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator)


def test_rms_norm_is_its_formula() -> None:
    norm = filled(RMSNorm(24, 1e-2))
    x = inputs(2, 5, 24)
    wide = x.double()
    mean_square = wide.square().mean(-1, keepdim=True)
    normalized = wide / (mean_square + 1e-2).sqrt()
    expected = normalized * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, **ROUNDING)


def test_rms_norm_of_bfloat16_is_computed_in_float32() -> None:
    x = inputs(4, 2048).bfloat16()
    weight = torch.ones(2048, dtype=torch.bfloat16)
    expected = rms_norm(x.float(), weight.float(), 1e-5).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_with_an_offset_is_its_formula() -> None:
    norm = filled(RMSNorm(24, 1e-2, has_offset=True)).double()
    x = inputs(2, 5, 24).double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * (1.0 + norm.weight)
    torch.testing.assert_close(norm(x), expected)
    assert torch.autograd.gradcheck(
        lambda x, weight: offset_rms_norm(x, weight, 1e-2), (x.requires_grad_(), norm.weight)
    )


def test_rms_norm_with_an_offset_rounds_its_result_alone_to_bfloat16() -> None:
    """A weight of 0.003 is lost in 16 bits if it is added to 1 there."""
    x, weight = inputs(4, 2048).bfloat16(), torch.full((2048,), 0.003).bfloat16()
    expected = offset_rms_norm(x.double(), weight.double(), 1e-5)
    assert torch.equal(offset_rms_norm(x, weight, 1e-5), expected.bfloat16())


def test_layer_norm_is_its_formula() -> None:
    norm = filled(LayerNorm(24, 1e-2))
    x = inputs(2, 5, 24)
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    normalized = centered / (variance + 1e-2).sqrt()
    expected = normalized * norm.weight + norm.bias
    torch.testing.assert_close(norm(x).double(), expected, **ROUNDING)


def test_feed_forward_layers_are_their_formulas() -> None:
    x = inputs(2, 5, 24)
    wide = x.double()
    tolerance = {"rtol": 1e-5, "atol": 1e-4}  # outputs of size 100
    swiglu = filled(SwiGLU(MODEL, MODEL.ffn))
    gate = wide @ swiglu.gate_proj.weight.double().T
    up = wide @ swiglu.up_proj.weight.double().T
    silu = gate * torch.sigmoid(gate)
    expected = (silu * up) @ swiglu.down_proj.weight.double().T
    torch.testing.assert_close(swiglu(x).double(), expected, **tolerance)

    geglu = filled(SwiGLU(replace(MODEL, activation="gelu_tanh"), MODEL.ffn))
    gelu_of_gate = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    expected = (gelu_of_gate * up) @ geglu.down_proj.weight.double().T  # of the same weights
    torch.testing.assert_close(geglu(x).double(), expected, **tolerance)

    with_biases = replace(MODEL, family="gpt")
    gelu = filled(UngatedFeedForward(with_biases))
    double = copy.deepcopy(gelu).double()
    h = F.linear(wide, double.up_proj.weight, double.up_proj.bias)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))
    h = 0.5 * h * (1 + tanh)
    expected = F.linear(h, double.down_proj.weight, double.down_proj.bias)
    torch.testing.assert_close(gelu(x).double(), expected, **tolerance)

    squared = filled(UngatedFeedForward(replace(MODEL, family="nanochat")))
    double = copy.deepcopy(squared).double()
    expected = (wide @ double.up_proj.weight.T).clamp(min=0).square() @ double.down_proj.weight.T
    torch.testing.assert_close(squared(x).double(), expected, **tolerance)
    assert torch.autograd.gradcheck(squared_relu, wide[0, :2].clone().requires_grad_())


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotation_is_a_product_of_complex_numbers(theta: float) -> None:
    model = Model(hidden=32, heads=2, rope_theta=theta)  # heads of 16 features: 8 complex numbers
    x = inputs(2, 6, 2, 16)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 700]])  # documents restart; order is free
    frequencies = theta ** (-torch.arange(8).double() / 8)
    angles = positions.double().unsqueeze(-1) * frequencies
    turn = torch.exp(1j * angles).unsqueeze(2)
    wide = x.double()
    turned = torch.complex(wide[..., :8], wide[..., 8:]) * turn
    expected = torch.cat((turned.real, turned.imag), -1)
    rotated = rotate(x, rotary_angles(model, positions))
    # an angle of 700 is rounded to 3e-5 in float32
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=1e-4)
    assert torch.equal(rotated[:, 0], x[:, 0])  # position 0 turns nothing


def test_a_part_of_each_head_is_turned_as_a_narrower_head_is() -> None:
    """The first half, and its gradient; the other half passes as it is."""
    x = inputs(1, 8, 2, 16).requires_grad_()
    positions = torch.arange(8).unsqueeze(0)
    rotated = rotate(x, rotary_angles(Model(hidden=32, heads=2, rotary_fraction=0.5), positions))
    narrow = rotate(x[..., :8], rotary_angles(Model(hidden=16, heads=2), positions))
    expected = torch.cat((narrow, x[..., 8:]), -1)
    assert torch.equal(rotated, expected)
    gradient = inputs(1, 8, 2, 16).flip(1)
    (rotated_gradient,) = torch.autograd.grad(rotated, x, gradient)
    (expected_gradient,) = torch.autograd.grad(expected, x, gradient)
    assert torch.equal(rotated_gradient, expected_gradient)


@pytest.mark.parametrize(("scaling", "factor"), [("yarn", 1.0), ("linear", 4.0), ("llama3", 4.0)])
def test_factors_of_yarn_have_no_effect_without_its_scaling(
    scaling: Literal["linear", "llama3", "yarn"], factor: float
) -> None:
    """As in a kind of blocks whose rope_scaling_factor is 1, under a model with YaRN."""
    plain = Model(hidden=32, heads=2, rope_scaling=scaling, rope_scaling_factor=factor, rope_original_length=4)
    with_factors = replace(plain, rope_attention_factor=1.5, rope_query_scale=0.5)
    positions = torch.arange(8).unsqueeze(0)
    expected, rotary = rotary_angles(plain, positions), rotary_angles(with_factors, positions)
    assert torch.equal(rotary.cos, expected.cos)
    assert torch.equal(rotary.sin, expected.sin)
    assert rotary.query_scale is None


NO_KERNELS = (torch.ops.aten.new_empty.default, torch.ops.aten.detach.default)


def test_proportional_angles_are_those_of_whole_heads_of_which_a_share_turns() -> None:
    """Gemma 4: the fastest pairs (i, i + 10) of a head of 20 features; the others stay as they are."""
    model = Model(head_dim=20, rope_theta=100.0, rope_proportional=True, rotary_fraction=0.3, rope_scaling="linear")
    for factor in (1.0, 4.0):
        scaled = replace(model, rope_scaling_factor=factor)
        expected = [100.0 ** (-2 * pair / 20) / factor if pair < 3 else 0.0 for pair in range(10)]
        torch.testing.assert_close(rotary_frequencies(scaled, torch.device("cpu")), torch.tensor(expected))
    assert replace(model, rotary_fraction=0.5).rotary_settings != model.rotary_settings  # by which blocks share angles
    x = torch.randn(1, 5, 2, 20, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotary_angles(model, torch.arange(5).unsqueeze(0)))
    still = [3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 16, 17, 18, 19]
    assert torch.equal(turned[..., still], x[..., still])
    assert not torch.isclose(turned[:, 1:, :, [0, 1, 2, 10, 11, 12]], x[:, 1:, :, [0, 1, 2, 10, 11, 12]]).all(-1).any()


def test_rotation_takes_four_kernels_in_each_direction() -> None:
    x = inputs(1, 8, 2, 16).bfloat16().requires_grad_()
    rotary = rotary_angles(Model(hidden=32, heads=2), torch.arange(8).unsqueeze(0))
    with Operations() as forward:
        rotated = rotate(x, rotary)
    gradient = torch.ones_like(rotated)
    with Operations() as backward:
        rotated.backward(gradient)
    for operations in (forward, backward):
        kernels = [operation for operation in operations.all if not operation.is_view and operation not in NO_KERNELS]
        assert [kernel.__name__.partition(".")[0] for kernel in kernels] == ["roll", "mul", "mul", "add"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_rotation_is_that_of_its_products(dtype: torch.dtype) -> None:
    """Bit by bit what autograd makes of the formula, whose products and sums are in float32."""
    x = inputs(1, 8, 2, 16).to(dtype).requires_grad_()
    cos, sin, _ = rotary = rotary_angles(Model(hidden=32, heads=2), torch.arange(8).unsqueeze(0) + 4000)
    wide = x.float()
    expected = (wide * cos + wide.roll(8, dims=-1) * sin).to(dtype)
    gradient = inputs(1, 8, 2, 16).flip(1).to(dtype)
    (expected_gradient,) = torch.autograd.grad(expected, x, gradient)
    rotated = rotate(x, rotary)
    (rotated_gradient,) = torch.autograd.grad(rotated, x, gradient)
    assert torch.equal(rotated, expected)
    assert torch.equal(rotated_gradient, expected_gradient)


def test_llama31_scaling_by_wavelength() -> None:
    """Wavelength by wavelength, the three cases of Llama 3.1 (Dubey et al. 2024): kept, mixed, scaled in full."""
    model = Model(hidden=128, heads=1, rope_theta=500000.0, rope_scaling_factor=8.0)
    scaled = rotary_frequencies(model, torch.device("cpu")).double()
    cases = set()
    for i, got in enumerate(scaled.tolist()):
        plain = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            case = "kept"
            expected = plain
        elif wavelength > 8192 / 1:
            case = "scaled"
            expected = plain / 8
        else:
            case = "mixed"
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        cases.add(case)
        assert got == pytest.approx(expected, rel=2e-6), (i, case)  # float32 powers
    assert cases == {"kept", "mixed", "scaled"}
