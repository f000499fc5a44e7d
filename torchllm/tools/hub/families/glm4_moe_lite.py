"""GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3's form with other sizes, and experts that are in no groups."""

from dataclasses import replace

from torchllm.tools.hub.families.deepseek_v3 import DEEPSEEK_V3
from torchllm.tools.hub.families.family import with_defaults

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    other_types=(),
    architecture="Glm4MoeLiteForCausalLM",
    fields=with_defaults(
        DEEPSEEK_V3.fields,
        **{"layers": 47, "hidden": 2048, "heads": 20, "kv_heads": 20, "ffn": 10240, "vocab": 154880},
        **{"latent_q_width": 768, "nope_head_dim": 192, "v_head_dim": 256},
        **{"experts": 64, "top_k": 4, "shared_experts": 1, "expert_ffn": 1536, "dense_layers": 1},
        **{"router_scale": 1.8, "router_groups": 1, "router_top_groups": 1},
        **{"mtp_depth": 0, "max_sequence_length": 202752, "norm_epsilon": 1e-5},
    ),
    names_own_code=False,
    has_mlp_layer_types=True,
)
