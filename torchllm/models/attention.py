"""Causal self-attention: projections around a replaceable core.

A core is a module (q, k, v, mask) -> out with q (B, S, H, Q), k and v (B, S, K, Q), out (B, S, H, Q); query head h
reads key-value head h // (H / K). Its `mask(document_ids, document_limit)`, called once per forward, returns the mask
in the core's own format. It hides later tokens, other documents and, with a `window` over 0, all tokens except the last
`window` (the query's own included); document_limit is `Batch.document_limit`. A core is built from the view of its
block. Parallelism replaces the core (context parallel) or gives it fewer heads (tensor parallel); generation wraps it
(`cached_attention.py`). Cores with sinks (`sinks.py`) take the sinks as a fifth input.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.facts.parts.part import found
from torchllm.models.fused_attention import fused_attention
from torchllm.models.layers import RMSNorm, Rotary, neighbors_apart, rotate
from torchllm.models.mixer import Mixer

if TYPE_CHECKING:
    from torchllm.models.varlen_attention import Documents


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
            options = model.norm_epsilon, model.offsets_norms, model.features.norm_weights
            self.q_norm = RMSNorm(model.head_width, *options)
            self.k_norm = RMSNorm(model.head_width, *options)
        elif model.qk_norm == "width":  # other names, because these weights are sharded over tp with the heads
            self.q_width_norm = RMSNorm(q_width, model.norm_epsilon, model.offsets_norms)
            self.k_width_norm = RMSNorm(kv_width, model.norm_epsilon, model.offsets_norms)
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


class Core(nn.Module):
    """Base of the library's attention cores, with the values that they read from their block's view."""

    shares_causal_mask = False
    """whether the blocks share a mask where tokens see all before them; else a core needs none"""

    def __init__(self, view: Model) -> None:
        super().__init__()
        self.view = view
        self.window = view.window
        self.scale = view.softmax_scale or None
        """factor of the scores; None: 1 / sqrt(Q)"""
        self.softcap = view.score_softcap
        """bound of the scores; 0: there is none"""


class ScaledDotProductAttention(Core):
    """Calls torch's scaled_dot_product_attention, which picks the fastest kernel it has for the device.

    With documents or a window it calls torch's varlen flash attention where available, on a GPU in 16 bit; else
    `document_attention`, which makes the mask of one block of queries at a time. UserError if scores have a soft cap.
    """

    def __init__(self, view: Model) -> None:
        super().__init__(view)
        if view.score_softcap:
            raise UserError("model.attention: sdpa has no model.score_softcap: use flex or flash on a GPU, or eager")

    def mask(self, document_ids: Tensor | None, document_limit: int = 0) -> "Documents | None":
        if document_ids is None:
            return None
        from torchllm.models.varlen_attention import find_documents  # of no use to whole sequences

        return find_documents(document_ids, document_limit)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: "Documents | None") -> Tensor:
        if mask is not None or 0 < self.window < q.shape[1]:
            from torchllm.models.varlen_attention import attend_to_part  # as above

            return attend_to_part(q, k, v, mask, self.window, self.scale)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, Q)
        return fused_attention(q, k, v, mask=None, scale=self.scale).transpose(1, 2)


CORES: dict[str, Callable[[Model], Core]] = {
    "eager": lambda view: found("torchllm.models.attention_cores:EagerAttention")(view),
    "sdpa": ScaledDotProductAttention,
    "flash": lambda view: found("torchllm.models.attention_cores:FlashAttention")(view),
    "flex": lambda view: found("torchllm.models.attention_cores:FlexAttention")(view),
}
"""makes the core of a view's blocks, by `model.attention`; a run imports its own"""


def core_class(view: Model) -> Callable[[Model], Core]:
    """Return the function that makes the attention core of the blocks of a view."""
    if not view.sinks:
        return CORES[view.attention]
    core: type[Core] = found("torchllm.models.sinks:sink_core_class")(view)
    return core
