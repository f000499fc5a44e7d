"""Attention sinks: a learned number per query head that joins the denominator of the softmax (gpt-oss, OpenAI 2025,
arXiv 2508.10925; Xiao et al. 2023, arXiv 2309.17453, section 3.3).

A head can thus attend to nothing: its weights of the keys sum to less than 1. The softmax is as with one additional
key, which every query sees, whose score is the sink and whose value is 0.

The cores here take the sinks, (H), as a fifth input. Under a ring `parallel/ring.py` adds them to the merged result of
all keys; windows over cp and Ulysses call these cores. Shapes are as in `attention.py`.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.models.attention import Core, ScaledDotProductAttention
from torchllm.models.attention_cores import EagerAttention
from torchllm.models.attention_kernels import (
    BlockKernel,
    CpuKernel,
    CudaKernels,
    Entries,
    KeyMask,
    PartialAttention,
    gradient_of_sinks,
    with_sinks,
)
from torchllm.models.document_attention import ATTENTION_OPERATIONS, BODIES, query_blocks
from torchllm.models.kernel_check import check_kernel
from torchllm.models.varlen_attention import Documents, one_document, takes_varlen


class Sinks(nn.Module):
    """The sinks of a block's heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))
        self.local: Callable[[Tensor], Tensor] = lambda weight: weight
        """replaceable: this rank's part of a sharded weight"""

    def forward(self) -> Tensor:
        """Return the sinks of this rank's heads, (H)."""
        return self.local(self.weight)


class EagerSinkAttention(EagerAttention):
    """Eager attention with sinks, by its definition: the reference of `SinkAttention`."""

    def weights(self, scores: Tensor, *of_heads: Tensor) -> Tensor:
        """See `EagerAttention.weights`; of_heads: the sinks."""
        (sinks,) = of_heads
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


class SinkAttention(ScaledDotProductAttention):
    """Fused attention with sinks, which stores no scores: the kernels of `attention_kernels.py`.

    Without documents and windows in one call; with them in one call of varlen flash attention on a GPU in 16 bit, else
    in one per block of queries, as in `document_attention.py`.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Documents | None, *of_heads: Tensor) -> Tensor:
        """See `ScaledDotProductAttention`; of_heads: the sinks."""
        (sinks,) = of_heads
        if mask is None and 0 < self.window < q.shape[1]:
            mask = one_document(q.shape[0], q.shape[1], q.device)
        ids, offsets = mask or (None, None)
        offsets = offsets if takes_varlen(q) else None
        out, _ = sink_attention(q, k, v, sinks, ids, offsets, self.window, self.scale)
        return out


class _Block(NamedTuple):
    """A block of queries, their keys, and the mask of both."""

    queries: slice
    keys: slice
    mask: KeyMask


def _blocks(ids: Tensor | None, offsets: Tensor | None, window: int) -> Iterator[_Block]:
    """Yield the blocks of sequences with these documents, as `Documents` has them; ids None: one each, no window."""
    whole = slice(None)
    if ids is None:
        yield _Block(whole, whole, KeyMask(causal=True))
    elif offsets is not None:
        yield _Block(whole, whole, KeyMask(causal=True, entries=Entries(offsets, offsets), window=window))
    else:
        for queries, keys, visible in query_blocks(ids, window):
            yield _Block(queries, keys, KeyMask(visible=visible))


def _sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    ids: Tensor | None,
    offsets: Tensor | None,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return attention with sinks, (B, S, H, Q), and the log-sum-exp of each row with its sink, (B, H, S) float32.

    ids, offsets: of `Documents`; ids None: each sequence is one, and there is no window. scale: of the
    scores; None: 1 / sqrt(Q). The second result is for the backward pass and has no gradient.
    """
    kernel = _kernel(q, k, scale)
    q, kv = q.transpose(1, 2), torch.stack((k, v)).transpose(2, 3)
    blocks = _blocks(ids, offsets, window)
    parts = [kernel.forward(q[:, :, queries], kv[:, :, :, keys], mask) for queries, keys, mask in blocks]
    whole = parts[0] if len(parts) == 1 else PartialAttention(*(torch.cat(x, dim=2) for x in zip(*parts, strict=True)))
    out, lse = with_sinks(whole, sinks)
    return out.to(q.dtype).transpose(1, 2).contiguous(), lse.contiguous()


def _sink_attention_gradients(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    ids: Tensor | None,
    offsets: Tensor | None,
    window: int,
    scale: float | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sinks. out, lse: the results of `sink_attention`."""
    kernel = _kernel(q, k, scale)
    kv = torch.stack((k, v)).transpose(2, 3)
    q, d_out, attention = q.transpose(1, 2), d_out.transpose(1, 2), PartialAttention(out.transpose(1, 2), lse)
    dq = torch.empty_like(q)
    wide = torch.promote_types(q.dtype, torch.float32)  # for the sums over blocks
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for queries, keys, mask in _blocks(ids, offsets, window):
        inputs = d_out[:, :, queries], q[:, :, queries], kv[:, :, :, keys]
        part = kernel.backward(*inputs, attention.rows(queries), mask)
        dq[:, :, queries] = part.dq
        dk[:, keys] += part.dk.transpose(1, 2)
        dv[:, keys] += part.dv.transpose(1, 2)
    d_sinks = gradient_of_sinks(d_out, attention, sinks)
    assert d_sinks is not None
    return dq.transpose(1, 2).contiguous(), dk.to(k.dtype), dv.to(v.dtype), d_sinks


sink_attention = torch.library.custom_op("torchllm::sink_attention", _sink_attention, mutates_args=())
sink_attention_gradients = torch.library.custom_op(
    "torchllm::sink_attention_gradients", _sink_attention_gradients, mutates_args=()
)


@sink_attention.register_fake
def _empty_results(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads = q.shape[:3]
    lse = q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


@sink_attention_gradients.register_fake
def _empty_gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, sinks))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    gradients = sink_attention_gradients(d_out, *inputs, ctx.window, ctx.scale, out, lse)
    return *gradients, None, None, None, None


sink_attention.register_autograd(_backward, setup_context=_save)
ATTENTION_OPERATIONS.add(torch.ops.torchllm.sink_attention.default)
BODIES[torch.ops.torchllm.sink_attention.default] = _sink_attention
BODIES[torch.ops.torchllm.sink_attention_gradients.default] = _sink_attention_gradients


def _kernel(q: Tensor, k: Tensor, scale: float | None) -> BlockKernel:
    """Return the kernel for these heads; a GPU's was compared with the eager one."""
    if q.device.type == "cpu":
        return CpuKernel(scale)
    return _checked_kernel(q.device, q.shape[2] // k.shape[2], q.shape[3], q.dtype, scale)


@cache
def _checked_kernel(
    device: torch.device, groups: int, width: int, dtype: torch.dtype, scale: float | None
) -> BlockKernel:
    kernel = CudaKernels(scale)
    check_kernel(kernel, device, groups, width, dtype)
    return kernel


SINK_CORES: dict[str, type[Core]] = {"eager": EagerSinkAttention, "sdpa": SinkAttention}
"""by `model.attention`; the config refuses the others"""


def sink_core_class(view: Model) -> type[Core]:
    """Return the class of the core of the blocks of a view with sinks."""
    return SINK_CORES[view.attention]
