"""torch's scaled_dot_product_attention, with inputs for its fused kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Call torch's scaled_dot_product_attention with inputs for a fused kernel, which does not store all scores.

    q (B, H, S, Q), k and v (B, K, T, Q). mask: the keys that each query sees, (B, 1, S, T); None: causal. scale: factor
    of the scores; None: 1 / sqrt(Q).
    """
    k, v = heads_of_kernel(q, k, mask), heads_of_kernel(q, v, mask)
    grouped = bool(q.shape[1] != k.shape[1])  # symbolic sizes while the compiler traces
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)


def heads_of_kernel(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """Return keys or values (B, K, T, Q) with the heads, K or H, that a fused kernel for q (B, H, S, Q) takes.

    On a GPU, kernels with grouped query heads take only 16 bit and no mask. The memory-efficient kernel has no grouped
    heads: they are expanded for it.
    """
    grouped = bool(q.shape[1] != kv.shape[1])  # symbolic sizes while the compiler traces
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)
    return kv
