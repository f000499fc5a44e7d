"""One row for each kind of parameter: its names, sharding over tp, initialization and role.

The table is read by `parallel/tensor.py` (the cut), `parallel/initialize.py` (the start), the optimizer (learning rate
and weight decay by role) and the planner (sizes per rank), so it imports no torch. Names are canonical: as in Hugging
Face's Llama, without the prefixes that wrappers add. Every parameter of every model matches exactly one row (tested).

Shapes: D hidden, H heads, K key-value heads, Q head width, F feed-forward, V vocabulary, S positions, r rank of LoRA.
"""

import re
from itertools import chain
from typing import Literal, NamedTuple

Cut = Literal["vocab", "colwise", "rowwise", "whole", "whole_per_head", "whole_summed"]
"""vocab: rows are tokens, over tp. colwise: output features over tp. rowwise: input features over tp. whole: on every
tp rank. whole_per_head: on every tp rank, which uses it for its own heads, so that gradients are summed over tp.
whole_summed: the same for a rank's own output features, or its own input features."""
Start = Literal["normal", "residual", "ones", "zeros"]
"""normal: standard deviation model.initial_std. residual: that / sqrt(2 L), for outputs to the residual stream."""
Role = Literal["embedding", "position", "matrix", "router", "head", "adapter", "vector"]
"""embedding: of tokens; the head too where they are tied. position: learned positions. matrix: of attention, of the
feed-forward layer and of experts, stacked. router: of experts. adapter: of LoRA. vector: weights and biases of norms,
biases of matrices."""


class ParameterRule(NamedTuple):
    """One kind of parameter."""

    pattern: str
    """regular expression of the whole canonical name"""
    cut: Cut
    start: Start
    role: Role
    """the optimizer sets learning rate and weight decay by role"""


PARAMETER_RULES = (
    ParameterRule(r"embed_tokens\.weight", "vocab", "normal", "embedding"),  # (V, D)
    ParameterRule(r"embed_positions\.weight", "whole", "normal", "position"),  # (S, D)
    ParameterRule(r"layers\.\d+\.self_attn\.[qkv]_proj\.weight", "colwise", "normal", "matrix"),  # (H Q, D), (K Q, D)
    ParameterRule(r"layers\.\d+\.self_attn\.[qkv]_proj\.bias", "colwise", "zeros", "vector"),  # (H Q), (K Q)
    ParameterRule(r"layers\.\d+\.self_attn\.[qk]_norm\.weight", "whole_per_head", "ones", "vector"),  # (Q)
    ParameterRule(r"layers\.\d+\.self_attn\.[qk]_width_norm\.weight", "colwise", "ones", "vector"),  # (H Q), (K Q)
    ParameterRule(r"layers\.\d+\.self_attn\.o_proj\.weight", "rowwise", "residual", "matrix"),  # (D, H Q)
    ParameterRule(r"layers\.\d+\.self_attn\.o_proj\.bias", "whole", "zeros", "vector"),  # (D): added after the sum
    ParameterRule(r"layers\.\d+\.mlp\.(shared\.)?(gate|up)_proj\.weight", "colwise", "normal", "matrix"),  # (F, D)
    ParameterRule(r"layers\.\d+\.mlp\.(gate|up)_proj\.bias", "colwise", "zeros", "vector"),  # (F)
    ParameterRule(r"layers\.\d+\.mlp\.(shared\.)?down_proj\.weight", "rowwise", "residual", "matrix"),  # (D, F)
    ParameterRule(r"layers\.\d+\.mlp\.routed\.router\.weight", "whole_summed", "normal", "router"),  # (E, D)
    ParameterRule(r"layers\.\d+\.mlp\.routed\.experts\.(gate|up)_proj", "colwise", "normal", "matrix"),  # (E, F, D)
    ParameterRule(r"layers\.\d+\.mlp\.routed\.experts\.down_proj", "rowwise", "residual", "matrix"),  # (E, D, F)
    ParameterRule(r"layers\.\d+\.mlp\.down_proj\.bias", "whole", "zeros", "vector"),  # (D)
    ParameterRule(r"layers\.\d+\.(input|post_\w+)_layernorm\.weight", "whole", "ones", "vector"),  # (D)
    ParameterRule(r"layers\.\d+\.(input|post_\w+)_layernorm\.bias", "whole", "zeros", "vector"),  # (D)
    ParameterRule(r"norm\.weight", "whole", "ones", "vector"),  # (D)
    ParameterRule(r"norm\.bias", "whole", "zeros", "vector"),  # (D)
    ParameterRule(r"lm_head\.weight", "vocab", "normal", "head"),  # (V, D)
    ParameterRule(
        r"layers\.\d+\.\w+\.(q|k|v|gate|up)_proj\.lora_A\.weight", "whole_summed", "normal", "adapter"
    ),  # (r, D)
    ParameterRule(
        r"layers\.\d+\.\w+\.(q|k|v|gate|up)_proj\.lora_B\.weight", "colwise", "zeros", "adapter"
    ),  # (F, r) ...
    ParameterRule(
        r"layers\.\d+\.\w+\.(o|down)_proj\.lora_A\.weight", "rowwise", "normal", "adapter"
    ),  # (r, H Q), (r, F)
    ParameterRule(r"layers\.\d+\.\w+\.(o|down)_proj\.lora_B\.weight", "whole_summed", "zeros", "adapter"),  # (D, r)
)

ADDED_RULES: dict[str, tuple[ParameterRule, ...]] = {}
"""rows of the kinds of blocks that a fork has registered (`facts/block_kinds.py`)"""

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|base_layer)\.")


def canonical_name(name: str) -> str:
    """Return a parameter's name without the prefixes that recompute, compile and low-rank updates insert."""
    return _WRAPPERS.sub("", name)


def is_low_rank_factor(name: str) -> bool:
    """Return whether a canonical name, or a key that ends in one, names a factor of a low-rank update (LoRA)."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def rule_of(name: str) -> ParameterRule:
    """Return the row that a canonical name matches. KeyError if the table has no row for the parameter."""
    for rule in chain(PARAMETER_RULES, *ADDED_RULES.values()):
        if re.fullmatch(rule.pattern, name):
            return rule
    raise KeyError(f"no row of torchllm/facts/parameters.py matches the parameter {name!r}")
