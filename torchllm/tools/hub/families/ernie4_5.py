"""ERNIE 4.5 (Baidu 2025), its language models, dense and with experts: Llama's form, whose rotary positions turn
neighboring features; a bias per expert chooses by softmax scores.

Published files may hold tensors mtp_*, a block that predicts the token after the next and is not read here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchllm.tools.hub.families import experts
from torchllm.tools.hub.families.family import ConfigField, RequiredField
from torchllm.tools.hub.families.llama import DECODER_TENSORS, LLAMA, NORMS_BEFORE, SILU, decoder_fields

BIAS = experts.bias_of_router("moe_statics.e_score_correction_bias")._replace(is_row=True)
OF_MODULES = experts.bias_of_router("gate.moe_statics.e_score_correction_bias")._replace(is_row=True)
OTHER_TENSORS = (*DECODER_TENSORS, *NORMS_BEFORE, *experts.shared_experts("shared_experts"))


def to_the_last_block(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the last block with experts as -1, if it is the last one."""
    is_last = fields.get("moe_layer_end_index") == fields.get("num_hidden_layers", 28) - 1
    return {**fields, "moe_layer_end_index": -1} if is_last else dict(fields)


ERNIE4_5 = replace(
    LLAMA,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    features={"family": "llama", "rope_interleaved": True},
    fields=decoder_fields(
        vocab=103424,
        ffn=3072,
        kv_heads=2,
        length=131072,
        epsilon=1e-5,
        head_dim=128,
        layers=18,
        hidden=1024,
        heads=16,
        tied=True,
    ),
    required=(SILU, RequiredField("use_bias", (False,), "biases of all matrices")),
    ignored_tensors=r"(?!)",
    ignored_fields=(),
    heads_divide_hidden=False,
    rope_theta=500000.0,
)
ERNIE4_5_MOE = replace(
    ERNIE4_5,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    features=ERNIE4_5.features | {"router_bias": True, "router_renormalize": True, "router_scale": 1.0},
    fields=(
        *decoder_fields(
            vocab=103424,
            ffn=12288,
            kv_heads=4,
            length=131072,
            epsilon=1e-5,
            layers=28,
            hidden=2560,
            heads=20,
            tied=True,
        ),
        ConfigField("moe_num_experts", "experts", 64, aliases=("num_experts",)),
        ConfigField("moe_k", "top_k", 6, is_fixed=False, aliases=("num_experts_per_tok",)),
        ConfigField("moe_num_shared_experts", "shared_experts", 2),
        ConfigField("moe_intermediate_size", "expert_ffn", 1536),
        ConfigField("moe_layer_start_index", "dense_layers", 1),
    ),
    prepared=to_the_last_block,
    required=(
        *ERNIE4_5.required,
        RequiredField("moe_layer_end_index", (-1,), "dense blocks after those with experts"),
        RequiredField("moe_layer_interval", (1,), "dense blocks after those with experts"),
    ),
    tensors=(*OTHER_TENSORS, BIAS, *experts.EXPERT_TENSORS),
    stacked_tensors=(*OTHER_TENSORS, OF_MODULES, *experts.STACKED_TENSORS),
    ignored_tensors=r"mtp_.*",
    ignored_fields=(*experts.ROUTER_TRAINING_FIELDS, "moe_norm_min", "num_nextn_predict_layers"),
)
