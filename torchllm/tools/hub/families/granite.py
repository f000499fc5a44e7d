"""Granite 3 (IBM 2024): Llama's form with multipliers of embeddings, scores, residuals and logits."""

from dataclasses import replace

from torchllm.tools.hub.families.family import ConfigField
from torchllm.tools.hub.families.llama import LLAMA, decoder_fields

GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=(
        *decoder_fields(vocab=32000, ffn=11008, kv_heads=None, length=2048),
        ConfigField("embedding_multiplier", "embedding_multiplier", 1.0),
        ConfigField("attention_multiplier", "softmax_scale", 1.0),
        ConfigField("residual_multiplier", "residual_multiplier", 1.0),
        ConfigField("logits_scaling", "logit_divisor", 1.0),
    ),
    ignored_tensors=r"(?!)",
    ignored_fields=(),
)
