"""HY 3 (Tencent 2026): norms of each head of q and k, a dense first block, then experts: one for all tokens, and others
that sigmoid scores with a bias per expert choose.

A published file may hold one block more, which predicts the token after the next and is not read here.
"""

from torchllm.tools.hub.families import experts
from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField, TensorRule, with_defaults
from torchllm.tools.hub.families.llama import (
    DECODER_TENSORS,
    MLP,
    NO_ATTENTION_BIAS,
    NORMS_BEFORE,
    SILU,
    decoder_fields,
)
from torchllm.tools.hub.families.qwen3 import HEAD_NORMS

OTHER_TENSORS = (*DECODER_TENSORS, *HEAD_NORMS, *NORMS_BEFORE)
SIZES = decoder_fields(
    vocab=120832, ffn=13312, kv_heads=8, length=131072, epsilon=1e-5, head_dim=128, layers=80, hidden=4096, heads=64
)

HY_V3 = HubFamily(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    features={"family": "llama", "qk_norm": "head", "router_score": "sigmoid", "router_bias": True}
    | {"router_renormalize": True},
    fields=(
        *with_defaults(SIZES, initial_std=0.006),
        ConfigField("num_experts", "experts", 192, other_names=("num_local_experts",)),
        ConfigField("num_experts_per_tok", "top_k", 8, is_fixed=False),
        ConfigField("num_shared_experts", "shared_experts", 1),
        ConfigField("moe_intermediate_size", "expert_ffn", 1536),
        ConfigField("first_k_dense_replace", "dense_layers", 1),
        ConfigField("router_scaling_factor", "router_scale", 2.826, is_fixed=False),
    ),
    required=(SILU, NO_ATTENTION_BIAS, RequiredField("mlp_bias", (False,), "biases of the feed-forward layer")),
    tensors=(
        *OTHER_TENSORS,
        TensorRule(MLP + "router.gate.weight", (experts.ROUTER,)),
        experts.bias_of_router("expert_bias"),
        *experts.shared_experts("shared_mlp"),
        *experts.EXPERT_TENSORS[1:],
    ),
    stacked_tensors=(
        *OTHER_TENSORS,
        experts.bias_of_router("e_score_correction_bias"),
        *experts.shared_experts("shared_experts"),
        *experts.STACKED_TENSORS,
    ),
    ignored_fields=(*experts.ROUTER_TRAINING_FIELDS, "enable_moe_fp32_combine", "num_nextn_predict_layers"),
    has_mlp_layer_types=True,
    has_prediction_blocks=True,
    rope_theta=11_158_840.0,
)
