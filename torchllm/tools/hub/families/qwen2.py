"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671), the dense models: Llama's form with biases of q, k and v."""

from torchllm.tools.hub.families.family import HubFamily, TensorRule
from torchllm.tools.hub.families.llama import (
    ATTENTION,
    DECODER_TENSORS,
    INVERSE_FREQUENCIES,
    NORMS_BEFORE,
    SILU,
    decoder_fields,
)

QKV_BIASES = (
    TensorRule(ATTENTION + "q_proj.bias", ("layers.{}.self_attn.q_proj.bias",)),
    TensorRule(ATTENTION + "k_proj.bias", ("layers.{}.self_attn.k_proj.bias",)),
    TensorRule(ATTENTION + "v_proj.bias", ("layers.{}.self_attn.v_proj.bias",)),
)

QWEN2 = HubFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    features={"family": "llama", "qkv_bias": True},
    fields=decoder_fields(vocab=151936, ffn=22016, kv_heads=32, length=32768),
    required=(SILU,),
    tensors=(*DECODER_TENSORS, *NORMS_BEFORE, *QKV_BIASES),
    ignored_tensors=INVERSE_FREQUENCIES,
    has_window_fields=True,
    tokenizer_pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
