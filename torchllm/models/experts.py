"""Mixture of experts: a router chooses, for every token, a few of many feed-forward layers (Shazeer et al. 2017,
arXiv 1701.06538).

Every token reaches all of its experts, however many others chose them ("dropless"): no token is dropped, and none
waits for a capacity. The order of all sums is fixed, so that a layer's result does not depend on how its tokens are
shared by ranks: experts of a token are sorted by score, equal ones by index, and a token's results are added in
that order.

Shapes: B batch, S sequence, D hidden, T tokens (B x S), E experts, K experts per token, F width of an expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.models.grouped_products import grouped_linear
from torchllm.models.layers import SwiGLU, gated, widened
from torchllm.models.router_penalties import (
    BALANCE_LOSS,
    ROUTER_Z_LOSS,
    RoutedTokens,
    RouterPenalty,
    balance_loss,
    penalty_names,
    router_z_loss,
    sigmoid_slopes,
    softmax_slopes,
)
from torchllm.models.routing_record import RecordRouting, tokens_per_expert


class Routing(NamedTuple):
    """Which experts the tokens use, best first."""

    experts: Tensor
    """(T, K) int64"""
    weights: Tensor
    """what the result of each is multiplied by, (T, K) float32"""


class Router(nn.Module):
    """Chooses K experts for every token, by the scores of its product with one row of weights per expert.

    Scores are float32, and unless model.router_dtype says otherwise weights and logits are, whatever the type of the
    computation: a choice depends on last digits.

    FOOTGUN: what penalties need of a step, it does not know: `optim.expert_balance` sets it.
    """

    bias: Tensor | None
    """(E) float32, added to the scores where experts are chosen, not where they weigh (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2). A buffer: no optimizer changes it, but `optim.expert_balance`. None: there is none"""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.experts, model.hidden))
        self.register_buffer("bias", torch.zeros(model.experts) if model.router_bias else None)
        self.product = PRODUCTS[model.router_dtype]
        self.top_k = model.top_k
        self.score, self.slopes = SCORES[model.router_score]
        self.renormalizes = model.router_renormalize
        self.scale = model.router_scale
        penalties: dict[str, RouterPenalty] = {
            BALANCE_LOSS: partial(balance_loss, weight=model.balance_weight, shares=self._shares(model.balance_loss)),
            ROUTER_Z_LOSS: partial(router_z_loss, weight=model.router_z_loss),
        }
        self.penalties = [penalties[name] for name in penalty_names(model)]
        self.tokens_per_step = 0
        """tokens that all ranks route in a step"""
        self.last_shares: Tensor | None = None
        """each expert's share of the choices of the whole step before, (E) float32; what model.balance_loss = "global"
        needs"""
        self.local: Callable[[Tensor], Tensor] = lambda weight: weight
        """replaceable: the part of a sharded weight that is on this rank"""
        self.repeats = 1
        """ranks that route the same tokens, so that each adds the same to the sums over all ranks"""
        self.sequence_sums: list[Callable[[Tensor], Tensor]] = []
        """each adds up a tensor over ranks that have other tokens of the same sequences"""
        self.sums: Tensor | None = None
        """of all backward passes since the last `take_sums`, which returns them"""

    def forward(self, x: Tensor) -> Routing:
        """Route each token: (B, S, D) -> K experts and their weights, (B S, K)."""
        logits = widened(self.product(x, self.local(self.weight)))
        scores = self.score(logits)
        order = self.preferences(scores.detach()).sort(dim=-1, descending=True, stable=True)
        experts = order.indices[..., : self.top_k]  # of equal scores the lower expert is first
        weights = RecordRouting.apply(scores.gather(-1, experts), logits, experts, self)
        if self.renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts.flatten(0, -2), (weights * self.scale).flatten(0, -2))

    def preferences(self, scores: Tensor) -> Tensor:
        """Return by what experts are chosen: scores (..., E) -> (..., E)."""
        return scores if self.bias is None else scores + self.local(self.bias)

    def record(self, logits: Tensor, experts: Tensor) -> Tensor | None:
        """See `RecordingRouter`."""
        scores = self.score(logits)
        probabilities = scores / scores.sum(-1, keepdim=True)
        counts = tokens_per_expert(experts.flatten(1), logits.shape[-1])
        routed = RoutedTokens(logits, probabilities, self.slopes(logits), counts)
        entropy = torch.special.entr(probabilities).sum()
        values, gradient = [], None
        for penalty in self.penalties:
            assert self.tokens_per_step, "build optim.expert_balance.ExpertBalance before the first step"
            value, part = penalty(routed)
            part = part / (self.tokens_per_step * self.repeats)
            gradient = part if gradient is None else gradient + part
            values.append(value / self.tokens_per_step)
        sums = torch.cat((counts.sum(0).double(), torch.stack((entropy, *values)).double()))
        self.sums = sums if self.sums is None else self.sums + sums
        return gradient

    def take_sums(self) -> Tensor | None:
        """Return the sums of all backward passes since the last call, float64 (E + 1 + penalties); None: of none.

        They are the tokens of each expert, the entropy of the tokens' normalized scores, in nats, and the penalties.
        """
        sums, self.sums = self.sums, None
        return sums

    def _shares(self, kind: str) -> Callable[[Tensor], Tensor]:
        """Return what gives a balance loss the shares of the choices. kind: model.balance_loss."""
        return self._shares_of_last_step if kind == "global" else self._shares_of_sequences

    def _shares_of_sequences(self, counts: Tensor) -> Tensor:
        """Return the share of each expert of the choices of each sequence: counts (B, E) -> (B, E).

        DeepSeek-V3, arXiv 2412.19437, equation 18.
        """
        for add_up in self.sequence_sums:
            counts = add_up(counts)
        return counts / counts.sum(-1, keepdim=True)

    def _shares_of_last_step(self, counts: Tensor) -> Tensor:
        """Return the share of each expert of the choices of the whole step before, on all ranks: (E).

        Qiu et al. 2025 (arXiv 2501.11873, section 3) take those of this step's micro batches so far, which depend on
        the layout; those of the step before do not.
        """
        assert self.last_shares is not None
        return self.last_shares


def _float32_product(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # in which recipes/minimal.py runs: it would round both
        return F.linear(widened(x), widened(weight))


def _product_in_type_of_input(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float32": _float32_product,
    "compute": _product_in_type_of_input,
}
"""of hidden states (..., D) and weights (E, D), by model.router_dtype"""


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


class Score(NamedTuple):
    """How logits become scores."""

    function: Callable[[Tensor], Tensor]
    """(..., E) -> (..., E)"""
    slopes: Callable[[Tensor], Tensor | float]
    """d log score / d logit, with the sum of the scores, by which they are divided, held fixed"""


SCORES = {"softmax": Score(_softmax, softmax_slopes), "sigmoid": Score(torch.sigmoid, sigmoid_slopes)}
"""by model.router_score"""


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
        self.gated: Callable[[Tensor, Tensor], Tensor] = gated
        """replaceable: `parallel/compile.py`"""

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Transform rows sorted by expert: (N, D) -> (N, D). ends: row at which those of each expert end, (E) int32."""
        gate = grouped_linear(rows, self.local(self.gate_proj), ends)
        up = grouped_linear(rows, self.local(self.up_proj), ends)
        return grouped_linear(self.gated(gate, up), self.local(self.down_proj), ends)


