"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the mixer of DeepSeek-V3 and Kimi K2."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torchllm.config import Model
from torchllm.facts.parts.attention_costs import costs_of_attention
from torchllm.facts.parts.costs import MixerCosts, RankShare
from torchllm.facts.parts.part import BlockPart, PartParameter, linear


def _has_q_latent(view: Model) -> bool:
    return view.latent_q_width > 0


def _has_no_q_latent(view: Model) -> bool:
    return not _has_q_latent(view)


def _queries(view: Model) -> int:
    """Return the width of the queries of all heads."""
    return view.heads * view.head_width


def _norm(name: str, width: Callable[[Model], int]) -> PartParameter:
    """Return the weight of the norm of a latent; there is none of width 0."""
    return PartParameter(
        name=f"self_attn.{name}.weight",
        shape=lambda view: (width(view),) if width(view) else None,
        cut="whole",
        start="ones",
        role="vector",
    )


def _gathered(view: Model) -> int:
    """Return the widths of the inputs of the heads' projections, and of the key features that all heads share."""
    return (view.latent_q_width or view.hidden) + view.latent_kv_width + view.rope_head_dim


def _costs(view: Model, share: RankShare) -> MixerCosts:
    """Return attention's costs, and the inputs of norms and projections; values have zeros behind them in the core."""
    latent = view.latent_kv_width + view.rope_head_dim
    before_norms = (view.latent_q_width + latent) / share.spread
    # With tp they are one tensor; else the turned features are a part of the keys, and hidden states are kept anyway.
    inputs = _gathered(view) if share.tp > 1 else view.latent_q_width + view.latent_kv_width
    of_attention = costs_of_attention(view, share)
    kept = 2.0 * (before_norms + inputs + view.heads * view.v_head_dim / share.tp)
    return replace(of_attention, kept=of_attention.kept + kept, latents=_gathered(view))


def _problems(view: Model) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values latent attention does not have."""
    for key in ("latent_kv_width", "nope_head_dim", "rope_head_dim", "v_head_dim"):
        if not getattr(view, key):
            yield key, "model.mixer = 'latent_attention' needs it: set it to a width"
    if view.rope_head_dim % 2:
        yield "rope_head_dim", f"rotary positions turn pairs of features, which {view.rope_head_dim} are not"
    if view.v_head_dim > view.head_width:
        yield "v_head_dim", f"{view.v_head_dim} is over the width of queries and keys, {view.head_width}: not supported"
    for key, values in _PLAIN.items():
        if getattr(view, key) not in values:
            yield key, f"does not combine with model.mixer = 'latent_attention': set it to {values[0]!r}"
    if view.kv != view.heads:
        yield "kv_heads", "model.mixer = 'latent_attention' has keys of all heads: set it to 0"
    if view.head_width != view.nope_head_dim + view.rope_head_dim:
        yield "head_dim", f"is not nope_head_dim + rope_head_dim = {view.nope_head_dim + view.rope_head_dim}: remove it"


def _small_sizes(view: Model) -> dict[str, int]:
    """Return widths that are all different."""
    widths = {"latent_kv_width": 24, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6, "head_dim": 0}
    return widths | ({"latent_q_width": 20} if view.latent_q_width else {})


_PLAIN: dict[str, tuple[Any, ...]] = {
    "family": ("llama",),
    "qk_norm": ("none",),
    "qkv_bias": (False,),
    "o_bias": (False,),
    "sinks": (False,),
    "attention_gate": ("none",),
    "v_norm": (False,),
    "keys_as_values": (False,),
    "rope_proportional": (False,),
    "rope_query_scale": (0.0,),
    "rotary_fraction": (1.0,),
    "window": (0,),
}
"""keys of attention, and the only values of them that latent attention has"""

PART = BlockPart(
    name="latent_attention",
    build="torchllm.models.parts.latent_attention:LatentAttention",
    parameters=(
        *linear("self_attn.q_a_proj", lambda view: (view.latent_q_width, view.hidden), "whole", is_there=_has_q_latent),
        _norm("q_a_norm", lambda view: view.latent_q_width),
        *linear("self_attn.kv_a_proj", lambda view: (view.latent_kv_width + view.rope_head_dim, view.hidden), "whole"),
        _norm("kv_a_norm", lambda view: view.latent_kv_width),
        *linear(
            "self_attn.q_b_proj", lambda view: (_queries(view), view.latent_q_width), "colwise", is_there=_has_q_latent
        ),
        *linear("self_attn.q_proj", lambda view: (_queries(view), view.hidden), "colwise", is_there=_has_no_q_latent),
        *linear(
            "self_attn.kv_b_proj",
            lambda view: (view.heads * (view.nope_head_dim + view.v_head_dim), view.latent_kv_width),
            "colwise",
        ),
        *linear(
            "self_attn.o_proj",
            lambda view: (view.hidden, view.heads * view.v_head_dim),
            "rowwise",
            to_residual=True,
        ),
    ),
    problems=_problems,
    small_sizes=_small_sizes,
    costs=_costs,
    core_flops=lambda view, keys: 2 * view.heads * (view.head_width + view.v_head_dim) * keys,
    context="torchllm.parallel.latent_attention:share_latents",
    styles="torchllm.parallel.latent_attention:styles",
)
