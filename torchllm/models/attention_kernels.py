"""Attention of some queries over some keys, with the log-sum-exp that lets the results over several blocks be merged.

Nothing is sharded or sent here; `parallel/ring.py` does both. A kernel has two methods:

    forward   (q, kv, mask)                     -> out, lse
    backward  (d_out, q, kv, attention, mask)   -> dq, dk, dv

Shapes: B batch, H heads, K key-value heads, S queries, T keys, Q head width. q, out, d_out and dq are (B, H, S, Q); kv
is (2, B, K, T, Q), keys and values; dk and dv are (B, K, T, Q); lse is (B, H, S). Key-value heads are not expanded:
query head h reads head h // (H / K). lse is the natural logarithm of the sum of exp(scores), in float32 at least; out
and the gradients are in q's type or a wider one. Scores are multiplied by the kernel's `scale`. `backward` takes the
out and lse of *all* blocks of a row and returns this block's part of the gradients; the formulas are
FlashAttention-2's (Dao 2023, section 3.1).

With documents a block has `Entries`: on a GPU in 16 bit flash attention takes all of them in one call, and nothing is
read back; else a kernel is called for each, and no pair of tokens of different documents is computed either. A query
without keys has out 0 and lse -inf, so that merging gives it no weight.

CudaKernels was written without a GPU. `kernel_check.py` compares it with the eager kernel before it is used, so it may
fail but cannot be silently wrong.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torchllm.config import Model
from torchllm.models.layers import soft_capped, widened
from torchllm.runtime.torch_compat import FakeTensor
from torchllm.runtime.torch_operations import VARLEN_FLASH, VARLEN_GRADIENTS

WIDTH_UNIT = 8
"""the CUDA kernels take head widths that are multiples of this: 16 bytes of a 16-bit type"""


class Entries(NamedTuple):
    """Ranges of queries and ranges of keys, in pairs: a query sees the keys of its entry.

    Tokens are counted over the sequences, one after the other; no entry has tokens of two sequences. Every query and
    every key is in one entry, which may have no queries or no keys.
    """

    queries: Tensor
    """start of each entry's queries, and the end of the last: (N + 1,) int32"""
    keys: Tensor
    """start of each entry's keys, and the end of the last: (N + 1,) int32"""

    def ranges(self, queries: int, keys: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield sequence, queries and keys of each entry that has both; of fake tensors, which tell nothing, all.

        queries, keys: tokens per sequence. Waits for the device.
        """
        if isinstance(self.queries, FakeTensor):
            yield slice(None), slice(None), slice(None)
            return
        starts = zip(self.queries.tolist(), self.keys.tolist(), strict=True)
        for (first_query, first_key), (query_end, key_end) in pairwise(starts):
            if first_query < query_end and first_key < key_end:
                row = first_query // queries
                before = row * queries, row * keys
                yield (
                    slice(row, row + 1),
                    slice(first_query - before[0], query_end - before[0]),
                    slice(first_key - before[1], key_end - before[1]),
                )


class KeyMask(NamedTuple):
    """Which keys each query sees. By default all of them."""

    causal: bool = False
    """query i of the block, or of an entry, sees keys 0 to i; queries and keys are equal in number"""
    entries: Entries | None = None
    """parts of the block that hold pairs which see each other; None: all of it"""
    window: int = 0
    """a causal query of an entry sees only the last `window` keys, its own included; 0: all. Flash attention alone"""
    visible: Tensor | None = None
    """the keys that each query sees, (B, S, T) bool, at least one; then `causal` is False, and there are no entries"""


class PartialAttention(NamedTuple):
    """Attention over a part of the keys."""

    out: Tensor
    """(B, H, S, Q)"""
    lse: Tensor
    """(B, H, S), float32 at least"""

    def rows(self, queries: slice) -> "PartialAttention":
        """Return a view of some queries."""
        return PartialAttention(self.out[:, :, queries], self.lse[:, :, queries])


class Gradients(NamedTuple):
    """Gradients of one block."""

    dq: Tensor
    """(B, H, S, Q)"""
    dk: Tensor
    """(B, K, T, Q)"""
    dv: Tensor
    """(B, K, T, Q)"""


def with_sinks(attention: PartialAttention, sinks: Tensor | None) -> PartialAttention:
    """Return the attention with a sink per query head in the denominator of its softmax, if there are sinks.

    A sink is a key with a score and without a value. attention: over all keys. sinks: their scores, (H).

    FOOTGUN: `backward` of a kernel must get this out and this lse. `out * sigmoid(lse - sink)` in autograd has the same
    result and wrong gradients of q and k: torch's flash and varlen attention drop the gradient of lse.
    """
    if sinks is None:
        return attention
    out, lse = attention
    with_sink = torch.logaddexp(lse, _per_query(sinks, lse))
    return PartialAttention((out * (lse - with_sink).exp().unsqueeze(-1)).to(out.dtype), with_sink)


def gradient_of_sinks(d_out: Tensor, attention: PartialAttention, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks, (H), if there are any. attention: the result of `with_sinks`.

    A sink's share of a row, p = exp(sink - lse), is taken from the values: its gradient is -p (d_out . out).
    """
    if sinks is None:
        return None
    shares = (_per_query(sinks, attention.lse) - attention.lse).exp()
    return -(shares * (widened(d_out) * attention.out).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _per_query(sinks: Tensor, lse: Tensor) -> Tensor:
    """Return the sinks, (H), in the type and as a view of the shape of lse, (B, H, S)."""
    return sinks.to(lse.dtype)[:, None].expand_as(lse)


class BlockKernel(Protocol):
    """Computes attention over one block of keys; shapes at the head of this file."""

    scale: float | None
    """factor of the scores; None: 1 / sqrt(Q)"""

    def forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        """Return the attention of q over the block."""

    def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        """Return the block's gradients, given the `attention` of q over all blocks."""


class _EntryByEntry(ABC):
    """A kernel that computes a block as a whole, or entry by entry."""

    def __init__(self, scale: float | None = None) -> None:
        self.scale = scale

    def scale_of(self, q: Tensor) -> float:
        """Return the factor of the scores of queries (..., Q)."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @abstractmethod
    def _forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        """Return the attention of a block, or of an entry, as a whole. mask: it has no entries."""

    @abstractmethod
    def _backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        """Return its gradients."""

    def forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        if mask.entries is None:
            return self._forward(q, kv, mask)
        assert not mask.window
        of_entry = KeyMask(mask.causal)
        out = torch.zeros_like(widened(q))
        lse = out.new_full(q.shape[:3], -math.inf)
        for row, queries, keys in mask.entries.ranges(q.shape[2], kv.shape[3]):
            part = self._forward(q[row, :, queries], kv[:, row, :, keys], of_entry)
            out[row, :, queries], lse[row, :, queries] = part
        return PartialAttention(out, lse)

    def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        if mask.entries is None:
            return self._backward(d_out, q, kv, attention, mask)
        of_entry = KeyMask(mask.causal)
        out, lse = attention.out.to(q.dtype), attention.lse
        dq, (dk, dv) = torch.zeros_like(widened(q)), torch.zeros_like(widened(kv))
        for row, queries, keys in mask.entries.ranges(q.shape[2], kv.shape[3]):
            inputs = d_out[row, :, queries], q[row, :, queries], kv[:, row, :, keys]
            of_queries = PartialAttention(out[row, :, queries], lse[row, :, queries])
            part = self._backward(*inputs, of_queries, of_entry)
            dq[row, :, queries], dk[row, :, keys], dv[row, :, keys] = part
        return Gradients(dq, dk, dv)


class EagerKernel(_EntryByEntry):
    """Plain products and a softmax on any device: the reference of the other kernels. It alone has a soft cap.

    All is computed and returned in float32 at least. In 16 bits, d_weights - row_sums would cancel if the values that a
    query sees are similar, and gradients of queries and keys would have several times the error.
    """

    def __init__(self, scale: float | None = None, softcap: float = 0.0) -> None:
        """softcap: bound of the scores; 0: there is none."""
        super().__init__(scale)
        self.softcap = softcap

    def _forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        q, kv = widened(q), widened(kv)
        k, v = kv
        scores = self._scores(q, k, mask)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        out = weights @ v.unsqueeze(2)
        return PartialAttention(out.flatten(1, 2), lse.flatten(1, 2))

    def _backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        d_out, q, kv, out = widened(d_out), widened(q), widened(kv), widened(attention.out)
        k, v = kv
        grouped = (k.shape[1], -1)  # H -> K, H / K
        scores = self._scores(q, k, mask)
        weights = (scores - attention.lse.unflatten(1, grouped).unsqueeze(-1)).exp()
        # sum over Q of d_out * out, which the gradient of the softmax subtracts from every key of a row
        row_sums = (d_out * out).sum(-1).unflatten(1, grouped).unsqueeze(-1)
        d_out = d_out.unflatten(1, grouped)
        d_weights = d_out @ v.unsqueeze(2).mT
        d_scores = weights * (d_weights - row_sums) * self.scale_of(q)
        if self.softcap:  # the slope of the tanh
            slopes = 1.0 - (scores / self.softcap).square()
            d_scores = d_scores * slopes.masked_fill(scores == -math.inf, 0.0)
        dv = (weights.mT @ d_out).sum(2)
        dk = (d_scores.mT @ q.unflatten(1, grouped)).sum(2)
        dq = (d_scores @ k.unsqueeze(2)).flatten(1, 2)
        return Gradients(dq, dk, dv)

    def _scores(self, q: Tensor, k: Tensor, mask: KeyMask) -> Tensor:
        """Return the masked scores (B, K, H / K, S, T)."""
        scores = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT * self.scale_of(q)
        scores = soft_capped(scores, self.softcap)
        if mask.visible is not None:
            scores = scores.masked_fill(~mask.visible[:, None, None], -math.inf)
        if mask.causal:
            later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return scores


class CpuKernel(_EntryByEntry):
    """torch's fused attention for CPUs, which takes unexpanded heads in both directions."""

    def _forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        k, v = kv
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        added = self._added(mask, q.dtype)
        return PartialAttention(*kernel(q, k, v, 0.0, mask.causal, attn_mask=added, scale=self.scale))

    def _backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        k, v = kv
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        added = self._added(mask, q.dtype)
        return Gradients(*kernel(d_out, q, k, v, *attention, 0.0, mask.causal, attn_mask=added, scale=self.scale))

    def _added(self, mask: KeyMask, dtype: torch.dtype) -> Tensor | None:
        """Return the bias that the kernel adds to the scores, (B, 1, S, T); None: it adds nothing."""
        if mask.visible is None:
            return None
        hidden = ~mask.visible.unsqueeze(1)
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)


class CudaKernels(_EntryByEntry):
    """Flash attention for 16-bit types, of all entries at once; the memory-efficient kernel for the others.

    The second has no grouped heads: key-value heads are expanded for one block at a time, and sent unexpanded. Both
    take heads whose width is a multiple of `WIDTH_UNIT`: others are padded with zeros, which changes no score.
    """

    def forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        if mask.entries is None or not _takes_flash(q):
            return super().forward(q, kv, mask)
        q_tokens, (k, v) = _tokens(q), _tokens(kv)
        arguments = *mask.entries, q.shape[2], kv.shape[3], 0.0, mask.causal, False
        out, lse, *_ = VARLEN_FLASH(q_tokens, k, v, *arguments, scale=self.scale_of(q), **_window(mask))
        # of a query without keys FlashAttention 2 returns +inf, 3 returns -inf
        lse = lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)
        return PartialAttention(_of_sequences(out, q), lse.unflatten(1, (len(q), -1)).transpose(0, 1))

    def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        if mask.entries is None or not _takes_flash(q):
            return super().backward(d_out, q, kv, attention, mask)
        lse = attention.lse.transpose(0, 1).flatten(1).contiguous()  # FOOTGUN: as in `_backward`
        inputs = _tokens(d_out), _tokens(q), *_tokens(kv), _tokens(attention.out), lse
        arguments = *mask.entries, q.shape[2], kv.shape[3], 0.0, mask.causal
        gradients = VARLEN_GRADIENTS(*inputs, *arguments, *_no_dropout(q), scale=self.scale_of(q), **_window(mask))
        return Gradients(*(_of_sequences(x, q) for x in gradients))

    def _forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        if mask.visible is not None:  # no kernel has both any mask and a log-sum-exp for grouped heads
            return EagerKernel(self.scale).forward(q, kv, mask)
        causal = mask.causal
        width, scale = q.shape[-1], self.scale_of(q)
        q, kv = _padded(q), _padded(kv)
        if _takes_flash(q):
            k, v = kv
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
            return PartialAttention(out[..., :width], lse)
        k, v = _expanded(q, kv)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = kernel(q, k, v, None, True, 0.0, causal, scale=scale)
        return PartialAttention(out[..., :width], lse[..., : q.shape[2]])  # it pads its rows

    def _backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        if mask.visible is not None:
            return EagerKernel(self.scale).backward(d_out, q, kv, attention, mask)
        causal = mask.causal
        width, scale = q.shape[-1], self.scale_of(q)
        q, kv, d_out = _padded(q), _padded(kv), _padded(d_out)
        # FOOTGUN: the flash kernel reads lse as if it were contiguous, whatever its strides, and the memory-efficient
        # one reads a 16-bit out as if its memory were (B, S, H, Q): wrong gradients, no error.
        out = _padded(attention.out).transpose(1, 2).contiguous().transpose(1, 2)
        attention = PartialAttention(out, attention.lse.contiguous())
        backward = self._flash_backward if _takes_flash(q) else self._efficient_backward
        dq, dk, dv = backward(d_out, q, kv, attention, causal, scale)
        return Gradients(dq[..., :width], dk[..., :width], dv[..., :width])

    def _flash_backward(
        self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, causal: bool, scale: float
    ) -> Gradients:
        k, v = kv
        queries, keys = q.shape[2], k.shape[2]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = kernel(
            d_out, q, k, v, *attention, None, None, queries, keys, 0.0, causal, *_no_dropout(q), scale=scale
        )
        return Gradients(dq, dk, dv)

    def _efficient_backward(
        self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, causal: bool, scale: float
    ) -> Gradients:
        k, v = _expanded(q, kv)
        out, lse = attention
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # padded as its own forward returns it
        dropout_state = torch.zeros((), dtype=torch.int64, device=q.device)  # not read: there is no dropout
        seed, offset = dropout_state, dropout_state
        outputs = [True, True, True, False]  # gradients of q, k and v, not of the bias
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        dq, dk, dv, _ = kernel(d_out, q, k, v, None, out, lse, seed, offset, 0.0, outputs, causal, scale=scale)
        grouped = (kv.shape[2], -1)  # H -> K, H / K
        return Gradients(dq, dk.unflatten(1, grouped).sum(2), dv.unflatten(1, grouped).sum(2))


