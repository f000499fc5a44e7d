"""Tiny configs of each published family, as transformers makes them."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
ALL_SPARSE = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
LATENTS = GLM_EXPERTS | {
    **{"num_key_value_heads": 4, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6},
    **{"v_head_dim": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2},
    **{"routed_scaling_factor": 2.5, "bos_token_id": None, "eos_token_id": None},
}
"""latent attention, and a router within groups of experts"""
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 16}
DELTA |= {"rms_norm_eps": 1e-2}
"""Gated DeltaNet. With an epsilon of 1e-6 its norm makes narrow results that are small by chance large: transformers'
own losses then differ by 1e-4 after 20 steps from weights that differ by 1e-7, with this one by 4e-7"""
SMALLER = {".A_log": 3.0} | dict.fromkeys(("_norm.weight", "layernorm.weight", "model.norm.weight"), 1.0)
"""what weights of models with Gated DeltaNet have less, so that 1 + w is around 1, and decays are slower: of faster
ones transformers' differences of sums in float32 lose digits, 6e-5 of the logits after 150 tokens"""
QWEN_EXPERTS = EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 1024}
"""widths that divide, and are divided by, the defaults of the class: each may be missing"""
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "attention_factor": 1.3,
}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
OLMO3_ROPE = {FULL: YARN | {"rope_theta": 500000.0}, SLIDING: {"rope_type": "default", "rope_theta": 500000.0}}
GEMMA_ROPE = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
QUERY_SCALED = YARN | {"llama_4_scaling_beta": 0.7, "mscale": 1.0, "mscale_all_dim": 1.0}
NO_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""the ids of the class are over the vocabulary"""
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama31": ("LlamaConfig", SIZES | {"rope_parameters": LLAMA3_SCALING, "tie_word_embeddings": True}),
    "yarn": ("LlamaConfig", SIZES | {"rope_parameters": YARN}),
    "yarn-whole": ("LlamaConfig", SIZES | {"rope_parameters": YARN | {"truncate": False, "beta_slow": 2.0}}),
    "one-group": ("LlamaConfig", SIZES | {"num_key_value_heads": 1, "head_dim": 12}),
    "every-head": ("LlamaConfig", SIZES | {"num_key_value_heads": 4}),
    "linear": ("LlamaConfig", SIZES | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": 9}),
    "mistral-nemo": ("MistralConfig", SIZES | {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen2-window": (
        "Qwen2Config",
        SIZES | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
    "ministral": (
        "MinistralConfig",
        SIZES | {"head_dim": 6, "sliding_window": 9, "layer_types": [FULL, SLIDING] * 2},
    ),
    "ministral3": ("Ministral3Config", SIZES | {"head_dim": 6, "rope_parameters": QUERY_SCALED}),
    "olmo3": ("Olmo3Config", SIZES | NO_ENDS | {"sliding_window": 9, "rope_parameters": OLMO3_ROPE}),
    "olmo3-linear": (
        "Olmo3Config",
        SIZES
        | NO_ENDS
        | {"sliding_window": 5, "layer_types": [FULL, SLIDING, SLIDING, FULL]}
        | {"rope_parameters": OLMO3_ROPE | {FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}},
    ),
    "smollm3": ("SmolLM3Config", SIZES | NO_ENDS | {"rope_parameters": YARN}),
    "smollm3-windows": (
        "SmolLM3Config",
        SIZES
        | NO_ENDS
        | {
            "use_sliding_window": True,
            "sliding_window": 9,
            "no_rope_layers": [0, 1, 1, 0],
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        SIZES
        | NO_ENDS
        | {"num_hidden_layers": 7, "head_dim": 12, "sliding_window": 9, "query_pre_attn_scalar": 5}
        | {"tie_word_embeddings": True, "rope_parameters": GEMMA_ROPE},
    ),
    "gemma3-windows": (
        "Gemma3TextConfig",
        SIZES
        | NO_ENDS
        | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "layer_types": [FULL, SLIDING] * 2}
        | {"tie_word_embeddings": False, "final_logit_softcapping": 3.0},
    ),
    "gemma2": (
        "Gemma2Config",
        SIZES
        | NO_ENDS
        | {"head_dim": 12, "sliding_window": 9, "query_pre_attn_scalar": 10, "tie_word_embeddings": True}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0},
    ),
    "gemma4-dense": (
        "Gemma4TextConfig",
        SIZES
        | NO_ENDS
        | {"num_hidden_layers": 7, "head_dim": 12, "global_head_dim": 16, "sliding_window": 9}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "final_logit_softcapping": 3.0}
        | {"hidden_size_per_layer_input": 0, "num_key_value_heads": 4, "rms_norm_eps": 1e-2},  # as DELTA
    ),
    "gemma4-experts": (
        "Gemma4TextConfig",
        SIZES
        | NO_ENDS
        | {"head_dim": 12, "global_head_dim": 16, "sliding_window": 9, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 2, "num_key_value_heads": 4, "hidden_size_per_layer_input": 0}
        | {"rms_norm_eps": 1e-2}  # as DELTA
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40},
    ),
    "gemma4-values": (
        "Gemma4TextConfig",
        SIZES
        | NO_ENDS
        | {"head_dim": 8, "global_head_dim": 20, "sliding_window": 5, "layer_types": [FULL, SLIDING, SLIDING, FULL]}
        | {"hidden_size_per_layer_input": 0, "tie_word_embeddings": False}
        | {
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0, "rope_theta": 1e4},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "granite": (
        "GraniteConfig",
        SIZES
        | NO_ENDS
        | {"embedding_multiplier": 12.0, "attention_multiplier": 0.5}
        | {"residual_multiplier": 0.22, "logits_scaling": 6.0},
    ),
    "olmo2": ("Olmo2Config", SIZES | {"pad_token_id": None, "eos_token_id": None}),
    "qwen2-windows": (
        "Qwen2Config",
        SIZES | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
    ),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 6, "rms_norm_eps": 1e-5}),
    "qwen3-windows": (
        "Qwen3Config",
        SIZES
        | {"head_dim": 6, "use_sliding_window": True, "sliding_window": 9}
        | {"layer_types": [SLIDING, FULL, FULL, SLIDING]},
    ),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 6}),
    "mixtral-window": ("MixtralConfig", SIZES | {"num_local_experts": 4, "sliding_window": 9}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        SIZES | EXPERTS | {"head_dim": 6, "moe_intermediate_size": 12, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "olmoe": ("OlmoeConfig", SIZES | EXPERTS | {"pad_token_id": None, "eos_token_id": None}),
    "glm4-moe": (
        "Glm4MoeConfig",
        SIZES
        | GLM_EXPERTS
        | {"head_dim": 12, "first_k_dense_replace": 2, "n_shared_experts": 2, "use_qk_norm": True}
        | {"attention_bias": True, "routed_scaling_factor": 2.5},
    ),
    "glm4-moe-air": ("Glm4MoeConfig", SIZES | GLM_EXPERTS | {"partial_rotary_factor": 0.25, "attention_bias": True}),
    "glm4-moe-yarn": (
        "Glm4MoeConfig",
        SIZES
        | GLM_EXPERTS
        | {"head_dim": 16, "attention_bias": True, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        SIZES
        | NO_ENDS
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "minimax-m2-yarn": (
        "MiniMaxM2Config",
        SIZES | NO_ENDS | {"num_local_experts": 8, "head_dim": 8, "rope_parameters": YARN},
    ),
    "gpt-oss": (
        "GptOssConfig",
        SIZES
        | NO_ENDS
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 6, "sliding_window": 9}
        | {"rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False}},
    ),
    "gpt-oss-linear": (
        "GptOssConfig",
        SIZES
        | NO_ENDS
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}
        | {"layer_types": [FULL, FULL, SLIDING, FULL], "num_key_value_heads": 4}
        | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 150000.0}},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        SIZES | LATENTS | {"q_lora_rank": 20, "rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 1.2}},
    ),
    "moonlight": ("DeepseekV3Config", SIZES | LATENTS | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "kimi-k2": (
        "DeepseekV3Config",
        SIZES | LATENTS | {"rope_interleave": False, "rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 1.0}},
    ),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", SIZES | LATENTS | {"q_lora_rank": 20, "n_group": 1, "topk_group": 1}),
    "hy-v3": (
        "HYV3Config",
        SIZES
        | NO_ENDS
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "num_shared_experts": 2}
        | {"head_dim": 12, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
    ),
    "seed-oss": (
        "SeedOssConfig",
        SIZES
        | NO_ENDS
        | {"head_dim": 10, "attention_out_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "ernie4.5": ("Ernie4_5Config", SIZES | NO_ENDS | {"head_dim": 12, "tie_word_embeddings": True}),
    "ernie4.5-yarn": (
        "Ernie4_5Config",
        SIZES | NO_ENDS | {"head_dim": None, "rope_parameters": YARN, "tie_word_embeddings": False},
    ),
    "ernie4.5-moe": (
        "Ernie4_5_MoeConfig",
        SIZES | NO_ENDS | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 12, "moe_num_shared_experts": 1},
    ),
    "ernie4.5-moe-yarn": (
        "Ernie4_5_MoeConfig",
        SIZES
        | NO_ENDS
        | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_layer_start_index": 2}
        | {"rope_parameters": YARN, "tie_word_embeddings": False},
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        SIZES | QWEN_EXPERTS | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 1408},
    ),
    "qwen2-moe-dense": (
        "Qwen2MoeConfig",
        SIZES
        | QWEN_EXPERTS
        | {"moe_intermediate_size": 88, "shared_expert_intermediate_size": 1408, "mlp_only_layers": [0]}
        | {"qkv_bias": False, "norm_topk_prob": True, "rope_parameters": YARN},
    ),
    "qwen3-next": ("Qwen3NextConfig", SIZES | DELTA | QWEN_EXPERTS | {"head_dim": 16}),
    "qwen3-next-dense": (
        "Qwen3NextConfig",
        SIZES
        | DELTA
        | QWEN_EXPERTS
        | {"head_dim": 8, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "mlp_only_layers": [0]}
        | {"layer_types": [LINEAR, FULL, FULL, LINEAR], "norm_topk_prob": False, "linear_conv_kernel_dim": 3}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", SIZES | DELTA | {"head_dim": 16}),
    "qwen3.5-groups": (
        "Qwen3_5TextConfig",
        SIZES
        | DELTA
        | {"head_dim": 8, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 2, "linear_value_head_dim": 10}
        | {"layer_types": [FULL, LINEAR, LINEAR, FULL]}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", ALL_SPARSE | DELTA | QWEN_EXPERTS | {"head_dim": 16}),
    "qwen3.5-moe-narrow": (
        "Qwen3_5MoeTextConfig",
        ALL_SPARSE
        | DELTA
        | QWEN_EXPERTS
        | {"head_dim": 8, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}},
    ),
    "olmo-hybrid": ("OlmoHybridConfig", SIZES | NO_ENDS | DELTA),
    "olmo-hybrid-nope": (
        "OlmoHybridConfig",
        SIZES
        | NO_ENDS
        | {"linear_key_head_dim": 8, "linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3}
        | {"layer_types": [FULL, LINEAR, LINEAR, FULL], "rms_norm_eps": 1e-2}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    ),
    "nanochat": ("NanoChatConfig", SIZES | NO_ENDS),
    "nanochat-linear": (
        "NanoChatConfig",
        SIZES
        | NO_ENDS
        | {"num_key_value_heads": 4, "rms_norm_eps": 1e-2, "final_logit_softcapping": 1.5}
        | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "gpt2": ("GPT2Config", {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 64}),
}
"""name -> class of transformers, and its arguments"""
SUPPORTED_DEFAULTS: dict[str, dict[str, Any]] = {"gemma4_text": {"hidden_size_per_layer_input": 0}}
SUPPORTED_DEFAULTS["gemma4"] = {"text_config": SUPPORTED_DEFAULTS["gemma4_text"]}
"""by model_type: fields without which a default config is not supported"""
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "LlavaConfig",
        {
            "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
            "text_config": SIZES | {"model_type": "llama"},
            "image_token_index": 95,
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
            "text_config": SIZES | {"model_type": "mistral", "sliding_window": None, "head_dim": 10},
            "image_token_index": 95,
            "tie_word_embeddings": False,
        },
    ),
}
"""models of text and more, as in CONFIGS"""
TEXT_PARTS["gemma4"] = (
    "Gemma4Config",
    {
        "vision_config": VISION | {"num_key_value_heads": 2, "head_dim": 8},
        "text_config": CONFIGS["gemma4-dense"][1] | {"model_type": "gemma4_text", "pad_token_id": 0},
    },
)
VISION_OF_QWEN = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
for name, text in (("qwen3_5", "qwen3.5"), ("qwen3_5_moe", "qwen3.5-moe")):
    kind, fields = CONFIGS[text]
    fields = fields | {"model_type": f"{name}_text", "tie_word_embeddings": False}
    TEXT_PARTS[name] = kind.replace("Text", ""), {"vision_config": VISION_OF_QWEN, "text_config": fields}


def hub_config(name: str) -> Any:
    kind, arguments = (CONFIGS | TEXT_PARTS)[name]
    return getattr(transformers, kind)(**arguments)


def as_json(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


@functools.cache
def content_of(name: str) -> dict[str, Any]:
    """Return the config.json of a tiny published model. Copy it to change it."""
    return as_json(hub_config(name))


def save_published(
    name: str, folder: Path, max_shard_size: str = "5GB", dtype: str = "float32", stacks: bool = False, **changes: Any
) -> Any:
    """Write a tiny model with random weights as transformers does; return it, an object of transformers.

    stacks: as the modules of transformers 5 are, in which the experts of a block are stacked.
    """
    config = hub_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    auto = transformers.AutoModelForImageTextToText if name in TEXT_PARTS else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.normal_(mean=1.0, std=0.2)
        for key, parameter in model.named_parameters():
            if hasattr(config.get_text_config(), "linear_num_key_heads"):
                smaller = SMALLER if "qwen" in name else {".A_log": 3.0}
                parameter.sub_(next((shift for end, shift in smaller.items() if key.endswith(end)), 0.0))
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.normal_(mean=key.endswith("layer_scalar"), std=0.2)
    stacks |= name.startswith("olmo-hybrid")  # the others of transformers 5.24 are not those that are published
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size, **({"save_original_format": False} if stacks else {}))
    return model.float()
