"""Blocks with norms after attention and the feed-forward layer: `model.norm_position` "after" and "both"."""

from typing import Any

import torch
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.facts.parts.registry import feed_forward
from torchllm.models.decoder import Block
from torchllm.models.layers import Rotary, build_norm


class NormsAroundBlock(Block):
    """Adds attention and the feed-forward layer, each between two norms, to the residual stream (Gemma 2).

    Norms have Hugging Face's names: post_attention_layernorm is the feed-forward layer's norm in a `Block`, but
    attention's second one here.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.pre_feedforward_layernorm = nn.Identity() if feed_forward(model).norms_input else build_norm(model)
        self.post_feedforward_layernorm = build_norm(model)

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        """Run the block on the residual stream: x (B, S, D) -> (B, S, D). mask: as the attention core made it."""
        x, inner = self.attend(x, rotary, mask)
        return torch.add(x, self.post_feedforward_layernorm(self.mlp(inner)), alpha=self.multiplier)

    def attend(self, x: Tensor, rotary: Rotary | None, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and the input of the feed-forward layer: (B, S, D) each."""
        out = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotary, mask))
        x = torch.add(x, out, alpha=self.multiplier)
        return x, self.pre_feedforward_layernorm(x)


class NormAfterBlock(NormsAroundBlock):
    """Adds attention and the feed-forward layer, each with a norm after it, to the residual stream (OLMo 2)."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        del self.input_layernorm, self.pre_feedforward_layernorm

    def attend(self, x: Tensor, rotary: Rotary | None, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, (B, S, D), twice: there is no norm before the feed-forward."""
        x = torch.add(x, self.post_attention_layernorm(self.self_attn(x, rotary, mask)), alpha=self.multiplier)
        return x, x


class ScaledBlock(NormsAroundBlock):
    """Multiplies the output of the block by a number that is not trained (Gemma 4)."""

    layer_scalar: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        """Run the block on the residual stream: x (B, S, D) -> (B, S, D). mask: as the attention core made it."""
        return super().forward(x, rotary, mask) * self.layer_scalar.to(x.dtype)
