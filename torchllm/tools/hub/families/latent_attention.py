"""Latent attention: fields and tensors that families share."""

from torchllm.tools.hub.families.family import ConfigField, TensorRule
from torchllm.tools.hub.families.llama import ATTENTION

NAMES = {
    **{f"{name}_proj": f"{name}_proj" for name in ("q", "q_a", "q_b", "kv_b", "o")},
    "kv_a_proj": "kv_a_proj_with_mqa",
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
}
"""layers of latent attention here and in files"""
LATENT_TENSORS = tuple(
    TensorRule(f"{ATTENTION}{key}.weight", (f"layers.{{}}.self_attn.{name}.weight",)) for name, key in NAMES.items()
)
LATENT_FIELDS = (
    ConfigField("q_lora_rank", "latent_q_width", 1536),
    ConfigField("kv_lora_rank", "latent_kv_width", 512),
    ConfigField("qk_nope_head_dim", "nope_head_dim", 128),
    ConfigField("qk_rope_head_dim", "rope_head_dim", 64),
    ConfigField("v_head_dim", "v_head_dim", 128),
    ConfigField("rope_interleave", "rope_interleaved", True),
)