class SortedRows(NamedTuple):
    """A row per pair of a token and its expert."""

    rows: Tensor
    """(T x K, D), sorted by expert, and then by token"""
    counts: Tensor
    """rows of each expert, (E) int64"""
    positions: Tensor
    """which row is that of the k-th expert of a token, (T, K)"""


def sort_by_expert(tokens: Tensor, routing: Routing, experts: int) -> SortedRows:
    """Repeat each of the tokens (T, D) for its experts, and sort the rows by expert."""
    chosen = routing.experts.flatten()
    order = chosen.argsort(stable=True)
    positions = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = tokens.index_select(0, order // routing.experts.shape[1])
    return SortedRows(rows, tokens_per_expert(chosen, experts), positions.view_as(routing.experts))


def put_back(rows: Tensor, order: SortedRows) -> Tensor:
    """Undo the order of `sort_by_expert`: (T x K, D) -> (T, K, D)."""
    return rows.index_select(0, order.positions.flatten()).unflatten(0, order.positions.shape)


class ExpertRows(NamedTuple):
    """What the experts of this rank compute with."""

    rows: Tensor
    """(N, D), sorted by expert"""
    ends: Tensor
    """(E) int32, of the experts on this rank: row at which those of each end"""


class Dispatch(Protocol):
    """Brings tokens to their experts, and the results back. What `send` and `send_back` return may be under way."""

    def send(self, tokens: Tensor, routing: Routing) -> Any:
        """Send each of the tokens (T, D) to its experts."""

    def receive(self, sent: Any) -> ExpertRows:
        """Wait for what `send` of all ranks sent to this one."""

    def send_back(self, results: Tensor, sent: Any) -> Any:
        """Send what the experts made of their rows, (N, D), to where the tokens are. sent: what `send` returned."""

    def receive_back(self, returned: Any, sent: Any) -> Tensor:
        """Wait for the results, (T, K, D): those of a token in the order of its experts."""


class LocalDispatch:
    """All experts are on this rank: rows are sorted by expert, and then put back. Nothing is sent."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def send(self, tokens: Tensor, routing: Routing) -> SortedRows:
        """Sort the rows by expert."""
        return sort_by_expert(tokens, routing, self.experts)

    def receive(self, sent: SortedRows) -> ExpertRows:
        """Return the sorted rows."""
        return ExpertRows(sent.rows, sent.counts.cumsum(0).int())

    def send_back(self, results: Tensor, sent: SortedRows) -> Tensor:
        """Return the results as they are."""
        return results

    def receive_back(self, returned: Tensor, sent: SortedRows) -> Tensor:
        """Put the results back in the order of the tokens."""
        return put_back(returned, sent)


def combine(results: Tensor, weights: Tensor) -> Tensor:
    """Add up the results of each token's experts: (T, K, D), weights (T, K) -> (T, D), summed in float32."""
    return (results * weights.unsqueeze(-1)).sum(1).to(results.dtype)


class SentTokens(NamedTuple):
    """A forward pass of routed experts whose tokens are on their way."""

    weights: Tensor
    """of the router, (T, K) float32"""
    rows: Any
    """what `Dispatch.send` returned"""
    shape: torch.Size
    """of the hidden states on this rank, (B, S, D)"""


class Returning(NamedTuple):
    """A forward pass of routed experts whose results are on their way back."""

    sent: SentTokens
    results: Any
    """what `Dispatch.send_back` returned"""


class RoutedExperts(nn.Module):
    """Adds up what the K experts of each token make of it, weighted by the router."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.router = Router(model)
        self.experts = Experts(model)
        self.dispatch: Dispatch = LocalDispatch(model.experts)
        """replaceable: `parallel/expert.py`"""
        self.own_tokens: Callable[[Tensor], Tensor] = lambda x: x
        """replaceable: the hidden states of the tokens that this rank routes"""
        self.hidden_states: Callable[[Tensor], Tensor] = lambda out: out
        """replaceable: the results for these tokens, as hidden states"""
        self.combine: Callable[[Tensor, Tensor], Tensor] = combine
        """replaceable: `parallel/compile.py`"""

    def send(self, x: Tensor) -> SentTokens:
        """Route the tokens of x (B, S, D), and send them to their experts."""
        x = self.own_tokens(x)
        tokens = x.flatten(0, 1)
        routing = self.router(x)
        return SentTokens(routing.weights, self.dispatch.send(tokens, routing), x.shape)

    def compute(self, sent: SentTokens) -> Returning:
        """Let the experts here compute with the rows that arrive, and send their results back."""
        arrived = self.dispatch.receive(sent.rows)
        results = self.experts(arrived.rows, arrived.ends)
        return Returning(sent, self.dispatch.send_back(results, sent.rows))

    def finish(self, returning: Returning) -> Tensor:
        """Return the weighted sums, (B, S, D)."""
        sent = returning.sent
        results = self.dispatch.receive_back(returning.results, sent.rows)
        return self.hidden_states(self.combine(results, sent.weights).view(sent.shape))


class Begun(NamedTuple):
    """A forward pass of shared experts that has computed one of its three products."""

    x: Tensor
    """hidden states of all tokens, (B, S, D)"""
    gate: Tensor
    """(B, S, F)"""


class SharedExperts(SwiGLU):
    """The experts that every token uses, as one layer. It computes in two parts, each while rows are on their way."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, model.shared_experts * model.expert_width)
        self.all_tokens: Callable[[Tensor], Tensor] = lambda x: x
        """replaceable: the hidden states of all tokens, of which this rank may have a part"""

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token, both parts at once: (B, S, D) -> (B, S, D)."""
        return self.end(self.begin(x))

    def begin(self, x: Tensor) -> Begun:
        """Compute the first product of x (B, S, D)."""
        x = self.all_tokens(x)
        return Begun(x, self.gate_proj(x))

    def end(self, begun: Begun) -> Tensor:
        """Compute the others, and return what all tokens become: (B, S, D)."""
        return self.down_proj(self.gated(begun.gate, self.up_proj(begun.x)))


class MixtureOfExperts(nn.Module):
    """The feed-forward layer of a sparse block: routed experts, and shared ones if the model has them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.routed = RoutedExperts(model)
        self.shared = SharedExperts(model) if model.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: (B, S, D) -> (B, S, D)."""
        sent = self.routed.send(x)
        if self.shared is None:
            return self.routed.finish(self.routed.compute(sent))
        begun = self.shared.begin(x)  # while tokens are on their way
        returning = self.routed.compute(sent)
        shared = self.shared.end(begun)  # while results are on their way back
        return self.routed.finish(returning) + shared
