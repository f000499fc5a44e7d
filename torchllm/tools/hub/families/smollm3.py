"""SmolLM3 (Bakouch et al. 2025): Llama's form without rotary positions in every fourth block (NoPE: Yang et al. 2025,
arXiv 2501.18795), which may have a window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchllm.tools.hub.families.family import FULL, SLIDING, ConfigField
from torchllm.tools.hub.families.llama import LLAMA, decoder_fields


def windows_without_positions(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: the blocks without rotary positions have the window, if there is one."""
    window = fields.get("sliding_window")
    return [SLIDING if window and not has_rope else FULL for has_rope in have_rope]


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=(
        *decoder_fields(vocab=128256, ffn=11008, kv_heads=4, length=32768, layers=36, hidden=2048, heads=16, tied=True),
        ConfigField("sliding_window", "window", None, is_fixed=False),
    ),
    default_layer_types=windows_without_positions,
    has_window_fields=True,
    has_no_rope_layers=True,
    heads_divide_hidden=False,
    rope_theta=2e6,
)
