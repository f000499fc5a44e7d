"""Attention of a block of queries over a block of keys, with the log-sum-exp that lets blocks be merged.

    forward   (q, kv, causal, bias)                        -> out, lse
    backward  (gradient, q, kv, out, lse, causal, bias)    -> dq, dk, dv

q, out, gradient, dq: (B, H, S, Q); kv: (2, B, K, T, Q), keys and values, whose heads are not expanded: query head h
reads head h // (H / K); dk, dv: (B, K, T, Q); lse: (B, H, S), float32 at least, the natural logarithm of the sum of
exp(scores); scores are divided by sqrt(Q). causal: S = T, and query i sees keys 0 to i. bias: (B, 1, S, T) in q's type,
added to the scores, then causal is False. `backward` takes the out and lse of *all* blocks of a row and returns this
block's part of the gradients; the formulas are FlashAttention-2's (Dao 2023, section 3.1).

FOOTGUN: a key that is not seen has a bias of -1e30, not -inf: for a row that sees nothing torch's CPU kernel answers
-inf with lse 0, as if that row had something to say. With -1e30 its lse is -1e30, and merging gives it no weight.

CudaKernels was written without a GPU at hand and has not run on one. `check_kernel` compares it with the eager kernel
before it is used, so that it can fail but not be wrong without a word.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torchllm.config.errors import UserError

UNSEEN = -1e30
"""added to the score of a key that a query may not see"""

Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk, dv"""


class BlockKernel(Protocol):
    """See the head of this file."""

    def forward(self, q: Tensor, kv: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """out, lse"""

    def backward(
        self, gradient: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
    ) -> Gradients:
        """dq, dk, dv"""


def document_bias(query_ids: Tensor, key_ids: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """What hides other documents, (B, 1, S, T), and with `causal` later tokens. ids: (B, S) and (B, T)."""
    seen = query_ids.unsqueeze(2) == key_ids.unsqueeze(1)
    if causal:
        seen = seen.tril_()
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, UNSEEN).unsqueeze(1)


class EagerKernel:
    """Plain products and a softmax on any device: what the others are compared with."""

    def forward(self, q: Tensor, kv: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = kv
        scores = _scores(q, k, causal, bias)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().to(v.dtype)
        return (weights @ v.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self, gradient: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
    ) -> Gradients:
        k, v = kv
        groups = (k.shape[1], -1)
        scores = _scores(q, k, causal, bias)
        weights = (scores - lse.unflatten(1, groups).unsqueeze(-1)).exp()
        inner = (gradient * out).sum(-1, dtype=scores.dtype).unflatten(1, groups).unsqueeze(-1)
        gradient = gradient.unflatten(1, groups)
        through_v = gradient @ v.unsqueeze(2).mT
        d_scores = (weights * (through_v - inner) * q.shape[-1] ** -0.5).to(q.dtype)
        dv = (weights.to(v.dtype).mT @ gradient).sum(2)
        dk = (d_scores.mT @ q.unflatten(1, groups)).sum(2)
        return (d_scores @ k.unsqueeze(2)).flatten(1, 2), dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool, bias: Tensor | None) -> Tensor:
    """(B, K, H / K, S, T), float32 at least"""
    products = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT
    scores = products.to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, UNSEEN)
    return scores if bias is None else scores + bias.unsqueeze(1)


class CpuKernel:
    """torch's fused attention for CPUs, which takes unexpanded heads in both directions."""

    def forward(self, q: Tensor, kv: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *kv, 0.0, causal, attn_mask=bias)

    def backward(
        self, gradient: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
    ) -> Gradients:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, *kv, out, lse, 0.0, causal, attn_mask=bias
        )


