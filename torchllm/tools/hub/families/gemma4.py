"""Gemma 4 (Gemma Team 2026), the language models of 31B and 26B-A4B: Gemma 3's form with norms of values, and blocks
without a window that have wider heads, keys as values, and positions that turn a share of each head. 26B-A4B has
experts next to the dense layers.

Published files are of models of text and pictures (`text_part.py`). E2B and E4B have embeddings in each block.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.tools.hub.families.experts_beside import BESIDE_FIELDS, BESIDE_TENSORS
from torchllm.tools.hub.families.family import FULL, SLIDING, ConfigField, FieldError, HubFamily, RequiredField
from torchllm.tools.hub.families.family import TensorRule as Rule
from torchllm.tools.hub.families.gemma3 import GELU, root
from torchllm.tools.hub.families.llama import DECODER_TENSORS, NO_ATTENTION_BIAS, NORMS_AROUND, decoder_fields
from torchllm.tools.hub.families.qwen3 import HEAD_NORMS

OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""fields of per_layer_config, where transformers 5 writes the fields of blocks with full attention"""


def of_full_blocks(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with full blocks' values under separate names, and the last block full, as in transformers."""
    fields = dict(fields)
    tables = fields.pop("per_layer_config", None)
    types = fields.get("layer_types")
    if isinstance(types, list) and types:
        fields["layer_types"] = types = [*types[:-1], FULL]
    if tables:
        if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
            raise FieldError("per_layer_config: must have a table for each index of a block")
        full = {index for index, kind in enumerate(types or ()) if kind == FULL}
        table, *others = tables.values()
        is_known = all(other == table for other in others) and table.keys() <= OF_FULL.keys()
        if not is_known or {*map(int, tables)} != full:
            raise FieldError("per_layer_config: other fields than those of all full blocks are not supported")
        fields |= {OF_FULL[name]: value for name, value in table.items()}
    if not fields.get("attention_k_eq_v"):
        fields["num_global_key_value_heads"] = None
    return fields


def one_of_six_and_the_last_are_full(fields: Mapping[str, Any], have_rope: Sequence[bool]) -> list[str]:
    """Return layer_types: every sixth block and the last one have no window."""
    return [SLIDING if (index + 1) % 6 else FULL for index in range(len(have_rope) - 1)] + [FULL]


GEMMA4 = HubFamily(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    features={
        **{"family": "llama", "norm_position": "both", "activation": "gelu_tanh", "qk_norm": "head", "v_norm": True},
        **{"softmax_scale": 1.0, "block_scale": True, "router_scale": 1.0},
    },
    fields=(
        *decoder_fields(
            vocab=262144, ffn=9216, kv_heads=4, length=131072, head_dim=256, layers=30, hidden=2304, heads=8, tied=True
        ),
        ConfigField("sliding_window", "window", 512, is_fixed=False),
        ConfigField("final_logit_softcapping", "logit_softcap", None),
        *BESIDE_FIELDS,
    ),
    full_fields=(
        ConfigField("global_head_dim", "head_dim", 512),
        ConfigField("num_global_key_value_heads", "kv_heads", None),
        ConfigField("attention_k_eq_v", "keys_as_values", False),
    ),
    prepared=of_full_blocks,
    required=(
        *(GELU, NO_ATTENTION_BIAS),
        RequiredField("use_bidirectional_attention", (None, "vision"), "attention to later tokens"),
        RequiredField("hidden_size_per_layer_input", (0, None), "embeddings in each block, as in E2B and E4B", 256),
        RequiredField("num_kv_shared_layers", (0,), "keys and values shared by blocks, as in E2B and E4B"),
    ),
    unwritten=(
        RequiredField("rope_theta", (None,), "rotary positions outside of rope_parameters"),
        RequiredField("rope_scaling", (None,), "rotary positions outside of rope_parameters"),
        RequiredField("rope_local_base_freq", (None,), "rotary positions outside of rope_parameters"),
    ),
    tensors=(
        *(*DECODER_TENSORS, *HEAD_NORMS, *NORMS_AROUND),
        Rule("model.layers.{}.layer_scalar", ("layers.{}.layer_scalar",)),
        *BESIDE_TENSORS,
    ),
    ignored_fields=(
        *("use_double_wide_mlp", "vocab_size_per_layer_input", "output_router_logits"),
        "serialize_explicit_per_layer_config",
    ),
    default_layer_types=one_of_six_and_the_last_are_full,
    has_rope_by_type=True,
    has_no_old_rope=True,
    rope_scaling={"rope_type": "proportional", "partial_rotary_factor": 0.25},
    rope_theta=1e6,
    window_rope_theta=10000.0,
    derived={"embedding_multiplier": root},
)
