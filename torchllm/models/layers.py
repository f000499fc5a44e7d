"""Norms, feed-forward layers and rotary positions.

Shapes: B batch, S sequence, D hidden, F feed-forward, H heads, Q head width. Under sequence parallelism S of the norms
is this rank's part of the sequence; under tensor parallelism F and H are this rank's part.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchllm.config import Model
from torchllm.facts.parts.part import found


def widened(x: Tensor) -> Tensor:
    """Return x in float32; float64 stays, for proofs that must tell a mistake from rounding."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), x for a cap of 0 (Gemma 2: Gemma Team 2024, arXiv 2408.00118, section 2)."""
    return (x / cap).tanh() * cap if cap else x


OFFSET_RMS_NORM = "torchllm.models.offset_norm:offset_rms_norm"
"""few models have it"""


class RMSNorm(nn.Module):
    """Normalizes x by its root mean square: x / rms(x) * weight, computed in float32 (arXiv 1910.07467).

    `kernel` is replaceable: compiled it is one fused pass over x.
    """

    def __init__(self, width: int, epsilon: float, has_offset: bool = False, has_weight: bool = True) -> None:
        """has_offset: the weight is added to 1 (`model.norm_offset`)."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width)) if has_weight else None
        self.epsilon = epsilon
        self.has_offset = has_offset
        self.kernel: Callable[..., Tensor] = found(OFFSET_RMS_NORM) if has_offset else rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x: (..., width) -> (..., width)."""
        return self.kernel(x, self.weight, self.epsilon)


def build_norm(model: Model) -> nn.Module:
    """Return the norm of the residual stream, by `model.features.norm`, with uninitialized weights."""
    if model.features.norm == "rms":
        return RMSNorm(model.hidden, model.norm_epsilon, model.offsets_norms, model.features.norm_weights)
    norm: nn.Module = found("torchllm.models.gpt_layers:LayerNorm")(model.hidden, model.norm_epsilon)
    return norm


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Return x / rms(x) * weight: x (..., width), weight (width), or None for 1 -> (..., width)."""
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def build_feed_forward(model: Model) -> nn.Module:
    """Return the dense feed-forward layer, by `model.features.feed_forward`, with uninitialized weights."""
    if model.features.gated_ffn:
        return SwiGLU(model, model.ffn)
    layer: nn.Module = found("torchllm.models.gpt_layers:UngatedFeedForward")(model)
    return layer


def silu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, of tensors of one shape."""
    return F.silu(gate) * up


GATED = {
    "silu": "torchllm.models.layers:silu_gated",
    "gelu_tanh": "torchllm.models.activations:gelu_gated",
    "clamped_silu": "torchllm.models.activations:clamped_silu_gated",
}
"""functions of gate and up, by `model.activation`"""


