"""The parts of an unsupported model that the model here lacks, by the fields of its config.json. No torch.

When a part is added here, its row of `PARTS` is removed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from torchllm.tools.hub.families.family import LAYER_TYPES, LINEAR
from torchllm.tools.hub.families.text_part import TEXT_CONFIG
from torchllm.tools.hub.rope import SCALING_FIELDS, SPELLINGS

Fields = Mapping[str, Any]
"""of config.json"""
Test = Callable[[Any, Fields], bool]
"""function of a field's value and all fields: whether the model has the part"""
ROPE_TYPES = ("default", *SCALING_FIELDS)
LISTED_FIELDS = 4
"""of a part, that a message lists at most"""
LISTED_PARTS = 3
LISTED_UNREAD = 8
LONGEST = 32
"""characters of a value that a message shows"""


def is_on(value: Any, fields: Fields) -> bool:
    """Return whether a value asks for something."""
    return value not in (None, False, 0, "", [], {}, ())


def is_not_one(value: Any, fields: Fields) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(is_on(factor, fields) and factor != 1 for factor in values)


def is_off(value: Any, fields: Fields) -> bool:
    return value is False


def is_other_activation(value: Any, fields: Fields) -> bool:
    return isinstance(value, str) and value not in ("silu", "swish", "gelu_new", "gelu_pytorch_tanh")


def has_other_layers(value: Any, fields: Fields) -> bool:
    """Return whether a block is of a type that is not here."""
    return bool(_others(value, _layer_types(fields)))


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """Return the types of blocks that are here; linear attention is if its heads are DeltaNet's."""
    return (*LAYER_TYPES, LINEAR) if "linear_num_key_heads" in fields else LAYER_TYPES


def has_other_rope(value: Any, fields: Fields) -> bool:
    return bool(_others(_rope_types(value), ROPE_TYPES))


def _rope_types(table: Any) -> list[Any]:
    """Return the rope_type of a table, or of the tables within it."""
    if not isinstance(table, Mapping):
        return []
    tables = [inner for inner in table.values() if isinstance(inner, Mapping)] or [table]
    return [inner.get("rope_type", inner.get("type", "default")) for inner in tables]


def _others(values: Any, known: Sequence[str]) -> list[Any]:
    """Return the different entries of a list that are not known."""
    if not isinstance(values, list):
        return []
    return list(dict.fromkeys(str(value) for value in values if value not in known))


class MissingPart(NamedTuple):
    """A part of models that the model here lacks."""

    name: str
    fields: str
    """regular expression of the fields that say so"""
    test: Test = is_on


PARTS = (
    MissingPart("sparse attention", r"index(er)?_.*"),
    MissingPart("another linear attention", r"linear_(attn_\w+|num_heads|head_dim)|kda_.*"),
    MissingPart("Mamba", r"(mamba|ssm)_.*|state_size|time_step_\w+|n_mamba_heads"),
    MissingPart("hyper-connections", r"m?hc_.*"),
    MissingPart("per-layer embeddings", r".*_per_layer_input|ple_.*"),
    MissingPart("keys and values shared by blocks", r"num_kv_shared_layers"),
    MissingPart("blocks of other types", r"layer_types|layers?_block_types?|block_types", has_other_layers),
    MissingPart("convolutions", r"conv_(L_cache|kernel.*)|conv1d_width|short_conv_.*"),
    MissingPart("blocks that repeat", r"loop_.*|.*_cycles|n_recurrent_.*|total_ut_steps"),
    MissingPart("an encoder", r"is_encoder_decoder|(num_)?encoder_layers"),
    MissingPart("pictures or sound", r"(vision|audio|image|video|vq)_config|audio_encoder.*"),
    MissingPart(
        "multipliers",
        r".*_multipliers?|logits?_scal(e|ing)|(embedding|attention_value|attn)_scale|scale_(embedding|emb|depth)",
        is_not_one,
    ),
    MissingPart("a scale of scores by position", r"attn_temperature_tuning|log_scaling_\w+"),
    MissingPart("attention within chunks", r"attention_chunk_size"),
    MissingPart("attention to later tokens", r"use_bidirectional_attention"),
    MissingPart("attention to later tokens", r"is_causal", is_off),
    MissingPart("attention and feed-forward layer in parallel", r"parallel_attn|use_parallel_residual"),
    MissingPart("ALiBi positions", r"alibi"),
    MissingPart("rotary positions of another kind", "|".join(SPELLINGS), has_other_rope),
    MissingPart("embeddings of segments", r"type_vocab_size"),
    MissingPart(
        "another activation", r"(mlp_)?hidden_act(ivation)?|activation(_function|_type)?|afn", is_other_activation
    ),
    MissingPart("biases of the feed-forward layer", r"mlp_bias"),
)


class Missing(NamedTuple):
    """The missing parts that a config.json asks for."""

    parts: dict[str, list[str]]
    """names of parts -> the fields that ask for them, with their values"""
    unread: list[str]
    """fields that nothing here reads"""


def missing_parts(content: Fields, known: AbstractSet[str], place: str = "") -> Missing:
    """Return the missing parts that a config.json asks for, also in the fields of its text model.

    known: the fields that some family reads, or that do nothing. place: of the fields, for their names.
    """
    found: dict[str, list[str]] = {}
    unread = []
    for name, value in content.items():
        asked = [part for part in PARTS if re.fullmatch(part.fields, name)]
        for part in asked:
            if part.test(value, content):
                found.setdefault(part.name, []).append(place + _said(name, value, content))
        if not asked and name not in known and is_on(value, content):
            unread.append(place + name)
    if isinstance(content.get(TEXT_CONFIG), Mapping):
        of_text = missing_parts(content[TEXT_CONFIG], known, f"{TEXT_CONFIG}.")
        unread += of_text.unread
        for name, fields in of_text.parts.items():
            found[name] = found.get(name, []) + fields
    parts = {part.name: found[part.name] for part in PARTS if part.name in found}
    return Missing(parts, sorted(unread))


def lines_of_missing(content: Fields, known: AbstractSet[str]) -> list[str]:
    """Return the missing parts that a config.json asks for as a few short lines. known: as in `missing_parts`."""
    parts, unread = missing_parts(content, known)
    lines = [f"missing: {name} ({_listed(parts[name], LISTED_FIELDS)})" for name in list(parts)[:LISTED_PARTS]]
    more = list(parts)[LISTED_PARTS:]
    if more:
        lines[-1] += f"; also {', '.join(more)}"
    if unread:
        lines.append(f"not read by any family here: {_listed(unread, LISTED_UNREAD)}")
    if not lines:
        lines.append(
            "no field asks for a missing part: if its class in transformers has none either, a table is all that it "
            "needs (docs/add_a_family.md)"
        )
    return lines


def _said(name: str, value: Any, fields: Fields) -> str:
    """Return a field with its value, if that is short; of several types of blocks the first that is not here."""
    if isinstance(value, list):
        value = next(iter(_others(value, _layer_types(fields))), "")
    elif isinstance(value, Mapping):
        value = next(iter(_others(_rope_types(value), ROPE_TYPES)), "") if name in SPELLINGS else ""
    text = str(value)
    return f"{name} = {text}" if 0 < len(text) <= LONGEST else name


def _listed(entries: Sequence[str], most: int) -> str:
    """Return entries with commas, and how many more there are than `most`."""
    more = f" and {len(entries) - most} more" if len(entries) > most else ""
    return ", ".join(entries[:most]) + more
