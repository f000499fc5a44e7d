"""Qwen1.5-MoE and Qwen2-MoE (Qwen Team 2024, arXiv 2407.10671), as Qwen2-57B-A14B: Qwen2's form with experts, and
shared ones with a gate.
"""

from torchllm.tools.hub.families.experts import (
    EXPERT_TENSORS,
    OF_EXPERTS,
    ROUTER_TRAINING_FIELDS,
    SHARED_TENSORS,
    STACKED_TENSORS,
)
from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField
from torchllm.tools.hub.families.llama import DECODER_TENSORS, NORMS_BEFORE, SILU, decoder_fields
from torchllm.tools.hub.families.qwen2 import QKV_BIASES

OTHER_TENSORS = (*DECODER_TENSORS, *QKV_BIASES, *NORMS_BEFORE, *SHARED_TENSORS)

QWEN2_MOE = HubFamily(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    features={"family": "llama"} | OF_EXPERTS,
    fields=(
        *decoder_fields(vocab=151936, ffn=5632, kv_heads=16, length=32768, layers=24, hidden=2048, heads=16),
        ConfigField("qkv_bias", "qkv_bias", True),
        ConfigField("num_experts", "experts", 60),
        ConfigField("num_experts_per_tok", "top_k", 4, is_fixed=False),
        ConfigField("moe_intermediate_size", "expert_ffn", 1408),
        ConfigField("shared_expert_intermediate_size", "shared_experts", 5632),
        ConfigField("norm_topk_prob", "router_renormalize", False, is_fixed=False),
    ),
    required=(SILU, RequiredField("use_sliding_window", (False,), "a sliding window together with experts")),
    tensors=(*OTHER_TENSORS, *EXPERT_TENSORS),
    stacked_tensors=(*OTHER_TENSORS, *STACKED_TENSORS),
    ignored_fields=(*ROUTER_TRAINING_FIELDS, "sliding_window", "max_window_layers"),
    has_shared_width=True,
    has_sparse_step=True,
)
