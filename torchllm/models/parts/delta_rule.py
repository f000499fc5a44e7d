"""The gated delta rule, a recurrence in place of attention (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464).

Each value head has a state S, a matrix (Q, P) that maps keys to values. A token decays it, replaces a part of the
value stored for its key by its own value, and reads it:
  S = exp(g) S;  S = S + beta k (v - S^T k)^T;  out = S^T q
with g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), and q, k, v from a causal convolution of a few tokens, by
channel, and SiLU; q and k have length 1. At the first token of a document S is 0, and the convolution reads zeros.

The recurrence is computed in chunks of 64 tokens as matrix products (the UT transform: section 3.3 of the paper, and
arXiv 2406.06484): a chunk's outputs, and the state after it, are linear in the state before it. State and chunks are
float32. All of it is one operation to torch (`torch.library.custom_op`), and its backward another, which computes the
chunks again: only the core's inputs are kept for the backward.

Shapes: B batch, S sequence, K key heads, V value heads, a multiple of K, Q width of keys and queries, P width of
values; N chunks of C tokens, R = V / K. Value head h reads key head h // R. The convolution reaches r tokens back.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchllm.facts.parts.gated_delta import CHUNK, DeltaSizes
from torchllm.models.document_attention import ATTENTION_OPERATIONS, BODIES
from torchllm.models.layers import widened
from torchllm.runtime.torch_operations import gradients_inside_operation

NO_DOCUMENT = -1
"""id of the tokens before a sequence, which do not exist"""
EPSILON = 1e-6
"""added to the squared length of keys and queries"""


class Streams(NamedTuple):
    """The inputs of a recurrence, per token."""

    q: Tensor
    """(B, S, K, Q), or (B, r + S, K, Q) with the tokens before; k, v too"""
    k: Tensor
    v: Tensor
    """(B, S, V, P)"""
    a: Tensor
    """(B, S, V): decays the state"""
    b: Tensor
    """(B, S, V): how much of a value is replaced"""


class HeadWeights(NamedTuple):
    """Parameters of a recurrence, by head: their first dimension is cut like the heads."""

    q_conv: Tensor
    """(K Q, r + 1), the current token last; k_conv too"""
    k_conv: Tensor
    v_conv: Tensor
    """(V P, r + 1)"""
    A_log: Tensor
    """(V)"""
    dt_bias: Tensor
    """(V)"""


class DeltaCore(nn.Module):
    """Convolution and recurrence of whole sequences."""

    window = 0

    def __init__(self, sizes: DeltaSizes) -> None:
        super().__init__()
        self.reach = sizes.kernel - 1
        """r, tokens before its own that a token's convolution sees"""
        self.negative_eigenvalues = sizes.negative_eigenvalues

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Tensor | None:
        """Return document ids, with NO_DOCUMENT for the r tokens before: (B, r + S). document_ids: rising, (B, S)."""
        return None if document_ids is None else F.pad(document_ids, (self.reach, 0), value=NO_DOCUMENT)

    def forward(self, streams: Streams, weights: HeadWeights, mask: Tensor | None) -> Tensor:
        """Map the streams of B sequences -> (B, S, V, P)."""
        ids = self.documents_of(streams) if mask is None else mask
        return gated_delta(*streams, *weights, ids, self.negative_eigenvalues)

    def documents_of(self, streams: Streams) -> Tensor:
        """Return the ids of sequences of one document each, as `mask` does."""
        batch, length = streams.a.shape[:2]
        return streams.a.new_zeros(batch, self.reach + length, dtype=torch.int64)

    def chunks(self, streams: Streams, weights: HeadWeights, ids: Tensor) -> "Chunks":
        """Return the chunks of sequences with the r tokens before them. ids: (B, r + S)."""
        return chunks_of(streams, weights, ids, self.negative_eigenvalues)


def whole_sequences(streams: Streams, weights: HeadWeights, ids: Tensor, negative_eigenvalues: bool) -> Tensor:
    """Return the results (B, S, V, P) of sequences that nothing is before: zeros, and a state of 0.

    The streams are without the tokens before. ids: (B, r + S).
    """
    reach = weights.q_conv.shape[1] - 1
    q, k, v = (F.pad(x, (0, 0, 0, 0, reach, 0)) for x in streams[:3])
    chunks = chunks_of(streams._replace(q=q, k=k, v=v), weights, ids, negative_eigenvalues)
    states, _ = scan(chunks.transitions, chunks.additions, torch.zeros_like(chunks.additions[..., 0, :, :]))
    return chunks.results(states).to(streams.v.dtype)


