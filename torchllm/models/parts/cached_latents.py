"""Latent attention with a cache of latents, for generation one token at a time (DeepSeek-V2, arXiv 2405.04434, 2.1.2).

Scores and results are computed in the space of the latents: a query is multiplied with the weights that would make keys
of them, and the result with those that would make values. So a token costs H (C + R) multiply-adds per earlier token
twice, and no keys or values are made of the cache.

Shapes: B batch, H heads, N and R features of a head without and with rotary positions, V width of values, C width of
the latent.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.models.layers import soft_capped, widened


class CachedLatents(nn.Module):
    """The core of a latent attention that caches the latents of earlier calls, C + R numbers per token.

    The first call (the prompts) goes to the wrapped core. Each later call adds one token per text, which sees all
    tokens before it.
    """

    def __init__(
        self, core: Any, weights: Callable[[], tuple[Tensor, ...]], *, room: int, padding: Tensor | None
    ) -> None:
        """weights: `LatentAttention.kv_weights`. room, padding: as of `Mixer.cached_core`."""
        super().__init__()
        self.core = core
        self.mask = core.mask
        self.window = core.window
        self.weights = weights
        self.room = room
        self.padding = padding
        self.latents: Tensor | None = None
        """(B, 1, slots, C + R)"""
        self.length = 0

    def forward(self, q: Tensor, kv: Tensor, key_rope: Tensor, mask: Any) -> Tensor:
        """Map q (B, S, H, N + R), kv (B, S, C), key_rope (B, S, 1, R) -> (B, S, H, V)."""
        new = torch.cat((kv.unsqueeze(2), key_rope), dim=-1).transpose(1, 2)
        is_prompt = self.latents is None
        if self.latents is None:
            self.latents = new.new_empty(*new.shape[:2], max(self.room, new.shape[2]), new.shape[3])
        elif self.length == self.latents.shape[2]:
            self.latents = F.pad(self.latents, (0, 0, 0, self.length))
        self.latents[:, :, self.length : self.length + new.shape[2]] = new
        self.length += new.shape[2]
        if is_prompt:
            return self.core(q, kv, key_rope, mask)
        return self._one_token(q, self.latents[:, :, : self.length])

    def _one_token(self, q: Tensor, latents: Tensor) -> Tensor:
        """Return the results of a token's heads, (B, 1, H, V): q (B, 1, H, N + R), latents (B, 1, T, C + R)."""
        key_weight, value_weight = self.weights()
        nope, kv_width = key_weight.shape[1:]
        core = self.core.core
        scale = core.scale or q.shape[-1] ** -0.5
        visible = None
        if self.padding is not None:
            later = self.length - self.padding.shape[1]
            visible = F.pad(~self.padding, (0, later), value=True)[:, None, None]
        in_latents = torch.einsum("bshn,hnc->bshc", q[..., :nope], key_weight)
        queries = torch.cat((in_latents, q[..., nope:]), dim=-1)  # to the kernel, H tokens of one head
        if core.softcap:  # the fused kernel has none
            scores = soft_capped(widened(queries @ latents.mT) * scale, core.softcap)
            scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
            out = scores.softmax(-1).to(latents.dtype) @ latents
        else:
            out = F.scaled_dot_product_attention(queries, latents, latents, visible, scale=scale)
        return torch.einsum("bshc,hvc->bshv", out[..., :kv_width], value_weight)
