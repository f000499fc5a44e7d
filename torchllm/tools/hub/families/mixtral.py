"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral's form, and experts in all blocks.

The files name the matrices of an expert w1, w3 and w2: gate, up and down.
"""

from torchllm.tools.hub.families.experts import EXPERTS, ROUTER, ROUTER_TRAINING_FIELDS, STACKED_TENSORS
from torchllm.tools.hub.families.family import ConfigField, HubFamily, TensorRule
from torchllm.tools.hub.families.llama import (
    ATTENTION_TENSORS,
    ENDS,
    INVERSE_FREQUENCIES,
    NORMS_BEFORE,
    SILU,
    decoder_fields,
)

MIXTRAL_EXPERT = "model.layers.{}.block_sparse_moe.experts.{expert}."
BLOCK_SPARSE_TENSORS = (
    TensorRule("model.layers.{}.block_sparse_moe.gate.weight", (ROUTER,)),
    TensorRule(MIXTRAL_EXPERT + "w1.weight", (EXPERTS + "gate_proj",)),
    TensorRule(MIXTRAL_EXPERT + "w3.weight", (EXPERTS + "up_proj",)),
    TensorRule(MIXTRAL_EXPERT + "w2.weight", (EXPERTS + "down_proj",)),
)

MIXTRAL = HubFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    features={"family": "llama", "router_renormalize": True, "router_scale": 1.0},
    fields=(
        *decoder_fields(vocab=32000, ffn=14336, kv_heads=8, length=131072, epsilon=1e-5, ffn_key="expert_ffn"),
        ConfigField("num_local_experts", "experts", 8, other_names=("num_experts",)),
        ConfigField("num_experts_per_tok", "top_k", 2, is_fixed=False),
        ConfigField("sliding_window", "window", None, is_fixed=False),
    ),
    required=(SILU,),
    tensors=(
        *ENDS,
        *ATTENTION_TENSORS,
        *NORMS_BEFORE,
        *BLOCK_SPARSE_TENSORS,
    ),
    stacked_tensors=(*ENDS, *ATTENTION_TENSORS, *NORMS_BEFORE, *STACKED_TENSORS),
    ignored_tensors=INVERSE_FREQUENCIES,
    ignored_fields=ROUTER_TRAINING_FIELDS,
    rope_theta=1e6,
)
