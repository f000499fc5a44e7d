"""Attention within documents and windows, in memory that grows with the sequence, not with its square.

The queries are cut into blocks. The keys of a block go from the start of its first token's window to its last token.
Its mask, (B, 1, block, keys), exists only while the block is computed; the backward recomputes mask and scores. So
nothing has size S x S, and keys after a block (nearly half of all pairs) or before its window are skipped. The keys of
a block do not depend on the documents, so no synchronization with the device is needed.

The forward is one operation to torch (`torch.library.custom_op`): it does not break the graph of a compiled block, and
selective recomputation saves its result as it does for any attention kernel.

Shapes: B batch, S sequence, H heads, K key-value heads, Q head width. q and out are (B, S, H, Q), k and v (B, S, K, Q).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchllm.models.fused_attention import fused_attention

QUERY_BLOCK = 512
"""queries whose mask exists at a time"""


def visible_keys(query_ids: Tensor, key_ids: Tensor, window: int = 0) -> Tensor:
    """Return the keys that each query sees, (B, S, T) bool: in its document and not later.

    query_ids (B, S) and key_ids (B, T): the document of each token; the last query is the token of the last key.
    window: only the last `window` keys, the query's own included; 0: no limit.
    """
    visible = query_ids.unsqueeze(2) == key_ids.unsqueeze(1)
    own_key = key_ids.shape[1] - query_ids.shape[1]  # position of the first query
    visible = visible.tril_(own_key)
    return visible.triu_(own_key - window + 1) if window else visible


class QueryBlock(NamedTuple):
    """A block of queries and its keys."""

    queries: slice
    keys: slice
    visible: Tensor
    """the keys that each query sees, (B, S, T) bool"""


def query_blocks(document_ids: Tensor, window: int) -> Iterator[QueryBlock]:
    """Yield the blocks of sequences with these documents, (B, S). One mask exists at a time."""
    length = document_ids.shape[1]
    for start in range(0, length, QUERY_BLOCK):
        queries = slice(start, min(start + QUERY_BLOCK, length))
        first_key = max(0, queries.start - window + 1) if window else 0
        keys = slice(first_key, queries.stop)
        visible = visible_keys(document_ids[:, queries], document_ids[:, keys], window)
        yield QueryBlock(queries, keys, visible)


def _document_attention(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, window: int = 0, scale: float | None = None
) -> Tensor:
    """Let each token attend to the tokens of its document that are not later, the last `window` of them if over 0.

    document_ids: (B, S). scale: factor of the scores; None: 1 / sqrt(Q).
    """
    out = q.new_empty(q.shape)
    for queries, keys, visible in query_blocks(document_ids, window):
        out[:, queries] = _attend(q[:, queries], k[:, keys], v[:, keys], visible, scale)
    return out


document_attention = torch.library.custom_op("torchllm::document_attention", _document_attention, mutates_args=())


@document_attention.register_fake
def _result_like(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, window: int = 0, scale: float | None = None
) -> Tensor:
    """Return an empty result, for tracing and for the dry run."""
    return q.new_empty(q.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """Return the attention of a block of queries (B, S, H, Q) over keys (B, T, K, Q); visible: (B, S, T)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = visible.unsqueeze(1)  # the same for all heads
    return fused_attention(q, k, v, mask, scale).transpose(1, 2)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and v. Gradients of k and v are summed over blocks in float32 at least."""
    q, k, v, document_ids = ctx.saved_tensors
    wide = torch.promote_types(k.dtype, torch.float32)
    dq = q.new_empty(q.shape)
    dk = k.new_zeros(k.shape, dtype=wide)
    dv = v.new_zeros(v.shape, dtype=wide)
    for queries, keys, visible in query_blocks(document_ids, ctx.window):
        q_block = q[:, queries].detach().requires_grad_()
        k_block = k[:, keys].detach().requires_grad_()
        v_block = v[:, keys].detach().requires_grad_()
        with torch.enable_grad():
            out = _attend(q_block, k_block, v_block, visible, ctx.scale)
        gradients = torch.autograd.grad(out, (q_block, k_block, v_block), d_out[:, queries])
        dq_block, dk_block, dv_block = gradients
        dq[:, queries] = dq_block
        dk[:, keys] += dk_block
        dv[:, keys] += dv_block
    return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


document_attention.register_autograd(_backward, setup_context=_save_inputs)

ATTENTION_OPERATIONS = {torch.ops.torchllm.document_attention.default}
"""operations whose results selective recomputation keeps; the file of another one adds it"""
BODIES: dict[Any, Callable[..., Any]] = {torch.ops.torchllm.document_attention.default: _document_attention}
"""functions behind operations that hold more memory while they run than their results: the dry run traces them"""