def _gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    q_conv: Tensor,
    k_conv: Tensor,
    v_conv: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ids: Tensor,
    negative_eigenvalues: bool,
) -> Tensor:
    """Return `whole_sequences` of `Streams` and `HeadWeights`: one operation to torch, which keeps its inputs alone."""
    weights = HeadWeights(q_conv, k_conv, v_conv, A_log, dt_bias)
    return whole_sequences(Streams(q, k, v, a, b), weights, ids, negative_eigenvalues).contiguous()


def _gated_delta_gradients(
    d_out: Tensor, streams: list[Tensor], weights: list[Tensor], ids: Tensor, negative_eigenvalues: bool
) -> list[Tensor]:
    """Return the gradients of all streams and weights of `gated_delta`, whose chunks are computed again."""
    inputs = [x.detach().requires_grad_() for x in (*streams, *weights)]
    with gradients_inside_operation():
        out = whole_sequences(Streams(*inputs[:5]), HeadWeights(*inputs[5:]), ids, negative_eigenvalues)
        gradients = torch.autograd.grad(out, inputs, d_out)
    return [gradient.contiguous() for gradient in gradients]


gated_delta = torch.library.custom_op("torchllm::gated_delta", _gated_delta, mutates_args=())
gated_delta_gradients = torch.library.custom_op(
    "torchllm::gated_delta_gradients", _gated_delta_gradients, mutates_args=()
)


@gated_delta.register_fake
def _empty_result(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@gated_delta_gradients.register_fake
def _empty_gradients(d_out: Tensor, streams: list[Tensor], weights: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*streams, *weights)]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.negative_eigenvalues = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, ids = ctx.saved_tensors
    gradients = gated_delta_gradients(d_out, inputs[:5], inputs[5:], ids, ctx.negative_eigenvalues)
    return *gradients, None, None


gated_delta.register_autograd(_backward, setup_context=_keep_inputs)
ATTENTION_OPERATIONS.add(torch.ops.torchllm.gated_delta.default)
BODIES[torch.ops.torchllm.gated_delta.default] = _gated_delta
BODIES[torch.ops.torchllm.gated_delta_gradients.default] = _gated_delta_gradients


class Chunks(NamedTuple):
    """The chunks of a sequence as functions of the state: out = local + reads S, and S becomes transition S + addition.

    Dimensions of the heads: (K, R).
    """

    reads: Tensor
    """(B, K, R, N, C, Q)"""
    local: Tensor
    """(B, K, R, N, C, P): results of a state of 0 before the chunk"""
    transitions: Tensor
    """(B, K, R, N, Q, Q)"""
    additions: Tensor
    """(B, K, R, N, Q, P)"""
    length: int
    """S: the last chunk may have fewer tokens"""

    def results(self, states: Tensor) -> Tensor:
        """Return the results (B, S, V, P), given the state before each chunk, (B, K, R, N, Q, P)."""
        out = self.local + self.reads @ states
        return out.flatten(3, 4).flatten(1, 2).transpose(1, 2)[:, : self.length]


