"""One row a kind of parameter: which names, what it is, how it is cut and how it starts.

Read by `parallel/tensor.py` (the cut), by the initialisation (the start), by the optimizer (what is decayed) and by the
planner (sizes per rank), so it imports no torch. Names are canonical: those of Hugging Face's Llama, without the
prefixes that wrappers add. Every parameter of every model matches exactly one row (tested).

Shapes: D hidden, H heads, K key-value heads, Q head width, F feed-forward, V vocabulary, S positions.
"""

import re
from typing import Literal, NamedTuple

Cut = Literal["vocab", "colwise", "rowwise", "whole", "whole_per_head"]
"""vocab: rows are tokens, over tp. colwise: output features over tp. rowwise: input features over tp. whole: on every
tp rank. whole_per_head: on every tp rank, which uses it for its own heads, so that gradients are summed over tp."""
Start = Literal["normal", "residual", "ones", "zeros"]
"""normal: standard deviation model.initial_std. residual: that / sqrt(2 L), for what adds to the residual stream."""


class Row(NamedTuple):
    """One kind of parameter."""

    pattern: str
    cut: Cut
    start: Start
    decayed: bool


TABLE = (
    Row(r"embed_tokens\.weight", "vocab", "normal", True),  # (V, D)
    Row(r"embed_positions\.weight", "whole", "normal", False),  # (S, D)
    Row(r"layers\.\d+\.self_attn\.[qkv]_proj\.weight", "colwise", "normal", True),  # (H Q, D), (K Q, D)
    Row(r"layers\.\d+\.self_attn\.[qkv]_proj\.bias", "colwise", "zeros", False),  # (H Q), (K Q)
    Row(r"layers\.\d+\.self_attn\.[qk]_norm\.weight", "whole_per_head", "ones", False),  # (Q)
    Row(r"layers\.\d+\.self_attn\.o_proj\.weight", "rowwise", "residual", True),  # (D, H Q)
    Row(r"layers\.\d+\.self_attn\.o_proj\.bias", "whole", "zeros", False),  # (D): added once, after the sum over tp
    Row(r"layers\.\d+\.mlp\.(gate|up)_proj\.weight", "colwise", "normal", True),  # (F, D)
    Row(r"layers\.\d+\.mlp\.(gate|up)_proj\.bias", "colwise", "zeros", False),  # (F)
    Row(r"layers\.\d+\.mlp\.down_proj\.weight", "rowwise", "residual", True),  # (D, F)
    Row(r"layers\.\d+\.mlp\.down_proj\.bias", "whole", "zeros", False),  # (D)
    Row(r"layers\.\d+\.(input|post_attention)_layernorm\.weight", "whole", "ones", False),  # (D)
    Row(r"layers\.\d+\.(input|post_attention)_layernorm\.bias", "whole", "zeros", False),  # (D)
    Row(r"norm\.weight", "whole", "ones", False),  # (D)
    Row(r"norm\.bias", "whole", "zeros", False),  # (D)
    Row(r"lm_head\.weight", "vocab", "normal", True),  # (V, D)
)

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)\.")


def canonical_name(name: str) -> str:
    """A parameter's name without what recompute and compile wrappers put into it."""
    return _WRAPPERS.sub("", name)


def row_of(name: str) -> Row:
    """The one row that a canonical name matches; KeyError names a parameter that the table forgot."""
    for row in TABLE:
        if re.fullmatch(row.pattern, name):
            return row
    raise KeyError(f"no row of torchllm/spec/parameters.py matches the parameter {name!r}")
