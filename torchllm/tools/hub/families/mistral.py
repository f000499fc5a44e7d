"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825) and Mistral Nemo: Llama's form with a sliding window; Ministral 8B
has it in some blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchllm.tools.hub.families.family import FULL, SLIDING, ConfigField, HubFamily
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
    type_of_kinds="ministral",
)


def windows_in_all_blocks(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: all blocks have the window, if there is one."""
    return [SLIDING if fields.get("sliding_window", 4096) else FULL] * len(have_rope)


MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    default_layer_types=windows_in_all_blocks,
    type_of_kinds="",
)
