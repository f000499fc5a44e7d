"""Experts next to a dense layer, as in Gemma 4 26B-A4B: `facts/parts/experts_beside.py` says how they combine.

Shapes are as in `models/experts.py`.
"""

from typing import Any

from torch import Tensor, nn

from torchllm.config import Model
from torchllm.models.experts import RoutedExperts, Router, SentTokens
from torchllm.models.layers import SwiGLU, build_norm, rms_norm


class ScaledRouter(Router):
    """A router that norms and scales its input, and scales the weights of each expert."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.input_scale = nn.Parameter(self.weight.new_empty(model.hidden))
        self.expert_scale = nn.Parameter(self.weight.new_empty(model.experts))
        self.epsilon = model.norm_epsilon
        self.factor = model.hidden**-0.5

    def own_parameters(self) -> tuple[Any, ...]:
        """Return the inputs of `choose` after the tokens."""
        return *super().own_parameters(), self.local(self.input_scale), self.local(self.expert_scale)

    def choose(
        self, x: Tensor, weight: Tensor, logit_bias: Tensor | None, *scales: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same as `Router.choose`. scales: of the features of its input, (D), and of the experts, (E)."""
        of_input, of_experts = scales
        normed = rms_norm(x, None, self.epsilon) * (of_input * self.factor)
        experts, weights, logits = super().choose(normed.to(x.dtype), weight, logit_bias)
        return experts, weights * of_experts[experts], logits


class NormedExperts(RoutedExperts):
    """Routed experts that norm their input; the router reads it without this norm."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.router = ScaledRouter(model)
        self.input_norm = build_norm(model)

    def send(self, x: Tensor) -> SentTokens:
        """Route the tokens of x (B, S, D), and send them to their experts, normed."""
        x = self.own_tokens(x)
        routing = self.router(x)
        return self.send_routed(self.input_norm(x), routing)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sums of the experts' results: (B, S, D) -> (B, S, D)."""
        return self.finish(self.compute(self.send(x)))


class ExpertsBesideDense(nn.Module):
    """The feed-forward layer of a block: experts and a dense layer, each between two norms."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.routed = NormedExperts(model)
        self.routed_norm = build_norm(model)
        self.dense_input_norm = build_norm(model)
        self.dense = SwiGLU(model, model.ffn)
        self.dense_norm = build_norm(model)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token of the residual stream: (B, S, D) -> (B, S, D)."""
        routed = self.routed_norm(self.routed(x))
        return self.dense_norm(self.dense(self.dense_input_norm(x))) + routed
