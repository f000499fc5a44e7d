"""OLMo 3 (OLMo Team 2025, arXiv 2512.13961): OLMo 2's form with a window in three of four blocks; the rotary positions
of the others are scaled by YaRN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchllm.tools.hub.families.family import FULL, SLIDING, ConfigField
from torchllm.tools.hub.families.olmo2 import OLMO2


def windows_in_three_of_four(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: every fourth block has no window."""
    return [FULL if index % 4 == 3 else SLIDING for index in range(len(have_rope))]


OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    fields=(*OLMO2.fields, ConfigField("sliding_window", "window", 4096, is_fixed=False)),
    default_layer_types=windows_in_three_of_four,
    has_rope_by_type=True,
    rope_theta=500000.0,
)
