"""Causal self-attention: projections around a replaceable core.

A core is a module (q, k, v, mask) -> out with q (B, S, H, Q), k and v (B, S, K, Q), out (B, S, H, Q); query head h
reads key-value head h // (H / K). Its `mask(document_ids, document_limit)`, called once per forward, returns the mask
in the core's own format. It hides later tokens, other documents and, with a `window` over 0, all tokens except the last
`window` (the query's own included); document_limit is `Batch.document_limit`. A core is built from the view of its
block. Parallelism replaces the core (context parallel) or gives it fewer heads (tensor parallel); generation wraps it
(`cached_attention.py`). Cores with sinks (`sinks.py`) take the sinks as a fifth input.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.facts.parts.part import found
from torchllm.models.document_attention import document_attention, fused_attention, visible_keys
from torchllm.models.layers import RMSNorm, Rotary, neighbors_apart, rotate, soft_capped, widened
from torchllm.models.mixer import Mixer
from torchllm.models.varlen_attention import (
    Documents,
    attend_within_documents,
    find_documents,
    one_document,
    takes_varlen,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Attention(Mixer):
    """Projects to q, k, v, applies qk-norm and rotary positions if the model has them, the core and o_proj."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_width = model.head_width
        q_width, kv_width = model.heads * model.head_width, model.kv * model.head_width
        self.q_proj = nn.Linear(model.hidden, model.query_outputs, bias=model.has_qkv_bias)
        self.k_proj = nn.Linear(model.hidden, kv_width, bias=model.has_qkv_bias)
        self.v_proj: nn.Module | None = None
        if not model.keys_as_values:
            self.v_proj = nn.Linear(model.hidden, kv_width, bias=model.has_qkv_bias)
        self.o_proj = nn.Linear(q_width, model.hidden, bias=model.has_o_bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.q_width_norm: nn.Module | None = None
        self.k_width_norm: nn.Module | None = None
        if model.qk_norm == "head":  # one weight for all heads, replicated over tp
            self.q_norm = RMSNorm(model.head_width, model.norm_epsilon, model.norm_offset)
            self.k_norm = RMSNorm(model.head_width, model.norm_epsilon, model.norm_offset)
        elif model.qk_norm == "width":  # other names, because these weights are sharded over tp with the heads
            self.q_width_norm = RMSNorm(q_width, model.norm_epsilon, model.norm_offset)
            self.k_width_norm = RMSNorm(kv_width, model.norm_epsilon, model.norm_offset)
        self.v_norm: nn.Module | None = None
        if model.v_norm:
            self.v_norm = RMSNorm(model.head_width, model.norm_epsilon, has_weight=False)
        self.is_interleaved = model.rope_interleaved
        self.sinks: nn.Module | None = None
        if model.sinks:
            self.sinks = found("torchllm.models.sinks:Sinks")(model.heads)  # few models have them
        self.core = core_class(model)(model)

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        """Let each token attend to the tokens that it may see: x (B, S, D) -> (B, S, D)."""
        return self.o_proj(self.heads(x, rotary, mask))

    def heads(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        """Return the results of all heads, the input of o_proj: x (B, S, D) -> (B, S, H Q)."""
        return self.attend(self.q_proj(x), *self.keys_and_values(x), rotary, mask)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projections of keys and of values, one tensor if they share it: x (B, S, D) -> (B, S, K Q)."""
        k = self.k_proj(x)
        return k, k if self.v_proj is None else self.v_proj(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        """Return the results of all heads from the projections: q (B, S, H Q), k and v (B, S, K Q) -> (B, S, H Q)."""
        if self.q_width_norm is not None and self.k_width_norm is not None:
            q, k = self.q_width_norm(q), self.k_width_norm(k)
        heads = (-1, self.head_width)
        q, k, v = q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if rotary is not None:
            if self.is_interleaved:
                q, k = (neighbors_apart(x, rotary.cos.shape[-1]) for x in (q, k))
            q, k = rotate(q, rotary), rotate(k, rotary)
            if rotary.query_scale is not None:
                q = q * rotary.query_scale.to(q.dtype)
        of_heads = () if self.sinks is None else (self.sinks(),)
        out: Tensor = self.core(q, k, v, mask, *of_heads).flatten(-2)
        return out

    def cached_core(self, *, room: int, padding: Tensor | None) -> nn.Module:
        """Return a core that caches keys and values."""
        from torchllm.models.cached_attention import CachedAttention  # of no use to training

        return CachedAttention(self.core, room=room, padding=padding)


ATTENTIONS = {
    "none": "torchllm.models.attention:Attention",
    "element": "torchllm.models.gated_attention:ElementGatedAttention",
    "head": "torchllm.models.gated_attention:HeadGatedAttention",
}
"""class of attention, by `model.attention_gate`; a run imports its own"""


def build_attention(model: Model) -> Attention:
    """Return the attention of a block, with uninitialized weights."""
    attention: Attention = found(ATTENTIONS[model.attention_gate])(model)
    return attention


def causal_mask(queries: int, keys: int, device: torch.device, window: int = 0) -> Tensor:
    """Return the keys that each query sees, (queries, keys) bool: keys that are not later.

    window: only the last `window` of these; 0: all.
    """
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
    return visible.triu(1 - window) if window else visible


class Core(nn.Module):
    """An attention core of this file: what it reads of its block's view."""

    def __init__(self, view: Model) -> None:
        super().__init__()
        self.view = view
        self.window = view.window
        self.scale = view.softmax_scale or None
        """factor of the scores; None: 1 / sqrt(Q)"""
        self.softcap = view.score_softcap
        """bound of the scores; 0: there is none"""


class EagerAttention(Core):
    """Computes plain products and a softmax, as reference for tests. The compiled softmax is one fused kernel.

    Scores and mask take S x S memory: use another core for long sequences.
    """

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Tensor | None:
        """Return the keys that each query sees, the same for all heads: (B, 1, S, S)."""
        return None if document_ids is None else visible_keys(document_ids, document_ids, self.window).unsqueeze(1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *of_heads: Tensor) -> Tensor:
        """of_heads: further inputs of `weights`, (H)."""
        if mask is None:
            mask = causal_mask(q.shape[1], k.shape[1], q.device, self.window)
        queries_per_key = q.shape[2] // k.shape[2]  # neighboring query heads share a key head
        k = k.repeat_interleave(queries_per_key, dim=2)
        v = v.repeat_interleave(queries_per_key, dim=2)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        # The softmax in float32: the sum of many small weights in 16 bits would lose them.
        scores = soft_capped(widened(torch.einsum("bqhd,bkhd->bhqk", q, k)) * scale, self.softcap)
        weights = self.weights(scores.masked_fill(~mask, -torch.inf), *of_heads).to(v.dtype)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    def weights(self, scores: Tensor, *of_heads: Tensor) -> Tensor:
        """Return the weights of the keys: (B, H, S, S) -> (B, H, S, S)."""
        return scores.softmax(-1)


class ScaledDotProductAttention(Core):
    """Calls torch's scaled_dot_product_attention, which picks the fastest kernel it has for the device.

    With documents or a window it calls torch's varlen flash attention where available, on a GPU in 16 bit; else
    `document_attention`, which makes the mask of one block of queries at a time. UserError if scores have a soft cap.
    """

    def __init__(self, view: Model) -> None:
        super().__init__(view)
        if view.score_softcap:
            raise UserError("model.attention: sdpa has no model.score_softcap: use flex or flash on a GPU, or eager")

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> Documents | None:
        return None if document_ids is None else find_documents(document_ids, document_limit)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Documents | None) -> Tensor:
        if mask is None and 0 < self.window < q.shape[1]:
            mask = one_document(q.shape[0], q.shape[1], q.device)
        if mask is not None and mask.offsets is not None and takes_varlen(q):
            return attend_within_documents(q, k, v, mask.offsets, self.window, self.scale)
        if mask is not None:
            return document_attention(q, k, v, mask.ids, self.window, self.scale)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, Q)
        return fused_attention(q, k, v, mask=None, scale=self.scale).transpose(1, 2)


