"""Rotary positions in config.json, in the spellings of transformers 4 and of transformers 5. No torch.

transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters` with both in it, and each
takes its default, silently, where it finds only the other's. Both spellings are read here, and both are written.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchllm.config import Model
from torchllm.tools.hub.families.family import FULL, SLIDING, FieldError, HubFamily

Fields = Mapping[str, Any]
"""of config.json"""

SPELLINGS = ("rope_scaling", "rope_parameters")
"""tables of transformers 4 and 5"""
FRACTION = "partial_rotary_factor"
"""share of each head, a field of config.json or of its tables"""
ORIGINAL_LENGTH = "original_max_position_embeddings"
"""a field of config.json or of its tables"""
LENGTH = "max_position_embeddings"
"""a field of config.json: the longest text, which is the original one where there is no other"""
WINDOW_THETA = "rope_local_base_freq"
"""a field of config.json: the base of the rotary frequencies in blocks with a window (Gemma 3)"""
PROPORTIONAL = "proportional"
"""rope_type with the angles of whole heads where only a share turn (Gemma 4); its factor acts as in "linear" """
QUERY_SCALE = "llama_4_scaling_beta"
"""a field of YaRN's table that families with `scales_queries` read"""
REQUIRED = object()
"""stands for the default of a field that must be there"""
SCALING_FIELDS: dict[str, dict[str, tuple[str, Any]]] = {
    "linear": {
        "factor": ("rope_scaling_factor", REQUIRED),
    },
    "llama3": {
        "factor": ("rope_scaling_factor", REQUIRED),
        "low_freq_factor": ("rope_low_frequency_factor", REQUIRED),
        "high_freq_factor": ("rope_high_frequency_factor", REQUIRED),
        ORIGINAL_LENGTH: ("rope_original_length", REQUIRED),
    },
    "yarn": {
        "factor": ("rope_scaling_factor", REQUIRED),
        ORIGINAL_LENGTH: ("rope_original_length", REQUIRED),
        "beta_fast": ("rope_beta_fast", 32.0),
        "beta_slow": ("rope_beta_slow", 1.0),
        "truncate": ("rope_truncate", True),
        "attention_factor": ("rope_attention_factor", 0.0),
        QUERY_SCALE: ("rope_query_scale", 0.0),
    },
    PROPORTIONAL: {
        "factor": ("rope_scaling_factor", 1.0),
        FRACTION: ("rotary_fraction", 1.0),
    },
}
"""rope_type -> its fields, each with the key of [model] that says the same, and its default in transformers"""
TABLE_FIELDS = {
    *("rope_type", "type", "rope_theta", FRACTION, ORIGINAL_LENGTH, QUERY_SCALE, "mrope_section", "mrope_interleaved"),
}
"""fields that the tables of all types may have; mrope: which features turn by the places in a picture, which in text
are the positions"""
YARN_SCALES = ("mscale", "mscale_all_dim")
"""fields of YaRN's table for transformers' computation of attention_factor"""


def read_rotary_fraction(fields: Fields, default: float | None, other: Mapping[str, float]) -> float:
    """Return partial_rotary_factor, a field of config.json or of its tables.

    default: where there is none; None: the model turns whole heads. other: the value by another field, with its name.
    Raises FieldError if they say otherwise.
    """
    if default is not None and fields.get(FRACTION, default) is None:  # for transformers it is then 1
        raise FieldError(f"{FRACTION}: is null, which says nothing")
    tables = [name for name in SPELLINGS if _kind(fields.get(name) or {}) != PROPORTIONAL]  # which say it otherwise
    found = _find(fields, FRACTION, tables) | dict(other)
    for name, value in found.items():
        if default is None and value != 1:
            raise FieldError(f"{name}: rotary positions of a part of each head are not supported in this type")
    return _agreed(found, 1.0 if default is None else default)


