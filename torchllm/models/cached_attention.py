"""Attention with a cache of keys and values, for generation one token at a time."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.facts.parts.part import found
from torchllm.models.fused_attention import heads_of_kernel


class CachedAttention(nn.Module):
    """A core that caches the keys and values of earlier calls.

    The first call (the prompts) goes to the wrapped core. Each later call adds one token per text, which sees all
    tokens before it. For a core with a window only the tokens of the window are cached: the newest replaces the oldest.
    """

    def __init__(self, core: Any, *, room: int = 0, padding: Tensor | None = None) -> None:
        """`room`: tokens of the longest text; a cache that is full doubles.

        padding: tokens of the first call that no later token may see, (B, S) bool; None: there are none.
        """
        super().__init__()
        self.core = core
        self.mask = core.mask
        self.room = room
        self.padding = padding
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        """(B, K, slots, Q)"""
        self.visible: Tensor | None = None
        """(B, slots) bool"""
        self.length = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *of_heads: Tensor) -> Tensor:
        """of_heads: further inputs of the core."""
        if self.keys is None or self.values is None:
            self._start(k, v)
            return self.core(q, k, v, mask, *of_heads)
        if self.length == self.keys.shape[2] != self.core.window:
            self._grow(self.keys, self.values)
        slot = self.length % self.keys.shape[2]
        self.keys[:, :, slot], self.values[:, :, slot] = k[:, 0], v[:, 0]
        self.length += 1
        filled = slice(0, min(self.length, self.keys.shape[2]))
        visible = None
        if self.visible is not None:
            self.visible[:, slot] = True
            visible = self.visible[:, None, None, filled]
        if self.core.softcap or of_heads:
            return self._eager(q, self.keys[:, :, filled], self.values[:, :, filled], visible, *of_heads)
        q = q.transpose(1, 2)  # (B, H, 1, Q)
        keys = heads_of_kernel(q, self.keys[:, :, filled], visible)
        values = heads_of_kernel(q, self.values[:, :, filled], visible)
        grouped = q.shape[1] != keys.shape[1]
        options = {"scale": self.core.scale, "enable_gqa": grouped}
        return F.scaled_dot_product_attention(q, keys, values, visible, **options).transpose(1, 2)

    def _eager(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, *of_heads: Tensor) -> Tensor:
        """Return the attention of one query per text, (B, 1, H, Q), where no fused kernel computes all of it."""
        view = replace(self.core.view, attention="eager")
        core_class = found("torchllm.models.attention:core_class")  # that file makes this core
        if visible is None:
            visible = torch.ones(1, keys.shape[2], dtype=torch.bool, device=q.device)
        return core_class(view)(view)(q, keys.transpose(1, 2), values.transpose(1, 2), visible, *of_heads)

    def _start(self, k: Tensor, v: Tensor) -> None:
        """Cache the keys and values of the prompts, (B, S, K, Q); of position p in slot p modulo the slots."""
        batch, self.length, heads, width = k.shape
        slots = max(self.room, self.length)
        if self.core.window:
            slots = min(slots, self.core.window)
        kept = slice(max(0, self.length - slots), self.length)
        places = torch.arange(kept.start, kept.stop, device=k.device) % slots
        self.keys, self.values = (x.new_empty(batch, heads, slots, width) for x in (k, v))
        self.keys[:, :, places] = k[:, kept].transpose(1, 2)
        self.values[:, :, places] = v[:, kept].transpose(1, 2)
        if self.padding is not None:
            self.visible = torch.ones(batch, slots, dtype=torch.bool, device=k.device)
            self.visible[:, places] = ~self.padding[:, kept]

    def _grow(self, keys: Tensor, values: Tensor) -> None:
        """Double the slots, up to the window."""
        window = self.core.window
        more = min(self.length, window - self.length) if window else self.length
        self.keys, self.values = F.pad(keys, (0, 0, 0, more)), F.pad(values, (0, 0, 0, more))
        if self.visible is not None:
            self.visible = F.pad(self.visible, (0, more), value=True)