class FlashAttention(Core):
    """Calls the kernel of FlashAttention 3 (package flash_attn_interface), else of flash-attn.

    It is causal only, so the config refuses it with document masks. UserError if neither package is installed, or if
    flash-attn's kernels for AMD's GPUs would leave out a window or a soft cap.
    """

    def __init__(self, view: Model) -> None:
        super().__init__(view)
        self.kernel = _flash_attention_3() or _flash_attention_2()
        backend = sys.modules.get(self.kernel.__module__)
        if (view.window or view.score_softcap) and getattr(backend, "USE_TRITON_ROCM", False):
            # FOOTGUN: seen in 2.8.3, whose Triton kernels take both arguments and read neither.
            raise UserError(
                'model.attention = "flash": with FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE flash-attn ignores windows and '
                'soft caps of scores. Use "flex"; without model.score_softcap "sdpa" does as well'
            )
        window_size = (view.window - 1, 0) if view.window else (-1, -1)
        """tokens that a query sees before and behind its own; -1: all"""
        self.options: dict[str, Any] = {"causal": True, "window_size": window_size, "softmax_scale": self.scale}
        if self.softcap:  # old versions of the package have none
            self.options["softcap"] = self.softcap

    @staticmethod
    def mask(document_ids: Tensor | None, document_limit: int = 0) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return self.kernel(q, k, v, **self.options)