def _find(fields: Fields, field: str, tables: Sequence[str]) -> dict[str, Any]:
    """Return the values of a field of config.json or of its tables, by its place."""
    found = {}
    for table in ("", *tables):
        content = fields.get(table) if table else fields
        if isinstance(content, Mapping) and content.get(field) is not None:
            found[f"{table}.{field}".removeprefix(".")] = content[field]
    return found


def _agreed(found: Mapping[str, Any], default: Any) -> Any:
    """Return the value of a field in all its places; `default` if it has none. Raises FieldError if two differ."""
    value = next(iter(found.values()), default)
    for name, other in found.items():
        if other is not value and other != value:  # a NaN is not equal to itself
            raise FieldError(f"{name}: is {other}, but {next(iter(found))} is {value}: remove one of them")
    return value


def unknown_rope_fields(fields: Fields) -> list[str]:
    """Return the fields of the tables that do not belong to their type, also not in transformers."""
    unknown = []
    for name, table in _tables(fields).items():
        kind = _kind(table)
        known = TABLE_FIELDS | SCALING_FIELDS.get(kind, {}).keys()
        if kind == "yarn":
            known |= set(YARN_SCALES)
        unknown += [f"{name}.{field}" for field in table.keys() - known]
    return unknown


def _tables(fields: Fields) -> dict[str, Fields]:
    """Return the tables by their place: "rope_parameters", or "rope_parameters.full_attention"."""
    found: dict[str, Fields] = {}
    for name in SPELLINGS:
        table = fields.get(name)
        if isinstance(table, Mapping):
            of_types = {f"{name}.{key}": value for key, value in table.items() if isinstance(value, Mapping)}
            found |= of_types or {name: table}
    return found


def rope_of_type(fields: Fields, layer_type: str, family: HubFamily) -> Fields:
    """Return the fields for the blocks of one layer type, where rope_parameters has a table for each type.

    rope_scaling is of the blocks with full attention. Raises FieldError if transformers 4, which reads rope_theta for
    all blocks, and transformers 5, which reads it for these alone, would make two models.
    """
    tables = fields.get("rope_parameters") or {}
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping | None) for table in tables.values()):
        raise FieldError("rope_parameters: must have a table for each of layer_types in a model of this type")
    table = tables.get(layer_type) or {}
    scaling = fields.get("rope_scaling") if layer_type == FULL else None
    for of_type in (table, scaling):
        if isinstance(of_type, Mapping) and _kind(of_type) == "yarn" and of_type.get("truncate") is False:
            raise FieldError(
                "truncate: is false in a table of one of layer_types, where transformers reads none: not supported"
            )
    fields = {**fields, "rope_parameters": table, "rope_scaling": scaling, ORIGINAL_LENGTH: None}
    if layer_type == FULL:
        return fields
    if family.window_rope_theta is not None:
        of_windows = fields.pop(WINDOW_THETA, None)
        fields.pop("rope_theta", None)
        if of_windows is not None:
            fields["rope_theta"] = of_windows
        default = family.window_rope_theta if of_windows is None else of_windows
        return {**fields, "rope_parameters": {"rope_theta": default, **table}}
    theta = table.get("rope_theta", family.rope_theta)
    if fields.get("rope_theta", theta) != theta:
        raise FieldError(
            f"rope_theta: is {fields['rope_theta']} for transformers 4, which reads it for all blocks, but {theta} in "
            f"blocks of {layer_type} for transformers 5: write it into rope_parameters alone"
        )
    return fields


def read_rope(fields: Fields, default_theta: float) -> dict[str, Any]:
    """Return the keys of [model] for the fields of rotary positions. Raises FieldError."""
    old = _read_spelling(fields, "rope_scaling", default_theta)
    if not fields.get("rope_parameters"):
        return old
    new = _read_spelling(fields, "rope_parameters", default_theta)
    has_old = "rope_theta" in fields or fields.get("rope_scaling")
    if has_old and old != new:
        raise FieldError(
            "rope_parameters: says otherwise than rope_theta and rope_scaling: remove one of the spellings"
        )
    return new


