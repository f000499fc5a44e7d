"""Qwen3 (Yang et al. 2025, arXiv 2505.09388), the dense models: Llama's form with a norm of each query and key head."""

from torchllm.tools.hub.families.family import HubFamily, tensors_of_block
from torchllm.tools.hub.families.llama import (
    DECODER_TENSORS,
    NO_ATTENTION_BIAS,
    NORMS_BEFORE,
    SILU,
    decoder_fields,
)
from torchllm.tools.hub.families.qwen2 import WINDOW, windows_in_last_blocks

HEAD_NORMS = tensors_of_block("self_attn.q_norm.weight", "self_attn.k_norm.weight")

QWEN3 = HubFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    features={"family": "llama", "qk_norm": "head"},
    fields=(*decoder_fields(vocab=151936, ffn=22016, kv_heads=32, length=32768, head_dim=128), WINDOW),
    required=(SILU, NO_ATTENTION_BIAS),
    tensors=(*DECODER_TENSORS, *NORMS_BEFORE, *HEAD_NORMS),
    default_layer_types=windows_in_last_blocks,
    has_window_fields=True,
)
