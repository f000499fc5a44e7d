"""Gated DeltaNet: fields and tensors that families share."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.config import Model
from torchllm.facts.parts.gated_delta import delta_sizes
from torchllm.tools.hub.families.family import FULL, LINEAR, ConfigField, FieldError, TensorRule

MIXER = "layers.{}.self_attn."
"""of the parameters here; Gated DeltaNet's share names with attention's"""


# Functions with names: a table is sent to the other ranks, and a lambda cannot be pickled.
def key_heads(view: Model) -> int:
    return delta_sizes(view).key_heads


def one_of_four_is_full(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: every fourth block has attention, or as full_attention_interval says. Raises FieldError."""
    interval = fields.get("full_attention_interval", 4)
    if type(interval) is not int or interval < 1:
        raise FieldError(f"full_attention_interval: must be a whole number of at least 1, not {interval!r}")
    return [LINEAR if (index + 1) % interval else FULL for index in range(len(have_rope))]


def delta_tensor(key: str, *names: str, by_key_head: bool = False, is_convolution: bool = False) -> TensorRule:
    """Return a tensor of Gated DeltaNet. by_key_head: it has the rows of all names for a key head, then the next."""
    groups = key_heads if by_key_head else None
    own = tuple(MIXER + name for name in names)
    place = f"model.layers.{{}}.linear_attn.{key}"
    return TensorRule(place, own, groups=groups, mixer="gated_delta", is_convolution=is_convolution)


OF_HEADS = tuple(delta_tensor(name, f"of_heads.{name}") for name in ("A_log", "dt_bias"))
DELTA_TENSORS = (
    delta_tensor("conv1d.weight", "of_heads.q_conv", "of_heads.k_conv", "of_heads.v_conv", is_convolution=True),
    *OF_HEADS,
    delta_tensor("norm.weight", "o_norm.weight"),
    delta_tensor("out_proj.weight", "o_proj.weight"),
)
CONVOLUTIONS = tuple(
    delta_tensor(f"{name}_conv1d.weight", f"of_heads.{name}_conv", is_convolution=True) for name in "qkv"
)
"""queries, keys and values apart"""
SINGLE_TENSORS = (
    *OF_HEADS,
    *(delta_tensor(f"{name}_proj.weight", f"{name}_proj.weight") for name in "qkvabgo"),
    delta_tensor("o_norm.weight", "o_norm.weight"),
)
"""all but the convolutions, of files where each parameter is a tensor"""
DELTA_FIELDS = (
    ConfigField("linear_num_key_heads", "delta_key_heads", 16),
    ConfigField("linear_num_value_heads", "delta_value_heads", 32),
    ConfigField("linear_key_head_dim", "delta_key_dim", 128),
    ConfigField("linear_value_head_dim", "delta_value_dim", 128),
    ConfigField("linear_conv_kernel_dim", "delta_conv", 4),
)
KEY_WIDTH, VALUE_WIDTH = "linear_key_head_dim", "linear_value_head_dim"


def with_delta_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the sizes that are missing: heads as attention has them, widths that follow from theirs.

    All keys together are three quarters as wide as the hidden states, and a value is as wide as two keys.
    """
    fields = dict(fields)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        fields[name] = fields.get(name) or fields["num_attention_heads"]
    if not fields.get(KEY_WIDTH):
        hidden, heads = fields["hidden_size"], fields["linear_num_key_heads"]
        fields[KEY_WIDTH] = int(0.75 * hidden / heads) if isinstance(hidden, int) and isinstance(heads, int) else None
    fields[VALUE_WIDTH] = fields.get(VALUE_WIDTH) or (fields[KEY_WIDTH] and 2 * fields[KEY_WIDTH])
    return fields