def _read_spelling(fields: Fields, table: str, default_theta: float) -> dict[str, Any]:
    """Return the keys of [model] for rope_theta and one of the tables."""
    scaling = _read_scaling(fields, table) if fields.get(table) else {}
    return {"rope_theta": _agreed(_find(fields, "rope_theta", [table]), default_theta), **scaling}


def _read_scaling(fields: Fields, name: str) -> dict[str, Any]:
    """Return the keys of [model] for the table rope_scaling or rope_parameters, without rope_theta."""
    scaling = fields[name]
    if not isinstance(scaling, dict):
        raise FieldError(f"{name}: must be a table, not {scaling!r}")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise FieldError(f"{name}: is another one for each kind of block, which is not supported")
    kind = _kind(scaling)
    if kind != "yarn" and scaling.get(QUERY_SCALE):
        raise FieldError(f"{name}.{QUERY_SCALE}: is {scaling[QUERY_SCALE]}, without yarn: not supported")
    if kind == "default":
        return {}
    if kind not in SCALING_FIELDS:
        known = ", ".join(["default", *SCALING_FIELDS])
        raise FieldError(f"{name}.rope_type: {kind!r} is not supported; these are: {known}")
    values: dict[str, Any] = {"rope_scaling": kind}
    for field, (key, default) in SCALING_FIELDS[kind].items():
        value = scaling.get(field)
        if field == ORIGINAL_LENGTH:
            value = _agreed(_find(fields, field, [name]), fields.get(LENGTH))
        if value is None and default is REQUIRED:
            raise FieldError(f"{name}.{field}: is missing, but rope_type {kind!r} needs it")
        values[key] = default if value is None else value
    if kind == "yarn":
        values["rope_attention_factor"] = _attention_factor(scaling)
        if scaling.get("attention_factor") == 0:  # [model] cannot say so: its 0 leaves the factor open
            raise FieldError(f"{name}.attention_factor: is 0: queries and keys without positions, not supported")
    proportional: dict[str, Any] = {}
    if kind == PROPORTIONAL:
        proportional = {"rope_proportional": True, "rotary_fraction": values.pop("rotary_fraction")}
        values["rope_scaling"] = "linear"
    if values["rope_scaling_factor"] != 1:
        return values | proportional
    attention_factor = values.get("rope_attention_factor", 0)
    if attention_factor not in (0, 1):
        raise FieldError(f"{name}.attention_factor: is {attention_factor}, with a factor of 1: not supported")
    if values.get("rope_query_scale"):
        raise FieldError(f"{name}.{QUERY_SCALE}: is {values['rope_query_scale']}, with a factor of 1: not supported")
    return proportional  # it scales nothing


def _kind(scaling: Any) -> str:
    """Return the rope_type of a table; if it is none, "default", as for a model without one."""
    if not isinstance(scaling, Mapping):
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _attention_factor(scaling: Fields) -> Any:
    """Return YaRN's factor of rotated queries and keys as transformers does; 0: it follows from the scaling alone."""
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    factor, scale, scale_of_all = (scaling.get(field) or 0 for field in ("factor", *YARN_SCALES))
    are_numbers = all(isinstance(value, (int, float)) for value in (factor, scale, scale_of_all))
    if not are_numbers or factor <= 0 or not scale or not scale_of_all:
        return 0.0
    return (0.1 * scale * math.log(factor) + 1.0) / (0.1 * scale_of_all * math.log(factor) + 1.0)


def read_softmax_scale(fields: Fields, head_width: int) -> float:
    """Return model.softmax_scale of a family whose scores YaRN's mscale_all_dim scales; 0: it is 1 / sqrt(head_width).

    Queries and keys of all features are multiplied by 0.1 mscale_all_dim ln(factor) + 1 (arXiv 2309.00071, 3.4).
    """
    for table in _tables(fields).values():
        factor, scale = table.get("factor") or 0, table.get("mscale_all_dim") or 0
        are_numbers = all(isinstance(value, (int, float)) for value in (factor, scale))
        if _kind(table) == "yarn" and are_numbers and factor > 1 and scale:
            return float(head_width**-0.5 * (0.1 * scale * math.log(factor) + 1.0) ** 2)
    return 0.0


