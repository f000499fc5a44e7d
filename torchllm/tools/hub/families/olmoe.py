"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): OLMo's norms of all heads of q and k, experts in all blocks."""

from torchllm.tools.hub.families.experts import EXPERT_TENSORS, ROUTER_TRAINING_FIELDS, STACKED_TENSORS
from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField
from torchllm.tools.hub.families.llama import (
    ATTENTION_TENSORS,
    ENDS,
    NO_ATTENTION_BIAS,
    NORMS_BEFORE,
    SILU,
    decoder_fields,
)
from torchllm.tools.hub.families.olmo2 import WIDTH_NORMS

FIELDS = decoder_fields(
    vocab=50304,
    ffn=2048,
    kv_heads=None,
    length=4096,
    epsilon=1e-5,
    layers=16,
    hidden=2048,
    heads=16,
    ffn_key="expert_ffn",
)
NO_HEAD_DIM = RequiredField("head_dim", (None,), "heads of another width than hidden_size / num_attention_heads")

OLMOE = HubFamily(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    features={"family": "llama", "qk_norm": "width", "router_scale": 1.0},
    fields=(
        # The norms of q and k in transformers have the width of all heads only if a head is hidden / heads wide.
        *(field for field in FIELDS if field.key != "head_dim"),
        ConfigField("num_experts", "experts", 64, other_names=("num_local_experts",)),
        ConfigField("num_experts_per_tok", "top_k", 8, is_fixed=False),
        ConfigField("norm_topk_prob", "router_renormalize", False, is_fixed=False),
    ),
    required=(
        SILU,
        NO_ATTENTION_BIAS,
        RequiredField("clip_qkv", (None,), "clipped queries, keys and values"),
    ),
    tensors=(*ENDS, *ATTENTION_TENSORS, *WIDTH_NORMS, *NORMS_BEFORE, *EXPERT_TENSORS),
    unwritten=(NO_HEAD_DIM,),
    stacked_tensors=(*ENDS, *ATTENTION_TENSORS, *WIDTH_NORMS, *NORMS_BEFORE, *STACKED_TENSORS),
    ignored_fields=ROUTER_TRAINING_FIELDS,
)
