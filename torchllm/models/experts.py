"""Mixture of experts: a router chooses, for every token, a few of many feed-forward layers (Shazeer et al. 2017,
arXiv 1701.06538).

Routing is dropless: every token reaches all of its experts, and experts have no capacity. The order of all sums is
fixed, so that a layer's result does not depend on the layout: the experts of a token are sorted by score, equal ones by
index, and a token's results are added in that order.

Shapes: B batch, S sequence, D hidden, T tokens (B x S), E experts, K experts per token, F width of an expert.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.facts.parts.part import found
from torchllm.models.grouped_products import add_bias, grouped_linear
from torchllm.models.layers import GATED, SwiGLU, widened
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

LEAST_SUM = 1e-20
"""added to the sum that divides a token's scores, as in DeepSeek-V3's code: all of them may be 0 in float32"""


class Routing(NamedTuple):
    """Which experts the tokens use, best first."""

    experts: Tensor
    """(T, K) int64"""
    weights: Tensor
    """weight of each expert's result, (T, K) float32"""


class Router(nn.Module):
    """Chooses K experts for every token, by the scores of its product with one row of weights per expert.

    Scores are float32, and so are weights and logits by default (model.router_dtype), whatever the dtype of the
    computation: last digits can decide a choice.

    FOOTGUN: penalties need the step's totals, which `optim.expert_balance` must set before the step.
    """

    bias: Tensor | None
    """(E) float32, added to the scores to choose experts, not to weight them (DeepSeek-V3, arXiv 2412.19437, section
    2.1.2). A buffer, updated by `optim.expert_balance` instead of an optimizer. None: no bias"""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.experts, model.hidden))
        self.logit_bias = nn.Parameter(torch.empty(model.experts)) if model.expert_biases else None
        self.register_buffer("bias", torch.zeros(model.experts) if model.router_bias else None)
        self.product = PRODUCTS[model.router_dtype]
        self.top_k = model.top_k
        self.candidates: Callable[[Tensor], Tensor] = _all_experts
        """replaceable: returns the scores that choose, with -inf for the experts that a token cannot choose"""
        self.groups, self.top_groups = model.router_groups, model.router_top_groups
        if self.groups > 1:
            self.candidates = partial(of_best_groups, groups=self.groups, best=self.top_groups)
        self.score, self.slopes = SCORES[model.router_score]
        self.renormalizes = model.router_renormalize
        self.scale = model.router_scale
        self.balance_loss = model.balance_loss
        penalties: dict[str, RouterPenalty] = {
            BALANCE_LOSS: partial(balance_loss, weight=model.balance_weight),
            ROUTER_Z_LOSS: partial(router_z_loss, weight=model.router_z_loss),
        }
        self.penalties = [penalties[name] for name in penalty_names(model)]
        self.tokens_per_step = 0
        """tokens that all ranks route in a step"""
        self.last_shares: Tensor | None = None
        """each expert's share of the choices in the whole previous step, (E) float32, for model.balance_loss =
        "global" """
        self.local: Callable[[Tensor], Tensor] = lambda weight: weight
        """replaceable: the part of a sharded weight that is on this rank"""
        self.repeats = 1
        """number of ranks that route the same tokens, so that sums over all ranks count them this often"""
        self.sequence_sums: list[Callable[[Tensor], Tensor]] = []
        """functions that sum a tensor over ranks with other tokens of the same sequences"""
        self.sums: Tensor | None = None
        """sums of all backward passes since the last `take_sums`"""

    def forward(self, x: Tensor) -> Routing:
        """Route each token: (B, S, D) -> K experts and their weights, (B S, K)."""
        experts, weights, logits = self.choose(x, *self.own_parameters())
        weights = RecordRouting.apply(weights, logits, experts, self)
        return Routing(experts.flatten(0, -2), weights.flatten(0, -2))

    def own_parameters(self) -> tuple[Any, ...]:
        """Return the inputs of `choose` after the tokens: weights (E, D), and the bias of the logits (E), or None."""
        return self.local(self.weight), None if self.logit_bias is None else self.local(self.logit_bias)

    def choose(self, x: Tensor, weight: Tensor, logit_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return experts and weights of each token of x (B, S, D), (B, S, K), and the logits, (B, S, E)."""
        logits = widened(self.product(x, weight, logit_bias))
        scores = self.score(logits)
        experts = top_experts(self.candidates(self.preferences(scores.detach())), self.top_k)
        weights = scores.gather(-1, experts)
        if self.renormalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        # Without penalties no gradient comes for the logits, and a compiled backward would add zeros.
        return experts, weights * self.scale, logits if self.penalties else logits.detach()

    def preferences(self, scores: Tensor) -> Tensor:
        """Return the scores that choose experts, with the bias: (..., E) -> (..., E)."""
        return scores if self.bias is None else scores + self.local(self.bias)

    def record(self, logits: Tensor, experts: Tensor) -> Tensor | None:
        """See `RecordingRouter`."""
        counts = tokens_per_expert(experts.flatten(1), logits.shape[-1])
        sums, gradient = self.summarize(logits, counts, self._shares(counts))
        self.sums = sums if self.sums is None else self.sums + sums
        return gradient

    def summarize(self, logits: Tensor, counts: Tensor, shares: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the sums of a micro batch, see `take_sums`, and the gradient of the penalties: (B, S, E), or None.

        logits: (B, S, E). counts: tokens per sequence and expert, (B, E). shares: of the balance loss.
        """
        scores = self.score(logits)
        probabilities = scores / scores.sum(-1, keepdim=True)
        routed = RoutedTokens(logits, probabilities, self.slopes(logits), shares)
        entropy = torch.special.entr(probabilities).sum()
        values, gradient = [], None
        for penalty in self.penalties:
            assert self.tokens_per_step, "build optim.expert_balance.ExpertBalance before the first step"
            value, part = penalty(routed)
            part = part / (self.tokens_per_step * self.repeats)
            gradient = part if gradient is None else gradient + part
            values.append(value / self.tokens_per_step)
        return torch.cat((counts.sum(0).double(), torch.stack((entropy, *values)).double())), gradient

    def take_sums(self) -> Tensor | None:
        """Return the sums of all backward passes since the last call, float64 (E + 1 + penalties); None without any.

        They are the tokens of each expert, the entropy of the tokens' normalized scores, in nats, and the penalties.
        """
        sums, self.sums = self.sums, None
        return sums

    def _shares(self, counts: Tensor) -> Tensor | None:
        """Return each expert's share of the choices for the balance loss, None without one. counts: (B, E).

        "sequence": in each sequence, (B, E) (DeepSeek-V3, arXiv 2412.19437, equation 18). "global": in the whole
        previous step, on all ranks, (E). Qiu et al. 2025 (arXiv 2501.11873, section 3) use the micro batches of this
        step so far, which depend on the layout; the previous step does not.
        """
        if self.balance_loss != "sequence":
            return self.last_shares
        for add_up in self.sequence_sums:
            counts = add_up(counts)
        return counts / counts.sum(-1, keepdim=True)


def top_experts(scores: Tensor, count: int) -> Tensor:
    """Return the experts of each token's largest scores, in order, of equal ones the lower first: (..., E) -> (..., K).

    `topk` leaves the order of equal ones open. So float32 scores become integers of the same order above their index.
    """
    if scores.dtype != torch.float32:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a negative float's magnitude counts down
    return ((ordered.long() << 32) - torch.arange(scores.shape[-1], device=scores.device)).topk(count, dim=-1).indices


def _all_experts(scores: Tensor) -> Tensor:
    return scores


def group_scores(scores: Tensor, groups: int) -> Tensor:
    """Return the scores of groups of neighboring experts, the sum of their best two: (..., E) -> (..., groups)."""
    return scores.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1)


