"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671), the dense models: Llama's form with biases of q, k and v."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.tools.hub.families.family import FULL, SLIDING, ConfigField, FieldError, HubFamily, tensors_of_block
from torchllm.tools.hub.families.llama import (
    DECODER_TENSORS,
    INVERSE_FREQUENCIES,
    NORMS_BEFORE,
    SILU,
    decoder_fields,
)

QKV_BIASES = tensors_of_block(*(f"self_attn.{name}_proj.bias" for name in "qkv"))
WINDOW = ConfigField("sliding_window", "window", 4096, is_fixed=False)


def windows_in_last_blocks(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: the blocks from max_window_layers on have the window, if there is one. Raises FieldError."""
    full = fields.get("max_window_layers", 28)
    if not fields.get("sliding_window", WINDOW.default):
        return [FULL] * len(have_rope)
    if type(full) is not int:
        raise FieldError(f"max_window_layers: must be a whole number, not {full!r}")
    return [FULL if index < full else SLIDING for index in range(len(have_rope))]


QWEN2 = HubFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    features={"family": "llama", "qkv_bias": True},
    fields=(*decoder_fields(vocab=151936, ffn=22016, kv_heads=32, length=32768), WINDOW),
    required=(SILU,),
    tensors=(*DECODER_TENSORS, *NORMS_BEFORE, *QKV_BIASES),
    ignored_tensors=INVERSE_FREQUENCIES,
    default_layer_types=windows_in_last_blocks,
    has_window_fields=True,
    tokenizer_pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