class SwiGLU(nn.Module):
    """Computes down(act(gate(x)) * up(x)), the feed-forward layer of Llama (Shazeer 2020, arXiv 2002.05202).

    The activation act is SiLU in Llama, GELU in Gemma (GEGLU).
    """

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        bias = model.features.biases
        self.gate_proj = nn.Linear(model.hidden, width, bias=bias)
        self.up_proj = nn.Linear(model.hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, model.hidden, bias=bias)
        self.gated: Callable[[Tensor, Tensor], Tensor] = found(GATED[model.activation])
        """replaceable: `parallel/compile.py`"""

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: (B, S, D) -> (B, S, D)."""
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))


class Rotary(NamedTuple):
    """Factors of rotary positions, float32."""

    cos: Tensor
    """of the rotated features, for `rotate`: (B, S, 1, R)"""
    sin: Tensor
    """of their partners, for `rotate`: (B, S, 1, R)"""
    query_scale: Tensor | None = None
    """of whole queries, (B, S, 1, 1); None: 1"""


def rotary_frequencies(model: Model, device: torch.device) -> Tensor:
    """Return the angle per position, in radians, of each pair of features that is turned, (R / 2) float32.

    Angles follow RoFormer (Su et al. 2021, arXiv 2104.09864); `rope_scaling` slows them down for contexts that are
    `rope_scaling_factor` times longer. With `rope_proportional` the angles of the slowest pairs are 0.
    """
    frequencies = _scaled_frequencies(model, device)
    if model.rope_proportional:
        frequencies[model.turned_width // 2 :] = 0.0
    return frequencies


def _scaled_frequencies(model: Model, device: torch.device) -> Tensor:
    """Return the frequencies of all pairs of features that have angles, (R / 2) float32."""
    exponents = torch.arange(0, model.rotary_width, 2, device=device, dtype=torch.float32) / model.rotary_width
    unscaled = 1.0 / model.rope_theta**exponents
    scaled = unscaled / model.rope_scaling_factor
    match model.rope_scaling:
        case "linear":
            return scaled
        case "llama3":
            share_unscaled = _llama3_share_unscaled(model, unscaled)
        case "yarn":
            share_unscaled = found("torchllm.models.yarn:share_unscaled")(model, device)  # few models have it
    return unscaled * share_unscaled + scaled * (1.0 - share_unscaled)


def _llama3_share_unscaled(model: Model, unscaled: Tensor) -> Tensor:
    """Return the share of the unscaled frequency in each of Llama 3.1, (R / 2).

    It is 0 at wavelengths over original_length / low_frequency_factor, 1 at those under original_length /
    high_frequency_factor, and linear in the turns within the original context between these.
    """
    turns = model.rope_original_length * unscaled / (2 * math.pi)
    low = model.rope_low_frequency_factor
    high = model.rope_high_frequency_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def rotary_angles(model: Model, positions: Tensor) -> Rotary:
    """Return cosine and signed sine of every position's angles, as `rotate` needs them; positions: (B, S).

    They are computed in each forward, so there is no buffer to lose, shard or load.
    """
    # float32 whatever the dtype of the computation: bfloat16 has no position 257.
    angles = positions.unsqueeze(-1).float() * rotary_frequencies(model, positions.device)
    angles = angles.unsqueeze(2)  # the same for all heads
    cos, sin = angles.cos(), angles.sin()
    if model.has_yarn:
        factor = model.yarn_attention_factor
        cos, sin = cos * factor, sin * factor
    rotary = Rotary(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    if not (model.has_yarn and model.rope_query_scale):
        return rotary
    lengths = (positions // model.rope_original_length).float()
    return rotary._replace(query_scale=(1.0 + model.rope_query_scale * lengths.log1p())[..., None, None])


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs (x[i], x[i + R / 2]) by the angles of their position: Hugging Face's "rotate half" layout.

    x (B, S, H, Q) -> (B, S, H, Q) in x's dtype. The first R features (R: width of the angles) are rotated, the others
    unchanged. The products are computed in float32, the dtype of the angles.
    """
    cos, sin, _ = rotary
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return _Rotation.apply(x, cos, sin)
    return torch.cat((_Rotation.apply(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def neighbors_apart(x: Tensor, width: int) -> Tensor:
    """Return x (..., Q) with its first `width` features reordered, even indices first: `rotate` then turns neighbors.

    Scores do not change: queries and keys have the same order.
    """
    apart = x[..., :width].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return apart if width == x.shape[-1] else torch.cat((apart, x[..., width:]), dim=-1)


class _Rotation(torch.autograd.Function):
    """Rotates by the angles; the gradient is rotated by the negative angles.

    Without compilation, each direction takes four kernels on a GPU. autograd's own backward would take six: it
    differentiates the conversions and each product separately.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, direction=1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, direction=-1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """Rotate by the angles, or with direction -1 by the negative ones: x (B, S, H, R) -> (B, S, H, R).

    A roll by half the width moves each feature to its partner. The products with the angles are float32.
    FOOTGUN: only uncompiled code writes their sum to x's dtype with `out=`. In torch 2.11 a compiled backward loses
    results written to `out`, or returned from a conversion without effect, and the gradient would be zero.
    """
    partner = x.roll(x.shape[-1] // 2, dims=-1)
    products = (x * cos, partner * sin)
    if torch.compiler.is_compiling():
        rotated = torch.add(*products, alpha=direction)
        return rotated if rotated.dtype == x.dtype else rotated.to(x.dtype)
    return torch.add(*products, alpha=direction, out=x.new_empty(x.shape))
