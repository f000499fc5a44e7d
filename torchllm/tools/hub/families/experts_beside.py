"""Experts next to a dense layer: fields and tensors of Gemma 4 26B-A4B."""

from torchllm.tools.hub.families.family import ConfigField
from torchllm.tools.hub.families.family import TensorRule as Rule


def beside(name: str, *parameters: str) -> Rule:
    """Return the rule of a published tensor of a block, and of parameters of its feed-forward part."""
    return Rule(f"model.layers.{{}}.{name}", tuple(f"layers.{{}}.mlp.{parameter}" for parameter in parameters))


BESIDE_TENSORS = (
    beside("mlp.gate_proj.weight", "dense.gate_proj.weight"),
    beside("mlp.up_proj.weight", "dense.up_proj.weight"),
    beside("mlp.down_proj.weight", "dense.down_proj.weight"),
    beside("pre_feedforward_layernorm.weight", "dense_input_norm.weight"),
    beside("post_feedforward_layernorm_1.weight", "dense_norm.weight"),
    beside("pre_feedforward_layernorm_2.weight", "routed.input_norm.weight"),
    beside("post_feedforward_layernorm_2.weight", "routed_norm.weight"),
    beside("router.proj.weight", "routed.router.weight"),
    beside("router.scale", "routed.router.input_scale"),
    beside("router.per_expert_scale", "routed.router.expert_scale"),
    beside("experts.gate_up_proj", "routed.experts.gate_proj", "routed.experts.up_proj"),
    beside("experts.down_proj", "routed.experts.down_proj"),
)
"""of experts next to a dense layer"""
BESIDE_FIELDS = (
    ConfigField("enable_moe_block", "dense_beside", False),
    ConfigField("num_experts", "experts", None, needs="dense_beside"),
    ConfigField("top_k_experts", "top_k", None, is_fixed=False, needs="dense_beside"),
    ConfigField("moe_intermediate_size", "expert_ffn", None, needs="dense_beside"),
)
