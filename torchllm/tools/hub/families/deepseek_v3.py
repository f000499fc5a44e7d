"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437) and the models that are published in its form: Moonlight, Kimi K2.

Latent attention, and a router of sigmoid scores with a bias per expert, within groups of experts. Files may hold one
block more, which predicts the token after the next (model.mtp_depth).
"""

from torchllm.tools.hub.families import experts
from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField
from torchllm.tools.hub.families.latent_attention import LATENT_FIELDS, LATENT_TENSORS
from torchllm.tools.hub.families.llama import ENDS, NO_ATTENTION_BIAS, NORMS_BEFORE, SILU, decoder_fields
from torchllm.tools.hub.families.multi_token import MTP_COPIES, MTP_DEPTH, MTP_TENSORS

OTHER_TENSORS = (*ENDS, *LATENT_TENSORS, *NORMS_BEFORE, *experts.MIXTURE_TENSORS, *MTP_TENSORS)
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
        *LATENT_FIELDS,
        *experts.MIXTURE_FIELDS,
        MTP_DEPTH,
        ConfigField("n_routed_experts", "experts", 256, other_names=("num_local_experts",)),
        ConfigField("moe_intermediate_size", "expert_ffn", 2048),
        ConfigField("first_k_dense_replace", "dense_layers", 3),
        ConfigField("routed_scaling_factor", "router_scale", 2.5, is_fixed=False),
        ConfigField("n_group", "router_groups", 8, is_fixed=False),
        ConfigField("topk_group", "router_top_groups", 4, is_fixed=False),
    ),
    required=(
        *(SILU, NO_ATTENTION_BIAS),
        # transformers ignores them; vLLM has a softmax, and no bias, without them.
        RequiredField("scoring_func", ("sigmoid",), "another score of the router"),
        RequiredField("topk_method", ("noaux_tc",), "another choice of experts"),
    ),
    unwritten=(RequiredField("moe_layer_freq", (1,), "dense blocks after those with experts"),),
    tensors=(*OTHER_TENSORS, *experts.EXPERT_TENSORS),
    stacked_tensors=(*OTHER_TENSORS, *experts.STACKED_TENSORS),
    ignored_tensors=MTP_COPIES,
    ignored_fields=(
        *experts.ROUTER_TRAINING_FIELDS,
        *("head_dim", "qk_head_dim", "pretraining_tp", "ep_size", "aux_loss_alpha", "seq_aux"),
    ),
    has_prediction_blocks=True,
    has_scaled_scores=True,
    names_own_code=True,
)
