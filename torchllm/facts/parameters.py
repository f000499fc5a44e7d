"""How each parameter of a model is cut, starts and is optimized, by its canonical name. No torch.

Read by `parallel/tensor.py` (the cut), `parallel/initialize.py` (the start), the optimizer (learning rate and weight
decay by role) and the planner (sizes per rank). Names are canonical: as in Hugging Face's Llama, without the prefixes
that wrappers add. The parameters of blocks are declared by their parts (`facts/parts`); every parameter of every model
has one rule (tested).

Shapes: D hidden, V vocabulary, S positions, r rank of LoRA.
"""

import re

from torchllm.facts.parts.part import ParameterRule
from torchllm.facts.parts.registry import buffer_start, parameter_of_block

END_RULES = {
    "embed_tokens.weight": ParameterRule("vocab", "normal", "embedding"),  # (V, D)
    "embed_positions.weight": ParameterRule("whole", "normal", "position"),  # (S, D)
    "norm.weight": ParameterRule("whole", "identity", "vector"),  # (D)
    "norm.bias": ParameterRule("whole", "zeros", "vector"),  # (D)
    "lm_head.weight": ParameterRule("vocab", "normal", "head"),  # (V, D)
}
"""rules of the parameters before and after the blocks"""
LOW_RANK_RULES = {
    ("colwise", "lora_A"): ParameterRule("whole_summed", "normal", "adapter"),  # (r, D)
    ("colwise", "lora_B"): ParameterRule("colwise", "zeros", "adapter"),  # (F, r) ...
    ("rowwise", "lora_A"): ParameterRule("rowwise", "normal", "adapter"),  # (r, H Q), (r, F)
    ("rowwise", "lora_B"): ParameterRule("whole_summed", "zeros", "adapter"),  # (D, r)
}
"""rules of the factors of a low-rank update, by the cut of the matrix that is updated"""
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|base_layer)\.")
_BLOCK = re.compile(r"layers\.\d+\.")
_FACTOR = re.compile(r"(.*)\.(lora_[AB])(\.weight)")


def canonical_name(name: str) -> str:
    """Return a parameter's name without the prefixes that recompute, compile and low-rank updates insert."""
    return _WRAPPERS.sub("", name)


def is_low_rank_factor(name: str) -> bool:
    """Return whether a canonical name, or a key that ends in one, names a factor of a low-rank update (LoRA)."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def rule_of(name: str) -> ParameterRule:
    """Return the rule of a parameter by its canonical name. KeyError if no part declares it."""
    if name in END_RULES:
        return END_RULES[name]
    if factor := _FACTOR.fullmatch(name):
        return LOW_RANK_RULES[rule_of(factor[1] + factor[3]).cut, factor[2]]
    within_block = _BLOCK.sub("", name, count=1)
    parameter = parameter_of_block(within_block) if _BLOCK.match(name) else None
    if parameter is None:
        raise KeyError(f"no part of torchllm/facts/parts declares the parameter {name!r}")
    return parameter.rule


def start_of_buffer(name: str) -> float:
    """Return the initial value of a buffer's elements, by its canonical name."""
    return buffer_start(_BLOCK.sub("", name, count=1))
