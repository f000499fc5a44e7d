"""OLMo Hybrid (OLMo Team 2026): three blocks of Gated DeltaNet (arXiv 2412.06464) whose states may turn over
(arXiv 2411.12537), with norms before their parts, then one of OLMo 3's, whose norms come after.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.tools.hub.families.family import FULL, LINEAR, ConfigField, FieldError, HubFamily, TensorRule
from torchllm.tools.hub.families.gated_delta import DELTA_FIELDS, DELTA_TENSORS, delta_tensor, one_of_four_is_full
from torchllm.tools.hub.families.llama import DECODER_TENSORS, NO_ATTENTION_BIAS, NORMS_BEFORE, SILU, decoder_fields
from torchllm.tools.hub.families.olmo2 import NORMS_AFTER, WIDTH_NORMS

NORMS = (("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm"))
"""of blocks of Gated DeltaNet, in files and here"""
PUBLISHED_TENSORS = (
    *(delta_tensor(f"{name}_conv1d.weight", f"of_heads.{name}_conv", is_convolution=True) for name in "qkv"),
    *(
        TensorRule(f"model.layers.{{}}.{key}.weight", (f"layers.{{}}.{name}.weight",), mixer="gated_delta")
        for key, name in NORMS
    ),
)
"""of blocks of Gated DeltaNet; transformers 5.24 saves others by default, convolutions in three parts of equal size"""
MODULE_TENSORS = (DELTA_TENSORS[0], *NORMS_BEFORE)
TENSORS = (
    *(delta_tensor(name, f"of_heads.{name}") for name in ("A_log", "dt_bias")),
    *(delta_tensor(f"{name}_proj.weight", f"{name}_proj.weight") for name in "qkvabgo"),
    delta_tensor("o_norm.weight", "o_norm.weight"),
    *(*DECODER_TENSORS, *WIDTH_NORMS, *NORMS_AFTER),
)
KEY_WIDTH, VALUE_WIDTH = "linear_key_head_dim", "linear_value_head_dim"


def with_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the sizes of Gated DeltaNet that follow from others."""
    fields = {"hidden_size": 3840, "num_attention_heads": 30} | dict(fields)
    types = fields.get("layer_types")
    if isinstance(types, list) and not {LINEAR, FULL} <= {*map(str, types)}:
        raise FieldError("layer_types: must have blocks of both types, for transformers")
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        fields[name] = fields.get(name) or fields["num_attention_heads"]
    if not fields.get(KEY_WIDTH):
        hidden, heads = fields["hidden_size"], fields["linear_num_key_heads"]
        fields[KEY_WIDTH] = int(0.75 * hidden / heads) if isinstance(hidden, int) and isinstance(heads, int) else None
    fields[VALUE_WIDTH] = fields.get(VALUE_WIDTH) or (fields[KEY_WIDTH] and 2 * fields[KEY_WIDTH])
    return fields


def one_at_least_is_full(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: every fourth block has attention; the last one if none does."""
    types = one_of_four_is_full({}, have_rope)
    return types if FULL in types else [*types[:-1], FULL]


OLMO_HYBRID = HubFamily(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    features={"family": "llama", "qk_norm": "width", "delta_norm_epsilon": 1e-5},
    fields=(
        *decoder_fields(vocab=100352, ffn=11008, kv_heads=None, length=65536, layers=32, hidden=3840, heads=30),
        *DELTA_FIELDS,
        ConfigField("linear_allow_neg_eigval", "delta_negative", True),
    ),
    prepared=with_sizes,
    required=(SILU, NO_ATTENTION_BIAS),
    tensors=(*PUBLISHED_TENSORS, *TENSORS),
    stacked_tensors=(*MODULE_TENSORS, *TENSORS),
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
