"""Mixture of experts: a router chooses, for every token, a few of many feed-forward layers (Shazeer et al. 2017,
arXiv 1701.06538).

Every token reaches all of its experts, however many others chose them ("dropless"): no token is dropped, and none
waits for a capacity. The order of all sums is fixed, so that a layer's result does not depend on how its tokens are
shared by ranks: experts of a token are sorted by score, equal ones by index, and a token's results are added in
that order.

Shapes: B batch, S sequence, D hidden, T tokens (B x S), E experts, K experts per token, F width of an expert.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.models.grouped_products import grouped_linear
from torchllm.models.layers import SwiGLU


class Routing(NamedTuple):
    """Which experts the tokens use, best first."""

    experts: Tensor
    """(T, K) int64"""
    weights: Tensor
    """what the result of each is multiplied by, (T, K) float32"""


class Router(nn.Module):
    """Chooses K experts for every token, by the scores of its product with one row of weights per expert.

    Weights, logits and scores are float32, whatever the type of the computation: a choice depends on last digits.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.experts, model.hidden))
        self.top_k = model.top_k
        self.score = torch.sigmoid if model.router_score == "sigmoid" else _softmax
        self.renormalizes = model.router_renormalize
        self.scale = model.router_scale
        self.local: Callable[[Tensor], Tensor] = lambda weight: weight
        """replaceable: the part of a sharded weight that is on this rank"""

    def forward(self, tokens: Tensor) -> Routing:
        """Route each token: (T, D) -> K experts and their weights."""
        scores = self.score(F.linear(tokens.float(), self.local(self.weight).float()))
        order = scores.sort(dim=-1, descending=True, stable=True)  # equal scores: the lower expert first
        weights, experts = order.values[:, : self.top_k], order.indices[:, : self.top_k]
        if self.renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights * self.scale)


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


class Experts(nn.Module):
    """The feed-forward layers of Llama, SwiGLU, of all experts of a layer: their matrices are stacked."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        experts, hidden, width = model.experts, model.hidden, model.expert_width
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.local: Callable[[Tensor], Tensor] = lambda weight: weight
        """replaceable: the part of a sharded weight that is on this rank"""

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Transform rows sorted by expert: (N, D) -> (N, D). ends: row at which those of each expert end, (E) int32."""
        gate = grouped_linear(rows, self.local(self.gate_proj), ends)
        up = grouped_linear(rows, self.local(self.up_proj), ends)
        return grouped_linear(F.silu(gate) * up, self.local(self.down_proj), ends)


class RoutedExperts(nn.Module):
    """Adds up what the K experts of each token make of it, weighted by the router."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.router = Router(model)
        self.experts = Experts(model)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: (B, S, D) -> (B, S, D)."""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        return combine(dispatch(tokens, routing, self.experts), routing.weights).view_as(x)


def dispatch(tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Return what the experts of each token make of it: tokens (T, D) -> (T, K, D)."""
    count, top_k = routing.experts.shape
    chosen = routing.experts.flatten()
    order = chosen.argsort(stable=True)  # of the T x K pairs of a token and its expert, by expert
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = tokens_per_expert(chosen, experts.gate_proj.shape[0]).cumsum(0).int()
    rows = tokens.index_select(0, order // top_k)
    return experts(rows, ends).index_select(0, position).view(count, top_k, -1)


def tokens_per_expert(chosen: Tensor, experts: int) -> Tensor:
    """Count how often each expert was chosen: (N) -> (E) int64. Not by `bincount`, which a dry run cannot trace."""
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen))


def combine(results: Tensor, weights: Tensor) -> Tensor:
    """Add up the results of each token's experts: (T, K, D), weights (T, K) -> (T, D), summed in float32."""
    return (results * weights.unsqueeze(-1)).sum(1).to(results.dtype)


class MixtureOfExperts(nn.Module):
    """The feed-forward layer of a sparse block: routed experts, and one that every token uses if the model has it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.routed = RoutedExperts(model)
        self.shared: SwiGLU | None = None
        if model.shared_experts:
            self.shared = SwiGLU(model, model.shared_experts * model.expert_width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: (B, S, D) -> (B, S, D)."""
        routed = self.routed(x)
        return routed if self.shared is None else routed + self.shared(x)
