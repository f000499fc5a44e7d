"""MiniMax-M2 (MiniMax 2025): norms of all heads of q and of k, rotary positions of a part of each head, experts in all
blocks, chosen by sigmoid scores with a bias per expert.

Modules that predict the tokens after the next are not read.
"""

from torchllm.tools.hub.families.experts import ROUTER_TRAINING_FIELDS, STACKED_TENSORS, bias_of_router
from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField
from torchllm.tools.hub.families.llama import ATTENTION_TENSORS, ENDS, NORMS_BEFORE, SILU, decoder_fields
from torchllm.tools.hub.families.mixtral import BLOCK_SPARSE_TENSORS, MIXTRAL
from torchllm.tools.hub.families.olmo2 import WIDTH_NORMS

OTHER_TENSORS = (*ENDS, *ATTENTION_TENSORS, *WIDTH_NORMS, *NORMS_BEFORE)

MINIMAX_M2 = HubFamily(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    features=MIXTRAL.features | {"qk_norm": "width", "router_score": "sigmoid", "router_bias": True},
    fields=(
        *decoder_fields(
            vocab=200064,
            ffn=1536,
            kv_heads=8,
            length=196608,
            head_dim=128,
            layers=62,
            hidden=3072,
            heads=48,
            ffn_key="expert_ffn",
        ),
        ConfigField("num_local_experts", "experts", 256, other_names=("num_experts",)),
        ConfigField("num_experts_per_tok", "top_k", 8, is_fixed=False),
    ),
    required=(
        SILU,
        # transformers ignores them; vLLM needs them.
        RequiredField("use_qk_norm", (True,), "no norms of q and k"),
        RequiredField("qk_norm_type", ("per_layer",), "norms of each head of q and k"),
        RequiredField("scoring_func", ("sigmoid",), "another score of the experts"),
        RequiredField("use_routing_bias", (True,), "a router without a bias per expert"),
    ),
    tensors=(
        *OTHER_TENSORS,
        *BLOCK_SPARSE_TENSORS,
        bias_of_router("e_score_correction_bias")._replace(
            key="model.layers.{}.block_sparse_moe.e_score_correction_bias"
        ),
    ),
    stacked_tensors=(
        *OTHER_TENSORS,
        *STACKED_TENSORS,
        bias_of_router("e_score_correction_bias"),
    ),
    ignored_fields=(*ROUTER_TRAINING_FIELDS, "attn_type_list", "mtp_transformer_layers", "shared_intermediate_size"),
    has_prediction_blocks=True,
    constant_fields={"use_mtp": False, "num_mtp_modules": 0},
    rotary_fraction=1.0,
    rotary_width="rotary_dim",
    rope_theta=5e6,
)
