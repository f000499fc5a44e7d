"""GLM-4.5 and GLM-4.5-Air (GLM-4.5 Team 2025, arXiv 2508.06471): a router of sigmoid scores with a bias per expert,
shared experts, dense first blocks, and rotary positions of a half of each head.

A published file holds one block more, which predicts the token after the next (model.mtp_depth).
"""

from torchllm.tools.hub.families.experts import (
    EXPERT_TENSORS,
    MIXTURE_FIELDS,
    MIXTURE_TENSORS,
    ROUTER_TRAINING_FIELDS,
    STACKED_TENSORS,
)
from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField
from torchllm.tools.hub.families.llama import ATTENTION_TENSORS, ENDS, NORMS_BEFORE, SILU, decoder_fields
from torchllm.tools.hub.families.multi_token import MTP_COPIES, MTP_DEPTH, MTP_TENSORS
from torchllm.tools.hub.families.qwen2 import QKV_BIASES
from torchllm.tools.hub.families.qwen3 import HEAD_NORMS

OTHER_TENSORS = (*ENDS, *ATTENTION_TENSORS, *QKV_BIASES, *HEAD_NORMS, *NORMS_BEFORE, *MIXTURE_TENSORS, *MTP_TENSORS)
GLM4_MOE = HubFamily(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    features={"family": "llama", "router_score": "sigmoid", "router_bias": True},
    fields=(
        *decoder_fields(
            vocab=151552, ffn=10944, kv_heads=8, length=131072, epsilon=1e-5, layers=46, hidden=4096, heads=96
        ),
        ConfigField("attention_bias", "qkv_bias", False),
        ConfigField("use_qk_norm", "qk_norm", False, spellings=((False, "none"), (True, "head"))),
        ConfigField("n_routed_experts", "experts", 128, other_names=("num_local_experts",)),
        *MIXTURE_FIELDS,
        MTP_DEPTH,
        ConfigField("moe_intermediate_size", "expert_ffn", 1408),
        ConfigField("first_k_dense_replace", "dense_layers", 1),
        ConfigField("routed_scaling_factor", "router_scale", 1.0, is_fixed=False),
    ),
    required=(
        SILU,
        RequiredField("n_group", (1,), "experts in groups, and tokens limited to some groups"),
        RequiredField("topk_group", (1,), "experts in groups, and tokens limited to some groups"),
    ),
    tensors=(*OTHER_TENSORS, *EXPERT_TENSORS),
    stacked_tensors=(*OTHER_TENSORS, *STACKED_TENSORS),
    ignored_tensors=MTP_COPIES,
    ignored_fields=ROUTER_TRAINING_FIELDS,
    has_prediction_blocks=True,
    rotary_fraction=0.5,
)
