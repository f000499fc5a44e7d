"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): Gemma 3's form without norms of queries and keys, with soft caps of
scores and logits, and a window in every second block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchllm.tools.hub.families.family import FULL, SLIDING, ConfigField
from torchllm.tools.hub.families.gemma3 import FEATURES, GEMMA3, SCALE
from torchllm.tools.hub.families.llama import DECODER_TENSORS, NORMS_AROUND, decoder_fields


def windows_in_every_second(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: the first block of each two has the window."""
    return [FULL if index % 2 else SLIDING for index in range(len(have_rope))]


GEMMA2 = replace(
    GEMMA3,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    features=FEATURES,
    fields=(
        *decoder_fields(
            vocab=256000, ffn=9216, kv_heads=4, length=8192, head_dim=256, layers=26, hidden=2304, heads=8, tied=True
        ),
        SCALE,
        ConfigField("sliding_window", "window", 4096, is_fixed=False),
        ConfigField("final_logit_softcapping", "logit_softcap", 30.0),
        ConfigField("attn_logit_softcapping", "score_softcap", 50.0),
    ),
    unwritten=(),
    tensors=(*DECODER_TENSORS, *NORMS_AROUND),
    ignored_fields=("cache_implementation",),
    default_layer_types=windows_in_every_second,
    has_rope_by_type=False,
    rope_theta=10000.0,
    window_rope_theta=None,
)
