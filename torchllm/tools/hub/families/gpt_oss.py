"""gpt-oss (OpenAI 2025, arXiv 2508.10925): sinks, a window in every second block, and experts with biases.

The published files hold the matrices of experts in MXFP4 (`tools/hub/quantization.py`).
"""

from torchllm.tools.hub.families import llama
from torchllm.tools.hub.families.experts import EXPERTS, ROUTER, ROUTER_TRAINING_FIELDS
from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField, TensorRule
from torchllm.tools.hub.families.gemma2 import windows_in_every_second
from torchllm.tools.hub.families.qwen2 import QKV_BIASES

GATE_AND_UP = (EXPERTS + "gate_proj", EXPERTS + "up_proj")
GPT_OSS_TENSORS = (
    *llama.ENDS,
    *llama.ATTENTION_TENSORS,
    *QKV_BIASES,
    TensorRule(llama.ATTENTION + "o_proj.bias", ("layers.{}.self_attn.o_proj.bias",)),
    TensorRule(llama.ATTENTION + "sinks", ("layers.{}.self_attn.sinks.weight",)),
    *llama.NORMS_BEFORE,
    TensorRule(llama.MLP + "router.weight", (ROUTER,)),
    TensorRule(llama.MLP + "router.bias", ("layers.{}.mlp.routed.router.logit_bias",)),
    TensorRule(llama.MLP + "experts.gate_up_proj", GATE_AND_UP, is_transposed=True, alternates=True),
    TensorRule(llama.MLP + "experts.gate_up_proj_bias", (EXPERTS + "gate_bias", EXPERTS + "up_bias"), alternates=True),
    TensorRule(llama.MLP + "experts.down_proj", (EXPERTS + "down_proj",), is_transposed=True),
    TensorRule(llama.MLP + "experts.down_proj_bias", (EXPERTS + "down_bias",)),
)

GPT_OSS = HubFamily(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    features={"family": "llama", "sinks": True, "qkv_bias": True, "o_bias": True, "activation": "clamped_silu"}
    | {"expert_biases": True, "router_renormalize": True, "router_scale": 1.0},
    fields=(
        *llama.decoder_fields(
            vocab=201088,
            ffn=2880,
            kv_heads=8,
            length=131072,
            epsilon=1e-5,
            head_dim=64,
            layers=36,
            hidden=2880,
            heads=64,
            ffn_key="expert_ffn",
        ),
        ConfigField("num_local_experts", "experts", 128, other_names=("num_experts",)),
        ConfigField("num_experts_per_tok", "top_k", 4, is_fixed=False, aliases=("experts_per_token",)),
        ConfigField("sliding_window", "window", 128, is_fixed=False),
    ),
    required=(
        llama.SILU,
        RequiredField("attention_bias", (True,), "attention without biases"),
        RequiredField("swiglu_limit", (7.0,), "another limit of the experts' gates"),
        RequiredField("swiglu_alpha", (1.702,), "another slope of the experts' gates"),
    ),
    tensors=GPT_OSS_TENSORS,
    ignored_fields=(*ROUTER_TRAINING_FIELDS, "initial_context_length"),
    default_layer_types=windows_in_every_second,
    rope_theta=150000.0,
    rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    | {"original_max_position_embeddings": 4096},
)