def write_softmax_scale(model: Model) -> dict[str, float]:
    """Return the fields of YaRN's table for model.softmax_scale in such a family; rounded, so that 1 comes back."""
    if not (model.softmax_scale and model.has_yarn):
        return {}
    slope = 0.1 * math.log(model.rope_scaling_factor)
    of_all = math.sqrt(model.softmax_scale * math.sqrt(model.head_width))
    of_rotated = of_all * model.yarn_attention_factor
    scales = (round((scale - 1.0) / slope, 12) for scale in (of_rotated, of_all))
    return dict(zip(YARN_SCALES, scales, strict=True))


def rope_names(fields: Fields) -> dict[str, str]:
    """Return the names of the fields in the tables of rotary positions, by their keys of [model]."""
    names: dict[str, str] = {}
    for name, table in _tables(fields).items():
        names |= {key: f"{name}.{field}" for field, (key, _) in SCALING_FIELDS.get(_kind(table), {}).items()}
    return names


def rope_keys(model: Model) -> set[str]:
    """Return the keys rope_* of [model] that its rotary positions depend on."""
    if not model.has_rotary_positions:
        return set()
    keys = {"rope_theta", "rope_scaling_factor", "rope_head_dim", "rope_interleaved", "rope_proportional"}
    if model.rope_scaling_factor > 1.0:
        keys |= {"rope_scaling", *(key for key, _ in SCALING_FIELDS[model.rope_scaling].values())}
    return keys


def has_null_theta(fields: Fields) -> bool:
    """Return whether a config.json has a base of rotary positions, and it is null."""
    places = (fields, *_tables(fields).values())
    return any("rope_theta" in place and place["rope_theta"] is None for place in places)


def write_no_rope() -> dict[str, Any]:
    """Return the fields of a model without rotary positions."""
    return {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}


def write_rope(model: Model) -> dict[str, Any]:
    """Return the fields of a model's rotary positions in both spellings."""
    scaling: dict[str, Any] = {}
    if model.rope_scaling_factor > 1.0:
        scaling = {"rope_type": model.rope_scaling}
        for field, (key, default) in SCALING_FIELDS[model.rope_scaling].items():
            if getattr(model, key) != 0 or default != 0:  # 0: off, or computed from the factor, here and there
                scaling[field] = getattr(model, key)
    if model.rope_proportional and model.rope_scaling in ("linear", Model.rope_scaling):
        factor = {"factor": model.rope_scaling_factor} if model.rope_scaling_factor > 1.0 else {}
        scaling = {"rope_type": PROPORTIONAL, FRACTION: model.rotary_fraction, **factor}
    parameters = {"rope_theta": model.rope_theta, "rope_type": "default"} | scaling
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling or None, "rope_parameters": parameters}


def with_query_scale(written: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Return the tables with the fields by which transformers scales queries, also where they stay as they are."""
    scale = {QUERY_SCALE: model.rope_query_scale, ORIGINAL_LENGTH: model.max_sequence_length}
    return {name: written[name] and scale | written[name] for name in SPELLINGS}


def write_rope_by_type(views: Mapping[str, Model], family: HubFamily) -> dict[str, Any]:
    """Return the fields of a model whose blocks of each layer type have the rotary positions of a view."""
    tables = {layer_type: write_rope(view)["rope_parameters"] for layer_type, view in views.items()}
    if family.has_no_old_rope:
        return {"rope_parameters": tables}
    of_full = views.get(FULL) or next(iter(views.values()))
    written = write_rope(of_full) | {"rope_parameters": tables}
    if family.window_rope_theta is not None and SLIDING in views:
        written[WINDOW_THETA] = views[SLIDING].rope_theta
    return written
