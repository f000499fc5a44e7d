"""Gated DeltaNet: the mixer around a gated delta rule (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464, figure 1).

Shapes: B batch, S sequence, D hidden, K key heads of width Q, V value heads of width P.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.facts.parts.gated_delta import DeltaSizes, delta_sizes
from torchllm.models.layers import RMSNorm, Rotary, silu_gated
from torchllm.models.mixer import Mixer
from torchllm.models.parts.delta_rule import DeltaCore, HeadWeights, Streams


class GatedDeltaNet(Mixer):
    """Projects to q, k, v, a and b, runs the recurrence, and norms and gates its results before o_proj."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.sizes = delta_sizes(model)
        sizes, hidden = self.sizes, model.hidden
        self.q_proj = nn.Linear(hidden, sizes.keys, bias=False)
        self.k_proj = nn.Linear(hidden, sizes.keys, bias=False)
        self.v_proj = nn.Linear(hidden, sizes.values, bias=False)
        self.a_proj = nn.Linear(hidden, sizes.value_heads, bias=False)
        self.b_proj = nn.Linear(hidden, sizes.value_heads, bias=False)
        self.of_heads = ParametersOfHeads(sizes)
        self.core: Any = DeltaCore(sizes)
        self.o_norm = RMSNorm(sizes.value_width, model.delta_norm_epsilon or model.norm_epsilon)
        self.g_proj = nn.Linear(hidden, sizes.values, bias=False)
        self.o_proj = nn.Linear(sizes.values, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        """Let each token read the tokens before it in its document: x (B, S, D) -> (B, S, D)."""
        of_keys, of_values = (-1, self.sizes.key_width), (-1, self.sizes.value_width)  # number of heads: this rank's
        q, k = self.q_proj(x).unflatten(-1, of_keys), self.k_proj(x).unflatten(-1, of_keys)
        v = self.v_proj(x).unflatten(-1, of_values)
        out = self.core(Streams(q, k, v, self.a_proj(x), self.b_proj(x)), self.of_heads(), mask)
        gate = self.g_proj(x).unflatten(-1, of_values)
        out = silu_gated(gate, self.o_norm(out)).flatten(-2)
        return self.o_proj(out)

    def cached_core(self, *, room: int, padding: Tensor | None) -> nn.Module:
        """Return a core that caches the state. It needs neither room nor padding, which the mask hides."""
        from torchllm.models.parts.cached_delta import CachedDelta  # of no use to trainings

        return CachedDelta(self.core)


class ParametersOfHeads(nn.Module):
    """The parameters of the heads that are no matrices."""

    def __init__(self, sizes: DeltaSizes) -> None:
        super().__init__()
        self.q_conv = nn.Parameter(torch.empty(sizes.keys, sizes.kernel))
        self.k_conv = nn.Parameter(torch.empty(sizes.keys, sizes.kernel))
        self.v_conv = nn.Parameter(torch.empty(sizes.values, sizes.kernel))
        self.A_log = nn.Parameter(torch.empty(sizes.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(sizes.value_heads))
        self.local: Callable[[Tensor], Tensor] = lambda parameter: parameter
        """returns this rank's part of a parameter, a plain tensor: `parallel/added_parameters.py`"""

    def forward(self) -> HeadWeights:
        """Return the parameters of this rank's heads."""
        parameters = self.q_conv, self.k_conv, self.v_conv, self.A_log, self.dt_bias
        return HeadWeights(*map(self.local, parameters))
