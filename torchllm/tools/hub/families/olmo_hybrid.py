"""OLMo Hybrid (OLMo Team 2026): three blocks of Gated DeltaNet (arXiv 2412.06464) whose states may turn over
(arXiv 2411.12537), with norms before their parts, then one of OLMo 3's, whose norms come after.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.tools.hub.families import gated_delta
from torchllm.tools.hub.families.family import FULL, LINEAR, ConfigField, FieldError, HubFamily, TensorRule
from torchllm.tools.hub.families.llama import DECODER_TENSORS, NO_ATTENTION_BIAS, NORMS_BEFORE, SILU, decoder_fields
from torchllm.tools.hub.families.olmo2 import NORMS_AFTER, WIDTH_NORMS

NORMS = tuple(
    TensorRule(f"model.layers.{{}}.{key}_layer_norm.weight", (f"layers.{{}}.{name}.weight",), mixer="gated_delta")
    for key, name in (("attention", "input_layernorm"), ("feedforward", "post_attention_layernorm"))
)
"""of blocks of Gated DeltaNet in published files; transformers 5.24 saves others by default, and one convolution"""
TENSORS = (*gated_delta.SINGLE_TENSORS, *DECODER_TENSORS, *WIDTH_NORMS, *NORMS_AFTER)


def with_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the sizes of Gated DeltaNet that follow from others. Raises FieldError."""
    types = fields.get("layer_types")
    if isinstance(types, list) and not {LINEAR, FULL} <= {*map(str, types)}:
        raise FieldError("layer_types: must have blocks of both types, for transformers")
    return gated_delta.with_delta_sizes({"hidden_size": 3840, "num_attention_heads": 30} | dict(fields))


def one_at_least_is_full(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: every fourth block has attention; the last one if none does."""
    types = gated_delta.one_of_four_is_full({}, have_rope)
    return types if FULL in types else [*types[:-1], FULL]


OLMO_HYBRID = HubFamily(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    features={"family": "llama", "qk_norm": "width", "delta_norm_epsilon": 1e-5},
    fields=(
        *decoder_fields(vocab=100352, ffn=11008, kv_heads=None, length=65536, layers=32, hidden=3840, heads=30),
        *gated_delta.DELTA_FIELDS,
        ConfigField("linear_allow_neg_eigval", "delta_negative", True),
    ),
    prepared=with_sizes,
    required=(SILU, NO_ATTENTION_BIAS),
    tensors=(*gated_delta.CONVOLUTIONS, *NORMS, *TENSORS),
    stacked_tensors=(gated_delta.DELTA_TENSORS[0], *NORMS_BEFORE, *TENSORS),
    module_key=".linear_attn.conv1d.weight",
    ignored_fields=(
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
        *("number_of_conv_states",),
    ),
    default_layer_types=one_at_least_is_full,
    mixers={LINEAR: "gated_delta"},
    of_types={FULL: {"norm_position": "after"}, LINEAR: {"norm_position": "before"}},
    has_optional_rope=True,
)
