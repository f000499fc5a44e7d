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
}
