"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825) and Mistral Nemo: Llama's form with a sliding window."""

from torchllm.tools.hub.families.family import ConfigField, HubFamily
from torchllm.tools.hub.families.llama import (
    DECODER_TENSORS,
    INVERSE_FREQUENCIES,
    NORMS_BEFORE,
    SILU,
    decoder_fields,
)

MISTRAL = HubFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    features={"family": "llama"},
    fields=(
        *decoder_fields(vocab=32000, ffn=14336, kv_heads=8, length=131072),
        ConfigField("sliding_window", "window", 4096, is_fixed=False),
    ),
    required=(SILU,),
    tensors=DECODER_TENSORS + NORMS_BEFORE,
    ignored_tensors=INVERSE_FREQUENCIES,
)
