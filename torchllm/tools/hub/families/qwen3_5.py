"""Qwen3.5 (Qwen Team 2026), its language models, dense and with experts: Qwen3-Next's blocks, whose projections before
the recurrence are tensors by themselves.

Published files are of models of text and pictures (`text_part.py`), with tensors mtp.*, which are not read here.
"""

from dataclasses import replace

from torchllm.tools.hub.families import experts, llama
from torchllm.tools.hub.families.family import ConfigField, RequiredField
from torchllm.tools.hub.families.gated_delta import DELTA_FIELDS, delta_tensor
from torchllm.tools.hub.families.qwen3_next import BLOCK_TENSORS, FEATURES, QWEN3_NEXT

TENSORS = (
    delta_tensor("in_proj_qkv.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight"),
    delta_tensor("in_proj_z.weight", "g_proj.weight"),
    delta_tensor("in_proj_b.weight", "b_proj.weight"),
    delta_tensor("in_proj_a.weight", "a_proj.weight"),
    *BLOCK_TENSORS,
)
IGNORED = (
    *("full_attention_interval", "number_of_conv_states"),
    *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
)
SIZES = llama.decoder_fields(
    vocab=248320, ffn=12288, kv_heads=4, length=32768, head_dim=256, layers=32, hidden=4096, heads=16
)
SIZES_WITH_EXPERTS = llama.decoder_fields(
    vocab=248320, ffn=0, kv_heads=2, length=32768, head_dim=256, layers=40, hidden=2048, heads=16
)

QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    features=FEATURES,
    fields=(*SIZES, *DELTA_FIELDS),
    unwritten=(
        *QWEN3_NEXT.unwritten,
        RequiredField("attn_output_gate", (True,), "attention without a gate"),
        RequiredField("mlp_only_layers", ([], None), "blocks without experts"),
    ),
    tensors=(*TENSORS, *llama.MLP_TENSORS),
    stacked_tensors=(),
    ignored_fields=IGNORED,
    has_shared_width=False,
    has_sparse_step=False,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    features=FEATURES | experts.OF_EXPERTS | {"router_renormalize": True},
    fields=(
        *(field for field in SIZES_WITH_EXPERTS if field.key != "ffn"),
        *DELTA_FIELDS,
        *experts.EXPERT_FIELDS,
        ConfigField("num_experts", "experts", 256),
        ConfigField("num_experts_per_tok", "top_k", 8, is_fixed=False),
    ),
    tensors=(*TENSORS, *experts.SHARED_TENSORS, *experts.EXPERT_TENSORS),
    stacked_tensors=(*TENSORS, *experts.SHARED_TENSORS, *experts.STACKED_TENSORS),
    ignored_fields=(*IGNORED, *experts.ROUTER_TRAINING_FIELDS),
    has_shared_width=True,
)
