"""Attention of some queries over some keys, with the log-sum-exp that lets the results over several blocks be merged.

Nothing is sharded or sent here; `ring.py` does both. A kernel has two methods:

    forward   (q, kv, mask)                     -> out, lse
    backward  (d_out, q, kv, attention, mask)   -> dq, dk, dv

Shapes: B batch, H heads, K key-value heads, S queries, T keys, Q head width. q, out, d_out and dq are (B, H, S, Q); kv
is (2, B, K, T, Q), keys and values; dk and dv are (B, K, T, Q); lse is (B, H, S). Key-value heads are not expanded:
query head h reads head h // (H / K). lse is the natural logarithm of the sum of exp(scores), in float32 at least; out
and the gradients are in q's type or a wider one. Scores are divided by sqrt(Q). `backward` takes the out and lse of
*all* blocks of a row and returns this block's part of the gradients; the formulas are FlashAttention-2's (Dao 2023,
section 3.1).

FOOTGUN: a masked key has a bias of -1e30, not -inf. For a row that is masked completely torch's CPU kernel returns lse
0 instead of -inf, as if the row had seen keys, and the merged result is silently wrong. With -1e30 its lse is -1e30,
and merging gives it no weight.

CudaKernels was written without a GPU. `kernel_check.py` compares it with the eager kernel before it is used, so it may
fail but cannot be silently wrong.
"""

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torchllm.models.document_attention import visible_keys
from torchllm.models.layers import widened

UNSEEN = -1e30
"""added to the score of a key that a query may not see"""
WIDTH_UNIT = 8
"""the CUDA kernels take head widths that are multiples of this: 16 bytes of a 16-bit type"""


class KeyMask(NamedTuple):
    """Which keys each query sees. By default all of them."""

    causal: bool = False
    """query i sees keys 0 to i, where S = T; False where there is a bias, which hides later tokens itself"""
    bias: Tensor | None = None
    """(B, 1, S, T) in q's type, added to the scores"""


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


class BlockKernel(Protocol):
    """Computes attention over one block of keys; shapes at the head of this file."""

    def forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        """Return the attention of q over the block."""

    def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        """Return the block's gradients, given the `attention` of q over all blocks."""


