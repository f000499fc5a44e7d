"""Qwen3-MoE (Yang et al. 2025, arXiv 2505.09388), as Qwen3-30B-A3B and Qwen3-235B-A22B: Qwen3's form with experts."""

from torchllm.tools.hub.families.experts import EXPERT_TENSORS, ROUTER_TRAINING_FIELDS, STACKED_TENSORS
from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField
from torchllm.tools.hub.families.llama import DECODER_TENSORS, NO_ATTENTION_BIAS, NORMS_BEFORE, SILU, decoder_fields
from torchllm.tools.hub.families.qwen3 import HEAD_NORMS

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
    tensors=(*DECODER_TENSORS, *HEAD_NORMS, *NORMS_BEFORE, *EXPERT_TENSORS),
    stacked_tensors=(*DECODER_TENSORS, *HEAD_NORMS, *NORMS_BEFORE, *STACKED_TENSORS),
    ignored_fields=(*ROUTER_TRAINING_FIELDS, "sliding_window", "max_window_layers"),
    has_sparse_step=True,
)
