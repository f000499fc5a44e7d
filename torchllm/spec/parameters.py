"""One row for each kind of parameter: its names, how it is sharded over tp, how it is initialized, whether it decays.

The table is read by `parallel/tensor.py` (the cut), `parallel/initialize.py` (the start), the optimizer (weight decay)
and the planner (sizes per rank), so it imports no torch. Names are canonical: those of Hugging Face's Llama, without
the prefixes that wrappers add. Every parameter of every model matches exactly one row (tested).

Shapes: D hidden, H heads, K key-value heads, Q head width, F feed-forward, V vocabulary, S positions.
"""

import re
from typing import Literal, NamedTuple

Cut = Literal["vocab", "colwise", "rowwise", "whole", "whole_per_head"]
"""vocab: rows are tokens, over tp. colwise: output features over tp. rowwise: input features over tp. whole: on every
tp rank. whole_per_head: on every tp rank, which uses it for its own heads, so that gradients are summed over tp."""
Start = Literal["normal", "residual", "ones", "zeros"]
"""normal: standard deviation model.initial_std. residual: that / sqrt(2 L), for what adds to the residual stream."""


class ParameterRule(NamedTuple):
    """One kind of parameter."""

    pattern: str
    """regular expression of the whole canonical name"""
    cut: Cut
    start: Start
    decayed: bool
    """whether the optimizer applies weight decay to it"""


PARAMETER_RULES = (
    ParameterRule(r"embed_tokens\.weight", "vocab", "normal", True),  # (V, D)
    ParameterRule(r"embed_positions\.weight", "whole", "normal", False),  # (S, D)
    ParameterRule(r"layers\.\d+\.self_attn\.[qkv]_proj\.weight", "colwise", "normal", True),  # (H Q, D), (K Q, D)
    ParameterRule(r"layers\.\d+\.self_attn\.[qkv]_proj\.bias", "colwise", "zeros", False),  # (H Q), (K Q)
    ParameterRule(r"layers\.\d+\.self_attn\.[qk]_norm\.weight", "whole_per_head", "ones", False),  # (Q)
    ParameterRule(r"layers\.\d+\.self_attn\.o_proj\.weight", "rowwise", "residual", True),  # (D, H Q)
    ParameterRule(r"layers\.\d+\.self_attn\.o_proj\.bias", "whole", "zeros", False),  # (D): added after the sum
    ParameterRule(r"layers\.\d+\.mlp\.(gate|up)_proj\.weight", "colwise", "normal", True),  # (F, D)
    ParameterRule(r"layers\.\d+\.mlp\.(gate|up)_proj\.bias", "colwise", "zeros", False),  # (F)
    ParameterRule(r"layers\.\d+\.mlp\.down_proj\.weight", "rowwise", "residual", True),  # (D, F)
    ParameterRule(r"layers\.\d+\.mlp\.down_proj\.bias", "whole", "zeros", False),  # (D)
    ParameterRule(r"layers\.\d+\.(input|post_attention)_layernorm\.weight", "whole", "ones", False),  # (D)
    ParameterRule(r"layers\.\d+\.(input|post_attention)_layernorm\.bias", "whole", "zeros", False),  # (D)
    ParameterRule(r"norm\.weight", "whole", "ones", False),  # (D)
    ParameterRule(r"norm\.bias", "whole", "zeros", False),  # (D)
    ParameterRule(r"lm_head\.weight", "vocab", "normal", True),  # (V, D)
)

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)\.")


def canonical_name(name: str) -> str:
    """Return a parameter's name without the prefixes that wrappers of recompute and compile insert."""
    return _WRAPPERS.sub("", name)


def rule_of(name: str) -> ParameterRule:
    """Return the row that a canonical name matches. KeyError if the table has no row for the parameter."""
    for rule in PARAMETER_RULES:
        if re.fullmatch(rule.pattern, name):
            return rule
    raise KeyError(f"no row of torchllm/spec/parameters.py matches the parameter {name!r}")
