"""Qwen3-Next (Qwen Team 2025, Qwen3-Next-80B-A3B): three blocks of Gated DeltaNet (arXiv 2412.06464), then one with
gated attention (arXiv 2505.06708); experts, and a shared one with a gate.

A file may hold tensors mtp.*, a block that predicts the token after the next and is not read here.
"""

from torchllm.tools.hub.families import llama
from torchllm.tools.hub.families.experts import (
    EXPERT_FIELDS,
    EXPERT_TENSORS,
    OF_EXPERTS,
    ROUTER_TRAINING_FIELDS,
    SHARED_TENSORS,
    STACKED_TENSORS,
)
from torchllm.tools.hub.families.family import LINEAR, ConfigField, HubFamily, RequiredField
from torchllm.tools.hub.families.gated_delta import DELTA_FIELDS, DELTA_TENSORS, delta_tensor, one_of_four_is_full
from torchllm.tools.hub.families.qwen3 import HEAD_NORMS

FUSED_TENSORS = (
    delta_tensor("in_proj_qkvz.weight", *(f"{name}_proj.weight" for name in "qkvg"), by_key_head=True),
    delta_tensor("in_proj_ba.weight", "b_proj.weight", "a_proj.weight", by_key_head=True),
)
BLOCK_TENSORS = (*DELTA_TENSORS, *llama.ENDS, *llama.ATTENTION_TENSORS, *HEAD_NORMS, *llama.NORMS_BEFORE)
OTHER_TENSORS = (*FUSED_TENSORS, *BLOCK_TENSORS, *llama.MLP_TENSORS, *SHARED_TENSORS)
FEATURES = {"family": "llama", "qk_norm": "head", "norm_offset": True, "attention_gate": "element"}
NO_WINDOW = RequiredField("use_sliding_window", (False,), "a sliding window")

QWEN3_NEXT = HubFamily(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    features=FEATURES | OF_EXPERTS,
    fields=(
        *llama.decoder_fields(
            vocab=151936, ffn=5632, kv_heads=2, length=32768, head_dim=256, layers=48, hidden=2048, heads=16
        ),
        *DELTA_FIELDS,
        *EXPERT_FIELDS,
        ConfigField("num_experts", "experts", 512),
        ConfigField("num_experts_per_tok", "top_k", 10, is_fixed=False),
        ConfigField("norm_topk_prob", "router_renormalize", True, is_fixed=False),
    ),
    required=(llama.SILU, llama.NO_ATTENTION_BIAS),
    unwritten=(NO_WINDOW,),
    tensors=(*OTHER_TENSORS, *EXPERT_TENSORS),
    stacked_tensors=(*OTHER_TENSORS, *STACKED_TENSORS),
    ignored_fields=(*ROUTER_TRAINING_FIELDS, "full_attention_interval", "number_of_conv_states"),
    default_layer_types=one_of_four_is_full,
    mixers={LINEAR: "gated_delta"},
    has_shared_width=True,
    has_sparse_step=True,
    has_prediction_blocks=True,
    rotary_fraction=0.25,
)
