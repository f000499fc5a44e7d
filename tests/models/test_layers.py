"""Norms, feed-forward layers and rotary positions against their formulas in float64, and RMSNorm's compiled kernel."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.models.layers import (
    GELUFeedForward,
    LayerNorm,
    RMSNorm,
    SwiGLU,
    rms_norm,
    rotary_angles,
    rotary_frequencies,
    rotate,
)

MODEL = Model(hidden=24, heads=4, ffn=40, norm_epsilon=1e-2)  # an epsilon large enough to be seen if it is misplaced
ROUNDING = {"rtol": 0.0, "atol": 2e-6}  # float32 sums of a few dozen numbers of size 1


def filled(module: nn.Module) -> nn.Module:
    """The module with random weights of size 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_rms_norm_is_its_formula() -> None:
    norm, x = filled(RMSNorm(24, 1e-2)), inputs(2, 5, 24)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, **ROUNDING)


def test_rms_norm_of_bfloat16_is_computed_in_float32() -> None:
    x, weight = inputs(4, 2048).bfloat16(), torch.ones(2048, dtype=torch.bfloat16)
    expected = rms_norm(x.float(), weight.float(), 1e-5).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-5), expected)


def test_layer_norm_is_its_formula() -> None:
    norm, x = filled(LayerNorm(24, 1e-2)), inputs(2, 5, 24)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x).double(), expected, **ROUNDING)


def test_feed_forward_layers_are_their_formulas() -> None:
    x, tolerance = inputs(2, 5, 24), {"rtol": 1e-5, "atol": 1e-4}  # outputs of size 100
    swiglu = filled(SwiGLU(MODEL))
    gate, up, down = (p.weight.double() for p in (swiglu.gate_proj, swiglu.up_proj, swiglu.down_proj))
    gated = x.double() @ gate.T
    expected = (gated * torch.sigmoid(gated) * (x.double() @ up.T)) @ down.T
    torch.testing.assert_close(swiglu(x).double(), expected, **tolerance)

    gelu = filled(GELUFeedForward(replace(MODEL, family="gpt")))  # with biases
    h = F.linear(x.double(), gelu.up_proj.weight.double(), gelu.up_proj.bias.double())
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    expected = F.linear(h, gelu.down_proj.weight.double(), gelu.down_proj.bias.double())
    torch.testing.assert_close(gelu(x).double(), expected, **tolerance)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotation_is_a_product_of_complex_numbers(theta: float) -> None:
    model = Model(hidden=32, heads=2, rope_theta=theta)  # heads of 16 features: 8 complex numbers
    x = inputs(2, 6, 2, 16)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 700]])  # documents restart; order is free
    angles = positions.double().unsqueeze(-1) * theta ** (-torch.arange(8).double() / 8)
    wide = x.double()
    turned = torch.complex(wide[..., :8], wide[..., 8:]) * torch.exp(1j * angles).unsqueeze(2)
    expected = torch.cat((turned.real, turned.imag), -1)
    # an angle of 700 is rounded to 3e-5 in float32
    torch.testing.assert_close(rotate(x, rotary_angles(model, positions)).double(), expected, rtol=0, atol=1e-4)
    assert torch.equal(rotate(x, rotary_angles(model, positions))[:, 0], x[:, 0])  # position 0 turns nothing


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    model = Model(hidden=32, heads=2)
    q, k = inputs(1, 1, 2, 16), inputs(1, 1, 2, 16).flip(-1)

    def score(m: int, n: int) -> Tensor:
        at = (rotary_angles(model, torch.tensor([[p]])) for p in (m, n))
        return (rotate(q, next(at)) * rotate(k, next(at))).sum(-1)

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=0, atol=1e-4)
    assert (score(7, 3) - score(7, 4)).abs().max() > 0.1


def test_rotation_keeps_the_type_and_computes_in_float32() -> None:
    model = Model(hidden=32, heads=2)
    x, rotary = inputs(1, 8, 2, 16).bfloat16(), rotary_angles(model, torch.arange(8).unsqueeze(0) + 4000)
    assert rotary[0].dtype == torch.float32
    assert torch.equal(rotate(x, rotary), rotate(x.float(), rotary).bfloat16())


def test_llama31_scaling_by_wavelength() -> None:
    """Wavelength by wavelength, the three cases of Llama 3.1 (Dubey et al. 2024): kept, mixed, scaled in full."""
    model = Model(hidden=128, heads=1, rope_theta=500000.0, rope_scaling_factor=8.0)
    scaled = rotary_frequencies(model, torch.device("cpu")).double()
    cases = set()
    for i, got in enumerate(scaled.tolist()):
        plain = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            case, expected = "kept", plain
        elif wavelength > 8192 / 1:
            case, expected = "scaled", plain / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            case, expected = "mixed", (1 - smooth) * plain / 8 + smooth * plain
        cases.add(case)
        assert got == pytest.approx(expected, rel=2e-6), (i, case)  # float32 powers
    assert cases == {"kept", "mixed", "scaled"}


@pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("clang++"), reason="torch.compile needs a C++ compiler"
)
def test_compiled_rms_norm_is_the_eager_one() -> None:
    compiled = torch.compile(rms_norm)
    x, weight, gradient = inputs(2, 5, 24), inputs(24), inputs(2, 5, 24).flip(0)

    def both_ways(kernel: object) -> tuple[Tensor, ...]:
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = kernel(a, b, 1e-2)  # type: ignore[operator]
        return out, *torch.autograd.grad(out, (a, b), gradient)

    for got, expected in zip(both_ways(compiled), both_ways(rms_norm), strict=True):
        torch.testing.assert_close(got, expected, **ROUNDING)
