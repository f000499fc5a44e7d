"""Published models with the number of their parameters, for families without a file in released/."""

from typing import Any, NamedTuple

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.2079441541679836,
}


QWEN3_5 = {"max_position_embeddings": 262144, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
QWEN3_5 |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": []}
QWEN3_5["rope_parameters"] = {
    "rope_type": "default",
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}


class PublishedModel(NamedTuple):
    fields: dict[str, Any]
    """of its config.json, without those that the default of its class says"""
    parameters: int
    active: int
    """parameters that a token meets"""


PUBLISHED = {
    "olmo3_7b": PublishedModel(  # allenai/Olmo-3-1025-7B
        {"model_type": "olmo3", "vocab_size": 100278, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6}
        | {"rope_theta": 500000, "rope_scaling": YARN},
        7_298_011_136,
        7_298_011_136,
    ),
    "smollm3_3b": PublishedModel(  # HuggingFaceTB/SmolLM3-3B
        {"model_type": "smollm3", "max_position_embeddings": 65536, "rope_theta": 5e6, "no_rope_layer_interval": 4}
        | {"pretraining_tp": 2, "max_window_layers": 28, "use_sliding_window": False},
        3_075_098_624,
        3_075_098_624,
    ),
    "minimax_m2": PublishedModel(  # MiniMaxAI/MiniMax-M2
        {"model_type": "minimax_m2", "rotary_dim": 64, "qk_norm_type": "per_layer", "use_qk_norm": True}
        | {"scoring_func": "sigmoid", "use_routing_bias": True}
        | {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1},
        228_689_748_992,
        11_030_537_216,
    ),
    "glm4.7_flash": PublishedModel(  # zai-org/GLM-4.7-Flash
        {"model_type": "glm4_moe_lite", "rope_theta": 1e6, "topk_method": "noaux_tc"}, 29_943_390_976, 3_896_763_136
    ),
    "hy3": PublishedModel({"model_type": "hy_v3"}, 295_033_528_320, 20_675_715_072),  # tencent/Hy3-preview
    # Qwen/Qwen3-Next-80B-A3B-Instruct; of its 81,324,862,720 on the hub 1,650,471,424 are of the tensors mtp.*
    "qwen3_next_80b_a3b": PublishedModel(
        {"model_type": "qwen3_next", "intermediate_size": 5120, "max_position_embeddings": 262144, "rope_theta": 1e7}
        | {"rope_scaling": None, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "mlp_only_layers": []}
        | {
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "use_sliding_window": False,
            "router_aux_loss_coef": 0.001,
        },
        79_674_391_296,
        3_874_929_408,
    ),
    "qwen1.5_moe_a2.7b": PublishedModel({"model_type": "qwen2_moe"}, 14_315_784_192, 2_689_173_504),
    "qwen2_57b_a14b": PublishedModel(  # Qwen/Qwen2-57B-A14B
        {"model_type": "qwen2_moe", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "rope_theta": 1e6},
        57_408_658_944,
        14_249_270_784,
    ),
    # baidu/ERNIE-4.5-21B-A3B-PT, without the biases of routers and the tensors mtp_*
    "ernie4.5_21b_a3b": PublishedModel({"model_type": "ernie4_5_moe"}, 21_825_436_160, 3_352_148_480),
    "ernie4.5_0.3b": PublishedModel({"model_type": "ernie4_5"}, 360_748_032, 360_748_032),  # baidu/ERNIE-4.5-0.3B-PT
    "qwen3.5_9b": PublishedModel(  # Qwen/Qwen3.5-9B
        QWEN3_5 | {"model_type": "qwen3_5_text"},
        8_953_803_264,
        8_953_803_264,
    ),
    # Qwen/Qwen3.5-27B; of 27,781,427,952 of its form on the hub 424,699,392 are of mtp.*, 460,730,096 of an encoder
    "qwen3.5_27b": PublishedModel(
        QWEN3_5
        | {"model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408}
        | {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48},
        26_895_998_464,
        26_895_998_464,
    ),
    "qwen3.5_35b_a3b": PublishedModel(  # Qwen/Qwen3.5-35B-A3B
        QWEN3_5 | {"model_type": "qwen3_5_moe_text", "router_aux_loss_coef": 0.001},
        34_660_610_688,
        3_454_988_928,
    ),
}