def document_bias(query_ids: Tensor, key_ids: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return the bias (B, 1, S, T) that hides other documents and, with `causal`, later tokens.

    query_ids: (B, S) and key_ids: (B, T), the document of each token. causal: the last query is the token of the last
    key.
    """
    visible = visible_keys(query_ids, key_ids, causal)
    bias = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, UNSEEN)
    return bias.unsqueeze(1)


class EagerKernel:
    """Plain products and a softmax on any device: the reference of the other kernels.

    All is computed and returned in float32 at least. In 16 bits, d_weights - row_sums would cancel if the values that a
    query sees are similar, and gradients of queries and keys would have several times the error.
    """

    def forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        q, kv = widened(q), widened(kv)
        k, v = kv
        scores = _scores(q, k, mask)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        out = weights @ v.unsqueeze(2)
        return PartialAttention(out.flatten(1, 2), lse.flatten(1, 2))

    def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        d_out, q, kv, out = widened(d_out), widened(q), widened(kv), widened(attention.out)
        k, v = kv
        grouped = (k.shape[1], -1)  # H -> K, H / K
        scores = _scores(q, k, mask)
        weights = (scores - attention.lse.unflatten(1, grouped).unsqueeze(-1)).exp()
        # sum over Q of d_out * out, which the gradient of the softmax subtracts from every key of a row
        row_sums = (d_out * out).sum(-1).unflatten(1, grouped).unsqueeze(-1)
        d_out = d_out.unflatten(1, grouped)
        d_weights = d_out @ v.unsqueeze(2).mT
        d_scores = weights * (d_weights - row_sums) * q.shape[-1] ** -0.5
        dv = (weights.mT @ d_out).sum(2)
        dk = (d_scores.mT @ q.unflatten(1, grouped)).sum(2)
        dq = (d_scores @ k.unsqueeze(2)).flatten(1, 2)
        return Gradients(dq, dk, dv)


def _scores(q: Tensor, k: Tensor, mask: KeyMask) -> Tensor:
    """Return the masked scores (B, K, H / K, S, T)."""
    scores = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT * q.shape[-1] ** -0.5
    if mask.causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, UNSEEN)
    if mask.bias is not None:
        scores = scores + mask.bias.unsqueeze(1)
    return scores


class CpuKernel:
    """torch's fused attention for CPUs, which takes unexpanded heads in both directions."""

    def forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        k, v = kv
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return PartialAttention(*kernel(q, k, v, 0.0, mask.causal, attn_mask=mask.bias))

    def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        k, v = kv
        out, lse = attention
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return Gradients(*kernel(d_out, q, k, v, out, lse, 0.0, mask.causal, attn_mask=mask.bias))


class CudaKernels:
    """Flash attention for 16-bit types without a bias; otherwise the memory-efficient kernel, which takes one.

    The second has no grouped heads: key-value heads are expanded for one block at a time, and sent unexpanded. Both
    take heads whose width is a multiple of `WIDTH_UNIT`: others are padded with zeros, which changes no score.
    """

    def forward(self, q: Tensor, kv: Tensor, mask: KeyMask) -> PartialAttention:
        width = q.shape[-1]
        scale = width**-0.5
        q, kv = _padded(q), _padded(kv)
        if _takes_flash(q, mask):
            k, v = kv
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, mask.causal, scale=scale)
            return PartialAttention(out[..., :width], lse)
        k, v = _expanded(q, kv)
        bias = _aligned(mask.bias, q)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = kernel(q, k, v, bias, True, 0.0, mask.causal, scale=scale)
        return PartialAttention(out[..., :width], lse[..., : q.shape[2]])  # it pads its rows

    def backward(self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask) -> Gradients:
        width = q.shape[-1]
        scale = width**-0.5
        q, kv, d_out = _padded(q), _padded(kv), _padded(d_out)
        # FOOTGUN: the flash kernel reads lse as if it were contiguous, whatever its strides, and the memory-efficient
        # one reads a 16-bit out as if its memory were (B, S, H, Q): wrong gradients, no error.
        out = _padded(attention.out).transpose(1, 2).contiguous().transpose(1, 2)
        attention = PartialAttention(out, attention.lse.contiguous())
        backward = self._flash_backward if _takes_flash(q, mask) else self._efficient_backward
        dq, dk, dv = backward(d_out, q, kv, attention, mask, scale)
        return Gradients(dq[..., :width], dk[..., :width], dv[..., :width])

    def _flash_backward(
        self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask, scale: float
    ) -> Gradients:
        k, v = kv
        queries, keys = q.shape[2], k.shape[2]
        dropout_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # not read: there is no dropout
        seed, offset = dropout_state, dropout_state[0]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = kernel(
            d_out, q, k, v, *attention, None, None, queries, keys, 0.0, mask.causal, seed, offset, scale=scale
        )
        return Gradients(dq, dk, dv)

    def _efficient_backward(
        self, d_out: Tensor, q: Tensor, kv: Tensor, attention: PartialAttention, mask: KeyMask, scale: float
    ) -> Gradients:
        k, v = _expanded(q, kv)
        bias = _aligned(mask.bias, q)
        out, lse = attention
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # padded as its own forward returns it
        dropout_state = torch.zeros((), dtype=torch.int64, device=q.device)  # not read: there is no dropout
        seed, offset = dropout_state, dropout_state
        outputs = [True, True, True, False]  # gradients of q, k and v, not of the bias
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        dq, dk, dv, _ = kernel(d_out, q, k, v, bias, out, lse, seed, offset, 0.0, outputs, mask.causal, scale=scale)
        grouped = (kv.shape[2], -1)  # H -> K, H / K
        return Gradients(dq, dk.unflatten(1, grouped).sum(2), dv.unflatten(1, grouped).sum(2))


def _takes_flash(q: Tensor, mask: KeyMask) -> bool:
    return mask.bias is None and q.dtype in (torch.bfloat16, torch.float16)


def _padded(x: Tensor) -> Tensor:
    """Return x (..., Q) with zeros behind each head up to a multiple of `WIDTH_UNIT`; x itself if it has that width."""
    missing = -x.shape[-1] % WIDTH_UNIT
    return F.pad(x, (0, missing)) if missing else x


def _expanded(q: Tensor, kv: Tensor) -> Tensor:
    """Repeat the key-value heads: (2, B, K, T, Q) -> (2, B, H, T, Q)."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2)


def _aligned(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the bias of every head (B, H, S, T), in memory whose rows begin at multiples of 16 elements.

    The memory-efficient kernel asks for such rows.
    """
    if bias is None:
        return None
    length = bias.shape[-1]
    padded = F.pad(bias, (0, -length % 16))
    return padded[..., :length].expand(-1, q.shape[1], -1, -1)


def block_kernel(attention: str, device: str) -> BlockKernel:
    """Return the kernel that a ring uses for `model.attention`: "eager" or "sdpa"; the config refuses the others."""
    if attention == "eager":
        return EagerKernel()
    if device == "cpu":
        return CpuKernel()
    return CudaKernels()