def scan(transitions: Tensor, additions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk, (..., N, Q, P), and the one after the last, given the one before the first.

    transitions: (..., N, Q, Q), additions: (..., N, Q, P), state: (..., Q, P).
    """
    states = []
    # Not indexed: the gradient of each index would be a tensor of all chunks.
    for transition, addition in zip(transitions.unbind(-3), additions.unbind(-3), strict=True):
        states.append(state)
        state = addition + transition @ state
    return torch.stack(states, dim=-3), state


def chunks_of(streams: Streams, weights: HeadWeights, ids: Tensor, negative_eigenvalues: bool) -> Chunks:
    """Return the chunks of sequences with the r tokens before them. ids: documents, (B, r + S), rising."""
    q, k = unit_length(convolved(streams.q, weights.q_conv, ids)), convolved(streams.k, weights.k_conv, ids)
    q, k, v = q * q.shape[-1] ** -0.5, unit_length(k), convolved(streams.v, weights.v_conv, ids)
    log_decay = -widened(weights.A_log).exp() * F.softplus(widened(streams.a) + widened(weights.dt_bias))
    beta = widened(streams.b).sigmoid() * (2.0 if negative_eigenvalues else 1.0)

    length, heads = streams.a.shape[1], q.shape[2]
    size = min(CHUNK, length)
    # (B, K, 1, N, C, Q) of q and k, (B, K, R, N, C, P) of v, (B, K, R, N, C, 1) of the others
    q, k, v, log_decay, beta = (
        _in_chunks(x, heads, size) for x in (q, k, v, log_decay.unsqueeze(-1), beta.unsqueeze(-1))
    )
    documents = _documents(ids[:, -length - 1 :], size)

    # Summed from each token on: differences of the sums since the chunk's begin would lose the digits of small ones.
    log_between = log_decay.expand(*log_decay.shape[:-1], size).tril(-1).cumsum(-2)
    between = log_between.exp() * documents.visible  # (B, K, R, N, C, C)
    since_state = log_decay.cumsum(-2).exp() * documents.as_before
    until_end = between[..., -1:, :].mT

    overlaps = (k @ k.mT) * between * beta  # only the part below the diagonal is read
    # Tokens write to their keys: the second part (values), minus the first times the state before the chunk.
    new = torch.cat((k * since_state, v), dim=-1)
    new = torch.linalg.solve_triangular(overlaps, beta * new, upper=False, unitriangular=True)
    attention = (q @ k.mT) * between
    read, local = (attention @ new).split((q.shape[-1], v.shape[-1]), dim=-1)
    written = (k * until_end).mT @ new
    lost, additions = written.split((q.shape[-1], v.shape[-1]), dim=-1)
    kept = since_state[..., -1:, :] * torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return Chunks(q * since_state - read, local, kept - lost, additions, length)


def unit_length(x: Tensor) -> Tensor:
    """Return x / |x| over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def convolved(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Return SiLU of a causal convolution by channel, within documents: (B, r + S, H, Q) -> (B, S, H, Q), widened.

    weight: (H Q, r + 1), the current token last. ids: (B, r + S).
    """
    reach = weight.shape[1] - 1
    length = x.shape[1] - reach
    taps = widened(weight).unflatten(0, x.shape[2:]).unbind(-1)  # (H, Q) each
    x = widened(x)
    out = x[:, reach:] * taps[reach]
    for tap in range(reach):
        earlier = slice(tap, tap + length)
        is_same = (ids[:, earlier] == ids[:, reach:])[..., None, None]
        out = out + x[:, earlier] * is_same * taps[tap]
    return F.silu(out)


class _Documents(NamedTuple):
    """Which tokens of each chunk are of one document."""

    visible: Tensor
    """whether the second token is not later, and of the first one's document: (B, 1, 1, N, C, C)"""
    as_before: Tensor
    """whether a token is of the document that the last token before the chunk has: (B, 1, 1, N, C, 1)"""


def _documents(ids: Tensor, size: int) -> _Documents:
    """Return the documents of chunks of `size` tokens. ids: (B, 1 + S), beginning with the token before."""
    no_token = ids[:, -1:].expand(-1, -(ids.shape[1] - 1) % size)  # they are of the last token's document
    of_chunks = torch.cat((ids[:, 1:], no_token), dim=1).unflatten(1, (-1, size))[
        :, None, None, :, :, None
    ]  # (B, 1, 1, N, C, 1)
    before = torch.cat((ids[:, None, None, :1, None], of_chunks[:, :, :, :-1, -1]), dim=3).unsqueeze(-2)
    return _Documents(visible=(of_chunks == of_chunks.mT).tril(), as_before=of_chunks == before)


def _in_chunks(x: Tensor, heads: int, size: int) -> Tensor:
    """Cut a sequence into chunks, zeros behind it: (B, S, K R, Q) -> (B, K, R, N, C, Q)."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.unflatten(2, (heads, -1)).unflatten(1, (-1, size)).permute(0, 3, 4, 1, 2, 5)