def of_best_groups(scores: Tensor, groups: int, best: int) -> Tensor:
    """Return scores (..., E) with -inf for the experts outside of a token's `best` groups.

    DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) has a group of experts per node, to limit the nodes of a token.
    """
    chosen = top_experts(group_scores(scores, groups), best)
    outside = torch.ones_like(scores[..., :groups], dtype=torch.bool).scatter(-1, chosen, False)
    return scores.unflatten(-1, (groups, -1)).masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


def _float32_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # recipes/minimal.py runs in it: it would round both
        return F.linear(widened(x), widened(weight), None if bias is None else widened(bias))


def _product_in_type_of_input(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "float32": _float32_product,
    "compute": _product_in_type_of_input,
}
"""function of hidden states (..., D), weights (E, D) and biases (E) or None, by model.router_dtype"""


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


class Score(NamedTuple):
    """How logits become scores."""

    function: Callable[[Tensor], Tensor]
    """(..., E) -> (..., E)"""
    slopes: Callable[[Tensor], Tensor | float]
    """d log score / d logit; the sum of the scores, which divides them, is held fixed"""


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
        has_biases = model.expert_biases
        self.gate_bias = nn.Parameter(torch.empty(experts, width)) if has_biases else None
        self.up_bias = nn.Parameter(torch.empty(experts, width)) if has_biases else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden)) if has_biases else None
        self.local: Callable[[Tensor], Tensor] = lambda weight: weight
        """replaceable: the part of a sharded weight that is on this rank"""
        self.gated: Callable[[Tensor, Tensor], Tensor] = found(GATED[model.activation])
        """replaceable: `parallel/compile.py`"""

    def forward(self, sent: Sequence[Any], dispatch: "Dispatch") -> list[Any]:
        """Transform the rows of all chunks, and send them back. sent: results of `send`; returns those of `send_back`.

        One call for all chunks: FSDP gathers the weights once, and reduces the sum of their gradients once.
        """
        returned = []
        for chunk in sent:
            arrived = dispatch.receive(chunk)
            returned.append(dispatch.send_back(self.transform(arrived.rows, arrived.ends), chunk))
        return returned

    def transform(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Transform rows sorted by expert: (N, D) -> (N, D). ends: end of each expert's rows, (E) int32."""
        gate = self._product(rows, self.gate_proj, self.gate_bias, ends)
        up = self._product(rows, self.up_proj, self.up_bias, ends)
        return self._product(self.gated(gate, up), self.down_proj, self.down_bias, ends)

    def _product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        out = grouped_linear(rows, self.local(weight), ends)
        return out if bias is None else add_bias(out, self.local(bias), ends)


class SortedRows(NamedTuple):
    """One row per pair of token and expert."""

    rows: Tensor
    """(T x K, D), sorted by expert, and then by token"""
    counts: Tensor
    """rows of each expert, (E) int64"""
    positions: Tensor
    """row of the k-th expert of each token, (T, K)"""


def sort_by_expert(tokens: Tensor, routing: Routing, experts: int) -> SortedRows:
    """Repeat each of the tokens (T, D) for its experts, and sort the rows by expert."""
    chosen = routing.experts.flatten()
    order = chosen.to(torch.int16).argsort(stable=True)  # a GPU sorts them in a quarter of the passes
    positions = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = tokens.index_select(0, order // routing.experts.shape[1])
    return SortedRows(rows, tokens_per_expert(chosen, experts), positions.view_as(routing.experts))


def put_back(rows: Tensor, order: SortedRows) -> Tensor:
    """Undo the order of `sort_by_expert`: (T x K, D) -> (T, K, D)."""
    return rows.index_select(0, order.positions.flatten()).unflatten(0, order.positions.shape)


class ExpertRows(NamedTuple):
    """Input of the experts of this rank."""

    rows: Tensor
    """(N, D), sorted by expert"""
    ends: Tensor
    """end of the rows of each expert on this rank, (E) int32"""


class Dispatch(Protocol):
    """Sends tokens to their experts, and the results back. `send` and `send_back` may be asynchronous."""

    def send(self, tokens: Tensor, routing: Routing) -> Any:
        """Send each of the tokens (T, D) to its experts."""

    def receive(self, sent: Any) -> ExpertRows:
        """Wait for the rows that all ranks sent to this one."""

    def send_back(self, results: Tensor, sent: Any) -> Any:
        """Send the experts' results, (N, D), back to the ranks of the tokens. sent: the result of `send`."""

    def receive_back(self, returned: Any, sent: Any) -> Tensor:
        """Wait for the results, (T, K, D), in the order of each token's experts."""


class LocalDispatch:
    """All experts are on this rank: rows are sorted by expert, and then put back. No communication."""

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


class SentChunk(NamedTuple):
    """Some tokens that are being sent."""

    weights: Tensor
    """weights from the router, (T, K) float32"""
    rows: Any
    """result of `Dispatch.send`"""


class SentTokens(NamedTuple):
    """A forward pass of routed experts while its tokens are being sent."""

    chunks: list[SentChunk]
    """all tokens, in their order"""
    shape: torch.Size
    """shape of the hidden states on this rank, (B, S, D)"""


class Returning(NamedTuple):
    """A forward pass of routed experts while its results are being sent back."""

    sent: SentTokens
    results: list[Any]
    """result of `Dispatch.send_back` of each chunk"""


class RoutedExperts(nn.Module):
    """Sums the results of each token's K experts, weighted by the router."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.router = Router(model)
        self.experts = Experts(model)
        self.dispatch: Dispatch = LocalDispatch(model.experts)
        """replaceable: `parallel/expert.py`"""
        self.chunks = 1
        """number of chunks of tokens; each is sent and computed by itself, so that one is sent while others compute"""
        self.own_tokens: Callable[[Tensor], Tensor] = lambda x: x
        """replaceable: the hidden states of the tokens that this rank routes"""
        self.hidden_states: Callable[[Tensor], Tensor] = lambda out: out
        """replaceable: the results for these tokens, as hidden states"""
        self.combine: Callable[[Tensor, Tensor], Tensor] = combine
        """replaceable: `parallel/compile.py`"""

    def send(self, x: Tensor) -> SentTokens:
        """Route the tokens of x (B, S, D), and send them to their experts."""
        x = self.own_tokens(x)
        return self.send_routed(x, self.router(x))

    def send_routed(self, x: Tensor, routing: Routing) -> SentTokens:
        """Send the tokens of x (B, S, D) to the experts that the router chose."""
        chunks = in_chunks(x.flatten(0, 1), routing, self.chunks)
        sent = [SentChunk(chosen.weights, self.dispatch.send(tokens, chosen)) for tokens, chosen in chunks]
        return SentTokens(sent, x.shape)

    def compute(self, sent: SentTokens) -> Returning:
        """Run this rank's experts on the received rows, and send their results back."""
        return Returning(sent, self.experts([chunk.rows for chunk in sent.chunks], self.dispatch))

    def finish(self, returning: Returning) -> Tensor:
        """Return the weighted sums, (B, S, D)."""
        sums = []
        for chunk, returned in zip(returning.sent.chunks, returning.results, strict=True):
            sums.append(self.combine(self.dispatch.receive_back(returned, chunk.rows), chunk.weights))
        whole = sums[0] if len(sums) == 1 else torch.cat(sums)
        return self.hidden_states(whole.view(returning.sent.shape))


def in_chunks(tokens: Tensor, routing: Routing, count: int) -> list[tuple[Tensor, Routing]]:
    """Cut tokens (T, D) and their routing into `count` chunks, whose numbers of tokens differ by one at most."""
    if count == 1:
        return [(tokens, routing)]
    short, longer = divmod(len(tokens), count)
    sizes = [short + (chunk < longer) for chunk in range(count)]
    experts, weights = routing.experts.split(sizes), routing.weights.split(sizes)
    return list(zip(tokens.split(sizes), map(Routing, experts, weights), strict=True))


class Begun(NamedTuple):
    """A forward pass of shared experts that has computed one of its three products."""

    x: Tensor
    """hidden states of all tokens, (B, S, D)"""
    gate: Tensor
    """(B, S, F)"""


class SharedExperts(SwiGLU):
    """The experts that every token uses, as one layer. It computes in two parts, each overlapped with communication."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, model.shared_experts * model.expert_width)
        self.result_gate = ResultGate(model) if model.shared_gate else None
        self.all_tokens: Callable[[Tensor], Tensor] = lambda x: x
        """replaceable: the hidden states of all tokens, if this rank has a part of them"""
        self.for_own_features: Callable[[Tensor], Tensor] = lambda x: x
        """replaceable: the same as a plain tensor, whose gradient is of this rank's features alone"""

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token, both parts at once: (B, S, D) -> (B, S, D)."""
        return self.end(self.begin(self.all_tokens(x)))

    def begin(self, x: Tensor) -> Begun:
        """Compute the first product of x (B, S, D), of `all_tokens`."""
        return Begun(x, self.gate_proj(x))

    def end(self, begun: Begun) -> Tensor:
        """Compute the other two products, and return the output: (B, S, D).

        A gate multiplies the input of the last one, which has the same result, and tp sums its gradient like any.
        """
        inner = self.gated(begun.gate, self.up_proj(begun.x))
        if self.result_gate is not None:
            inner = inner * self.result_gate(self.for_own_features(begun.x))
        return self.down_proj(inner)


class ResultGate(nn.Module):
    """A factor from 0 to 1 for each token's result of the shared experts."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, model.hidden))
        self.local: Callable[[Tensor], Tensor] = lambda weight: weight
        """replaceable: the part of a sharded weight that is on this rank"""

    def forward(self, x: Tensor) -> Tensor:
        """Return the gates of tokens: (B, S, D) -> (B, S, 1)."""
        return F.linear(x, self.local(self.weight)).sigmoid()


class MixtureOfExperts(nn.Module):
    """The feed-forward layer of a sparse block: routed experts, and shared ones if the model has them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.routed = RoutedExperts(model)
        self.shared = SharedExperts(model) if model.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: (B, S, D) -> (B, S, D)."""
        if self.shared is None:
            return self.routed.finish(self.routed.compute(self.routed.send(x)))
        tokens = self.shared.all_tokens(x)  # before they are sent: ep may have the ranks of tp, and their queue
        sent = self.routed.send(x)
        begun = self.shared.begin(tokens)  # overlaps with sending the tokens
        returning = self.routed.compute(sent)
        shared = self.shared.end(begun)  # overlaps with sending the results back
        return self.routed.finish(returning) + shared