def _flash_attention_3() -> Callable[..., Any] | None:
    """Return the kernel for Hopper GPUs; None on another GPU, or if its package is not installed."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return None
    kernel: Callable[..., Any] = flash_attn_func
    return kernel


def _flash_attention_2() -> Callable[..., Any]:
    """Return the kernel of the package flash-attn. Raises UserError if it is not installed."""
    try:
        from flash_attn import flash_attn_func
    except ImportError as error:
        raise UserError(
            f'model.attention = "flash" cannot be used here: {error}. Install the extra '
            "(pip install -e '.[flash]', which compiles it) or use \"sdpa\"."
        ) from error
    kernel: Callable[..., Any] = flash_attn_func
    return kernel


class FlexAttention(Core):
    """Calls torch's FlexAttention, which skips blocks that documents and windows mask completely.

    It has no backward on a CPU: UserError there.
    """

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> "BlockMask | None":
        from torchllm.models.block_mask import document_block_mask

        return None if document_ids is None else document_block_mask(document_ids, self.window)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask | None") -> Tensor:
        from torchllm.models.block_mask import causal_block_mask

        if q.device.type == "cpu" and any(tensor.requires_grad for tensor in (q, k, v)):
            raise UserError('model.attention = "flex" has no backward on a CPU: use "sdpa" or "eager"')
        if mask is None:
            mask = causal_block_mask(q.shape[1], q.device, self.window)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, Q)
        grouped = q.shape[1] != k.shape[1]
        options = {"score_mod": capping(self.softcap), "scale": self.scale, "enable_gqa": grouped}
        out = compiled_flex_attention()(q, k, v, block_mask=mask, **options)
        return out.transpose(1, 2)


@cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    """Return FlexAttention compiled (uncompiled it is not fused); one compilation serves all layers."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def capping(softcap: float) -> Callable[..., Tensor] | None:
    """Return the change of FlexAttention's scores, one function for all layers, or each would compile; None: none."""
    if not softcap:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_capped(score, softcap)

    return capped


CORES: dict[str, type[Core]] = {
    "eager": EagerAttention,
    "sdpa": ScaledDotProductAttention,
    "flash": FlashAttention,
    "flex": FlexAttention,
}


def core_class(view: Model) -> type[Core]:
    """Return the class of the attention core of the blocks of a view."""
    if not view.sinks:
        return CORES[view.attention]
    core: type[Core] = found("torchllm.models.sinks:sink_core_class")(view)
    return core
