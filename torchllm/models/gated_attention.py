"""Attention whose results are multiplied by the sigmoid of a gate: `model.attention_gate`."""

from typing import Any

from torch import Tensor, nn

from torchllm.config import Model
from torchllm.models.attention import Attention
from torchllm.models.layers import Rotary


class ElementGatedAttention(Attention):
    """Multiplies each result by the sigmoid of its gate (Qiu et al. 2025, arXiv 2505.06708).

    q_proj makes both, head by head: the queries of a head, then its gates. So a rank with some heads has their gates.
    """

    def heads(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2, self.head_width)).unbind(-2)
        out = self.attend(q.flatten(-2), *self.keys_and_values(x), rotary, mask)
        return out * gate.sigmoid().flatten(-2)


class HeadGatedAttention(Attention):
    """Multiplies the results of each head by the sigmoid of the head's gate (Qiu et al. 2025, arXiv 2505.06708)."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.head_gate = nn.Linear(model.hidden, model.heads, bias=model.features.biases)

    def heads(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        out = super().heads(x, rotary, mask).unflatten(-1, (-1, self.head_width))
        return (out * self.head_gate(x).sigmoid().unsqueeze(-1)).flatten(-2)
