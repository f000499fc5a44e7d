"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437) and the models that are published in its form: Moonlight, Kimi K2.

Latent attention, and a router of sigmoid scores with a bias per expert, within groups of experts. Files may hold one
block more, which predicts the token after the next (model.mtp_depth).
"""

from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField, TensorRule
from torchllm.tools.hub.families.glm4_moe import MIXTURE_FIELDS, MIXTURE_TENSORS, MTP_COPIES, MTP_DEPTH, MTP_TENSORS
from torchllm.tools.hub.families.llama import ATTENTION, ENDS, NO_ATTENTION_BIAS, NORMS_BEFORE, SILU, decoder_fields
from torchllm.tools.hub.families.mixtral import ROUTER_TRAINING_FIELDS, STACKED_TENSORS
from torchllm.tools.hub.families.qwen3_moe import EXPERT_TENSORS

NAMES = {
    **{f"{name}_proj": f"{name}_proj" for name in ("q", "q_a", "q_b", "kv_b", "o")},
    "kv_a_proj": "kv_a_proj_with_mqa",
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
}
"""layers of latent attention here and in files"""
OTHER_TENSORS = (
    *ENDS,
    *(TensorRule(f"{ATTENTION}{key}.weight", (f"layers.{{}}.self_attn.{name}.weight",)) for name, key in NAMES.items()),
    *NORMS_BEFORE,
    *MIXTURE_TENSORS,
    *MTP_TENSORS,
)
SIZES = decoder_fields(
    vocab=129280, ffn=18432, kv_heads=128, length=4096, epsilon=1e-6, layers=61, hidden=7168, heads=128
)

DEEPSEEK_V3 = HubFamily(
    model_type="deepseek_v3",
    other_types=("kimi_k2",),
    architecture="DeepseekV3ForCausalLM",
    features={"family": "llama", "mixer": "latent_attention", "router_score": "sigmoid", "router_bias": True},
    fields=(
        *(size for size in SIZES if size.key != "head_dim"),
        ConfigField("q_lora_rank", "latent_q_width", 1536),
        ConfigField("kv_lora_rank", "latent_kv_width", 512),
        ConfigField("qk_nope_head_dim", "nope_head_dim", 128),
        ConfigField("qk_rope_head_dim", "rope_head_dim", 64),
        ConfigField("v_head_dim", "v_head_dim", 128),
        ConfigField("rope_interleave", "rope_interleaved", True),
        *MIXTURE_FIELDS,
        MTP_DEPTH,
        ConfigField("n_routed_experts", "experts", 256, other_names=("num_local_experts",)),
        ConfigField("moe_intermediate_size", "expert_ffn", 2048),
        ConfigField("first_k_dense_replace", "dense_layers", 3),
        ConfigField("routed_scaling_factor", "router_scale", 2.5, is_fixed=False),
        ConfigField("n_group", "router_groups", 8, is_fixed=False),
        ConfigField("topk_group", "router_top_groups", 4, is_fixed=False),
    ),
    required=(SILU, NO_ATTENTION_BIAS),
    unwritten=(
        RequiredField("scoring_func", ("sigmoid",), "another score of the router"),
        RequiredField("topk_method", ("noaux_tc",), "another choice of experts"),
        RequiredField("moe_layer_freq", (1,), "dense blocks after those with experts"),
    ),
    tensors=(*OTHER_TENSORS, *EXPERT_TENSORS),
    stacked_tensors=(*OTHER_TENSORS, *STACKED_TENSORS),
    ignored_tensors=MTP_COPIES,
    ignored_fields=(
        *ROUTER_TRAINING_FIELDS,
        *("head_dim", "qk_head_dim", "pretraining_tp", "ep_size", "aux_loss_alpha", "seq_aux"),
    ),
    has_prediction_blocks=True,
    has_scaled_scores=True,
    names_own_code=True,
)
