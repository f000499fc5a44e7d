"""Rotary positions in config.json, in the spelling of transformers 4 and in that of transformers 5. No torch.

transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters` with both in it, and each
takes its default, silently, where it finds only the other's. Both spellings are read here, and both are written.
"""

import math
from collections.abc import Mapping
from typing import Any

from torchllm.config import Model

Fields = Mapping[str, Any]
"""of config.json"""

SPELLINGS = ("rope_scaling", "rope_parameters")
"""tables of transformers 4 and 5"""
FRACTION = "partial_rotary_factor"
"""of each head, in one of the tables or beside them"""
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
        "original_max_position_embeddings": ("rope_original_length", REQUIRED),
    },
    "yarn": {
        "factor": ("rope_scaling_factor", REQUIRED),
        "original_max_position_embeddings": ("rope_original_length", None),
        "beta_fast": ("rope_beta_fast", 32.0),
        "beta_slow": ("rope_beta_slow", 1.0),
        "truncate": ("rope_truncate", True),
        "attention_factor": ("rope_attention_factor", 0.0),
    },
}
"""rope_type -> its fields, each with the key of [model] that says the same, and its default in transformers"""


class RopeError(Exception):
    """Rotary positions that the model here has not. The message begins with the field of config.json."""


def read_rotary_fraction(fields: Fields, default: float | None) -> float:
    """Return what partial_rotary_factor says, which is beside the other fields, or in one of their tables.

    default: where there is none; None: the model turns whole heads. Raises RopeError if it says otherwise.
    """
    found = {}
    for name in ("", *SPELLINGS):
        table = fields.get(name) if name else fields
        if isinstance(table, Mapping) and table.get(FRACTION) is not None:
            found[f"{name}.{FRACTION}".removeprefix(".")] = table[FRACTION]
    fraction = next(iter(found.values()), 1.0 if default is None else default)
    for name, value in found.items():
        if default is None and value != 1:
            raise RopeError(f"{name}: rotary positions of a part of each head are not supported in this type")
        if value != fraction:
            raise RopeError(f"{name}: is {value}, but {next(iter(found))} is {fraction}: remove one of them")
    return fraction


def read_rope(fields: Fields, default_theta: float) -> dict[str, Any]:
    """Return the keys of [model] that say what the fields of rotary positions say. Raises RopeError."""
    old = _read_old_spelling(fields, default_theta)
    new = _read_new_spelling(fields, default_theta)
    if new is None:
        return old
    has_old = "rope_theta" in fields or fields.get("rope_scaling")
    if has_old and old != new:
        raise RopeError("rope_parameters: says otherwise than rope_theta and rope_scaling: remove one of the spellings")
    return new


def _read_old_spelling(fields: Fields, default_theta: float) -> dict[str, Any]:
    """Return what rope_theta and rope_scaling say."""
    values = {"rope_theta": fields.get("rope_theta", default_theta)}
    if fields.get("rope_scaling"):
        values |= _read_scaling(fields, "rope_scaling")
    return values


def _read_new_spelling(fields: Fields, default_theta: float) -> dict[str, Any] | None:
    """Return what rope_parameters says; None if there is none."""
    if not fields.get("rope_parameters"):
        return None
    values = _read_scaling(fields, "rope_parameters")
    theta = fields.get("rope_theta", default_theta)
    return {"rope_theta": fields["rope_parameters"].get("rope_theta", theta), **values}


def _read_scaling(fields: Fields, name: str) -> dict[str, Any]:
    """Return what the table of a field, rope_scaling or rope_parameters, says, without rope_theta."""
    scaling = fields[name]
    if not isinstance(scaling, dict):
        raise RopeError(f"{name}: must be a table, not {scaling!r}")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise RopeError(f"{name}: is another one for each kind of block, which is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in SCALING_FIELDS:
        known = ", ".join(["default", *SCALING_FIELDS])
        raise RopeError(f"{name}.rope_type: {kind!r} is not supported; these are: {known}")
    values: dict[str, Any] = {"rope_scaling": kind}
    for field, (key, default) in SCALING_FIELDS[kind].items():
        value = scaling.get(field)
        if value is None and default is REQUIRED:
            raise RopeError(f"{name}.{field}: is missing, but rope_type {kind!r} needs it")
        values[key] = default if value is None else value
    if kind == "yarn":
        values |= _complete_yarn(fields, scaling, values)
    return values


def _complete_yarn(fields: Fields, scaling: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """Return what YaRN takes from other fields, where its own are missing, as transformers does."""
    completed = {}
    if values["rope_original_length"] is None:
        completed["rope_original_length"] = fields.get("max_position_embeddings")
    scale, scale_of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scaling.get("attention_factor") is None and scale and scale_of_all:
        logarithm = 0.1 * math.log(values["rope_scaling_factor"])
        completed["rope_attention_factor"] = (scale * logarithm + 1.0) / (scale_of_all * logarithm + 1.0)
    return completed


def write_rope(model: Model) -> dict[str, Any]:
    """Return the fields of a model's rotary positions in both spellings."""
    scaling: dict[str, Any] = {}
    if model.rope_scaling_factor > 1.0:
        scaling = {"rope_type": model.rope_scaling}
        for field, (key, _) in SCALING_FIELDS[model.rope_scaling].items():
            scaling[field] = getattr(model, key)
        if not scaling.get("attention_factor", True):  # 0: computed from the factor, here and there
            del scaling["attention_factor"]
    parameters = {"rope_theta": model.rope_theta, "rope_type": "default"} | scaling
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling or None, "rope_parameters": parameters}
