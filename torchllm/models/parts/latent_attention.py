"""Multi-head latent attention: the keys and values of all heads are products of one narrow vector of each token, its
latent (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv 2412.19437, section 2.1.1).

    latents   c = norm(x A), key_rope = x R;  of queries c_q = norm(x A_q), or x itself with model.latent_q_width = 0
    heads     (key, value) = c B;  query = c_q B_q

Rotary positions turn the last features of each query and `key_rope`, which is the end of the key in every head; the
other features of keys and queries have no position. Values have their own width.

Shapes: B batch, S sequence, D hidden, H heads, N and R features of a head without and with rotary positions, Q = N + R
width of queries and keys, V width of values, C width of the latent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.models.attention import CORES
from torchllm.models.layers import RMSNorm, Rotary, neighbors_apart, rotate
from torchllm.models.mixer import Mixer


class Latents(NamedTuple):
    """The features of each token that are computed before the heads."""

    q: Tensor
    """input of the projection of queries: (B, S, model.latent_q_width), or the hidden states (B, S, D)"""
    kv: Tensor
    """(B, S, C)"""
    key_rope: Tensor
    """features of the keys of all heads with rotary positions, not yet turned: (B, S, R)"""


class LatentAttention(Mixer):
    """Projects to latents, from these to q, k, v of each head, and calls an attention core and o_proj."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.q_widths = model.nope_head_dim, model.rope_head_dim
        self.kv_widths = model.nope_head_dim, model.v_head_dim
        """of a head, as kv_b_proj has them"""
        self.latent_widths = model.latent_kv_width, model.rope_head_dim
        q_width = model.heads * model.head_width
        self.has_q_latent = model.latent_q_width > 0
        if self.has_q_latent:
            self.q_a_proj = nn.Linear(model.hidden, model.latent_q_width, bias=False)
            self.q_a_norm = RMSNorm(model.latent_q_width, model.latent_norm_epsilon)
        self.kv_a_proj = nn.Linear(model.hidden, sum(self.latent_widths), bias=False)
        self.kv_a_norm = RMSNorm(model.latent_kv_width, model.latent_norm_epsilon)
        if self.has_q_latent:
            self.q_b_proj = nn.Linear(model.latent_q_width, q_width, bias=False)
        else:
            self.q_proj = nn.Linear(model.hidden, q_width, bias=False)
        self.kv_b_proj = nn.Linear(model.latent_kv_width, model.heads * sum(self.kv_widths), bias=False)
        self.o_proj = nn.Linear(model.heads * model.v_head_dim, model.hidden, bias=False)
        self.core = HeadsOfLatents(CORES[model.attention](model), self.keys_and_values)
        self.is_interleaved = model.rope_interleaved
        self.for_own_heads: Callable[[Latents], Latents] = lambda latents: latents
        """replaceable: maps the latents of this rank's tokens to the latents of all tokens of the sequence"""

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        """Let each token attend to the tokens that it may see: x (B, S, D) -> (B, S, D)."""
        assert rotary is not None  # the config has them
        latents = self.for_own_heads(self.latents(x))
        q = (self.q_b_proj if self.has_q_latent else self.q_proj)(latents.q).unflatten(-1, (-1, sum(self.q_widths)))
        q_nope, q_rope = q.split(self.q_widths, dim=-1)
        key_rope = latents.key_rope.unsqueeze(2)  # (B, S, 1, R)
        if self.is_interleaved:
            q_rope, key_rope = (neighbors_apart(x, x.shape[-1]) for x in (q_rope, key_rope))
        q = torch.cat((q_nope, rotate(q_rope, rotary)), dim=-1)
        key_rope = rotate(key_rope, rotary)
        return self.o_proj(self.core(q, latents.kv, key_rope, mask).flatten(-2))

    def latents(self, x: Tensor) -> Latents:
        """Return the latents of tokens x (B, S, D)."""
        q = self.q_a_norm(self.q_a_proj(x)) if self.has_q_latent else x
        kv, key_rope = self.kv_a_proj(x).split(self.latent_widths, dim=-1)
        return Latents(q, self.kv_a_norm(kv), key_rope)

    def keys_and_values(self, kv: Tensor, key_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return k (B, S, H, Q) and v (B, S, H, V), from latents kv (B, S, C) and turned features (B, S, 1, R)."""
        k_nope, v = self.kv_b_proj(kv).unflatten(-1, (-1, sum(self.kv_widths))).split(self.kv_widths, dim=-1)
        return torch.cat((k_nope, key_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1), v

    def cached_core(self, *, room: int, padding: Tensor | None) -> nn.Module:
        """Return a core that caches latents."""
        from torchllm.models.parts.cached_latents import CachedLatents  # of no use to training

        return CachedLatents(self.core, self.kv_weights, room=room, padding=padding)

    def kv_weights(self) -> tuple[Tensor, ...]:
        """Return the weights of keys (H, N, C) and values (H, V, C), in a forward: FSDP has gathered them only then."""
        return self.kv_b_proj.weight.unflatten(0, (-1, sum(self.kv_widths))).split(self.kv_widths, dim=1)


class HeadsOfLatents(nn.Module):
    """Makes the keys and values of all heads from latents, and calls an attention core."""

    def __init__(self, core: Any, keys_and_values: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        """keys_and_values: the method of `LatentAttention`."""
        super().__init__()
        self.core = core
        """replaceable, as `Attention.core`"""
        self.keys_and_values = keys_and_values
        self.window = core.window

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Any:
        """Return the mask of the attention core."""
        return self.core.mask(document_ids, document_limit)

    def forward(self, q: Tensor, kv: Tensor, key_rope: Tensor, mask: Any) -> Tensor:
        """Return the results of the heads: q (B, S, H, Q), kv (B, S, C), key_rope (B, S, 1, R) -> (B, S, H, V).

        Cores take one width of queries, keys and values: values get zeros behind them, which change no result.
        """
        k, v = self.keys_and_values(kv, key_rope)
        out: Tensor = self.core(q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])), mask)
        return out[..., : v.shape[-1]]
