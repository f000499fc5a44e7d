"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825) and Mistral Nemo: Llama's form with a sliding window; Ministral 8B
has it in some blocks. Ministral 3 (2025) has none, and scales queries by their position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchllm.tools.hub.families.family import FULL, SLIDING, ConfigField, HubFamily
from torchllm.tools.hub.families.llama import DECODER_TENSORS, INVERSE_FREQUENCIES, NORMS_BEFORE, SILU, decoder_fields

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

MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    fields=(
        *decoder_fields(vocab=131072, ffn=14336, kv_heads=8, length=262144, epsilon=1e-5, head_dim=128, layers=34),
        ConfigField("sliding_window", "window", None, is_fixed=False),
    ),
    rope_theta=1e6,
    rope_scaling={
        **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    scales_queries=True,
    type_of_kinds="",
)