class CudaKernels:
    """Flash attention for 16-bit types without documents; for the rest the memory-efficient kernel, which takes a bias.

    The second knows no groups of heads: keys and values are expanded for the time of one block, and never sent so.
    """

    def forward(self, q: Tensor, kv: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if _takes_flash(q, bias):
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, *kv, 0.0, causal)
            return out, lse
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, *_expanded(q, kv), _aligned(bias, q), True, 0.0, causal
        )
        return out, lse[..., : q.shape[2]]  # its rows are padded

    def backward(
        self, gradient: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
    ) -> Gradients:
        lse = lse.contiguous()  # FOOTGUN: the flash kernel reads it so, whatever its strides
        if _takes_flash(q, bias):
            unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of the dropout that there is none of
            return torch.ops.aten._scaled_dot_product_flash_attention_backward(
                gradient, q, *kv, out, lse, None, None, q.shape[2], kv.shape[3], 0.0, causal, unused, unused[0]
            )
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # as its own forward returns it
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient,
            q,
            *_expanded(q, kv),
            _aligned(bias, q),
            out,
            padded,
            unused,
            unused,
            0.0,
            [True, True, True, False],
            causal,
        )
        groups = (kv.shape[2], -1)
        return dq, dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2)


def _takes_flash(q: Tensor, bias: Tensor | None) -> bool:
    return bias is None and q.dtype in (torch.bfloat16, torch.float16)


def _expanded(q: Tensor, kv: Tensor) -> Tensor:
    return kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2)


def _aligned(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """The bias of every head; the kernel wants rows that begin at multiples of 16 elements."""
    if bias is None:
        return None
    length = bias.shape[-1]
    return F.pad(bias, (0, -length % 16))[..., :length].expand(-1, q.shape[1], -1, -1)


def block_kernel(attention: str, device: str) -> BlockKernel:
    """The kernel of `model.attention` in a ring: eager or sdpa, the ones that the config lets through."""
    if attention == "eager":
        return EagerKernel()
    return CpuKernel() if device == "cpu" else CudaKernels()


def check_kernel(kernel: BlockKernel, device: torch.device, groups: int, width: int) -> None:
    """Compare a kernel with the eager one on a small block of each kind that a ring has. UserError if they differ.

    groups: query heads a key-value head; width: of a head. The out and lse that the backward gets are those of rows
    that saw more than this block, as in a ring.
    """
    generator = torch.Generator().manual_seed(0)
    q, gradient = (torch.randn(1, 2 * groups, 48, width, generator=generator).to(device) for _ in range(2))
    kv = torch.randn(2, 1, 2, 48, width, generator=generator).to(device)
    ids = torch.arange(48, device=device).unsqueeze(0) // 20
    # The first allows for products in tf32, the second for the rounding of bfloat16, 2**-8, in sums of some terms.
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        for causal, masked in ((True, False), (False, False), (True, True), (False, True)):
            bias = document_bias(ids, ids if causal else ids + 1, causal, torch.float32) if masked else None
            expected = _both_ways(EagerKernel(), q, kv, gradient, causal and not masked, bias)
            bias = None if bias is None else bias.to(dtype)
            try:
                found = _both_ways(kernel, q.to(dtype), kv.to(dtype), gradient.to(dtype), causal and not masked, bias)
            except RuntimeError as error:
                raise _unusable(dtype, str(error).splitlines()[0]) from error
            for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
                off = float((got.float() - want).abs().max() / want.abs().max())
                if not off <= tolerance:
                    raise _unusable(dtype, f"{name} is off by {off:.1e}")


def _both_ways(
    kernel: BlockKernel, q: Tensor, kv: Tensor, gradient: Tensor, causal: bool, bias: Tensor | None
) -> list[Tensor]:
    """out, lse, dq, dk, dv. A row that sees nothing may have any out, for its weight is 0: it is cleared here."""
    q, gradient = _late(q), _late(gradient)
    out, lse = kernel.forward(q, kv, causal, bias)
    nothing = lse < UNSEEN / 2
    out, lse = _late(out.masked_fill(nothing.unsqueeze(-1), 0.0)), _late(lse.logaddexp(torch.ones_like(lse)))
    return [out, lse, *kernel.backward(gradient, q, kv, out, lse, causal, bias)]


def _late(x: Tensor) -> Tensor:
    """The same numbers as the late rows of twice as many: a ring's blocks are slices."""
    return torch.cat((torch.zeros_like(x), x), dim=2)[:, :, x.shape[2] :]


def _unusable(dtype: torch.dtype, reason: str) -> UserError:
    return UserError(
        f"parallel.cp: this device's fused attention does not do what the ring needs in {str(dtype)[6:]} ({reason}): "
        'use model.attention = "eager", or parallel.cp_method = "ulysses"'
    )
