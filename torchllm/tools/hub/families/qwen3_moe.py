"""Qwen3-MoE (Yang et al. 2025, arXiv 2505.09388), as Qwen3-30B-A3B and Qwen3-235B-A22B: Qwen3's form with experts."""

from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField, TensorRule
from torchllm.tools.hub.families.llama import (
    ATTENTION_TENSORS,
    ENDS,
    MLP,
    MLP_TENSORS,
    NO_ATTENTION_BIAS,
    NORMS_BEFORE,
    SILU,
    decoder_fields,
)
from torchllm.tools.hub.families.mixtral import EXPERTS, ROUTER, ROUTER_TRAINING_FIELDS, STACKED_TENSORS
from torchllm.tools.hub.families.qwen3 import HEAD_NORMS

EXPERT_TENSORS = (
    TensorRule(MLP + "gate.weight", (ROUTER,)),
    TensorRule(MLP + "experts.{expert}.gate_proj.weight", (EXPERTS + "gate_proj",)),
    TensorRule(MLP + "experts.{expert}.up_proj.weight", (EXPERTS + "up_proj",)),
    TensorRule(MLP + "experts.{expert}.down_proj.weight", (EXPERTS + "down_proj",)),
)
"""of all families with experts but Mixtral"""

QWEN3_MOE = HubFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    features={"family": "llama", "qk_norm": "head", "router_scale": 1.0},
    fields=(
        *decoder_fields(vocab=151936, ffn=6144, kv_heads=4, length=32768, layers=24, hidden=2048),
        ConfigField("num_experts", "experts", 128, other_names=("num_local_experts",)),
        ConfigField("num_experts_per_tok", "top_k", 8, is_fixed=False),
        ConfigField("moe_intermediate_size", "expert_ffn", 768),
        ConfigField("norm_topk_prob", "router_renormalize", False, is_fixed=False),
    ),
    required=(
        SILU,
        NO_ATTENTION_BIAS,
        RequiredField("use_sliding_window", (False,), "a sliding window together with experts"),
    ),
    tensors=(*ENDS, *ATTENTION_TENSORS, *HEAD_NORMS, *NORMS_BEFORE, *MLP_TENSORS, *EXPERT_TENSORS),
    stacked_tensors=(*ENDS, *ATTENTION_TENSORS, *HEAD_NORMS, *NORMS_BEFORE, *MLP_TENSORS, *STACKED_TENSORS),
    ignored_fields=(*ROUTER_TRAINING_FIELDS, "sliding_window", "max_window_layers"),
    has_sparse_step=True,
)