def _takes_flash(q: Tensor) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return seed and offset of flash attention's dropout, which are not read."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, state[0]


def _window(mask: KeyMask) -> dict[str, int]:
    """Return the arguments of varlen flash attention for the mask's window."""
    return {"window_size_left": mask.window - 1, "window_size_right": 0} if mask.window else {}


def _tokens(x: Tensor) -> Tensor:
    """Return the padded tokens of all sequences, one after the other: (..., B, H, S, Q) -> (..., B S, H, Q)."""
    return _padded(x).transpose(-3, -2).flatten(-4, -3)


def _of_sequences(x: Tensor, q: Tensor) -> Tensor:
    """Undo `_tokens`: (B S, H, Q) -> (B, H, S, Q), B and Q as in q."""
    return x.unflatten(0, (len(q), -1)).transpose(1, 2)[..., : q.shape[-1]]


def _padded(x: Tensor) -> Tensor:
    """Return x (..., Q) with zeros behind each head up to a multiple of `WIDTH_UNIT`; x itself if it has that width."""
    missing = -x.shape[-1] % WIDTH_UNIT
    return F.pad(x, (0, missing)) if missing else x


def _expanded(q: Tensor, kv: Tensor) -> Tensor:
    """Repeat the key-value heads: (2, B, K, T, Q) -> (2, B, H, T, Q)."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2)


def block_kernel(view: Model, device: str) -> BlockKernel:
    """Return the kernel of a ring for the blocks of a view, whose attention is "eager" or "sdpa".

    The config refuses the others.
    """
    scale = view.softmax_scale or None
    if view.attention == "eager":
        return EagerKernel(scale, view.score_softcap)
    if device == "cpu":
        return CpuKernel(scale)
    return CudaKernels(scale)
