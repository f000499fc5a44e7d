"""Blocks that differ in window and rotary positions, in config.json: layer_types, no_rope_layers. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchllm.config import Model
from torchllm.facts.parts.registry import mixer
from torchllm.tools.hub.families.family import FULL, LAYER_TYPES, SLIDING, FieldError, HubFamily
from torchllm.tools.hub.rope import (
    FRACTION,
    has_null_theta,
    with_query_scale,
    write_no_rope,
    write_rope,
    write_rope_by_type,
)

Fields = Mapping[str, Any]
"""of config.json"""


class BlockForm(NamedTuple):
    """The form of one block, as config.json says it."""

    layer_type: str
    """FULL, SLIDING, or one of the family's `mixers`"""
    has_rope: bool
    """whether it has rotary positions"""

    @property
    def words(self) -> tuple[str, str]:
        """The words in the name of a kind for its rotary positions, and for its window or its mixer."""
        word = "window" if self.layer_type == SLIDING else self.layer_type.removesuffix("_attention")
        return "rope" if self.has_rope else "no_rope", word


def read_blocks(fields: Fields, family: HubFamily, layers: int, window: Any) -> list[BlockForm]:
    """Return the form of each block. window: of the blocks that have one; 0: none has. Raises FieldError."""
    have_rope = [not (family.has_optional_rope and has_null_theta(fields))] * layers
    if family.has_no_rope_layers:
        have_rope = _read_no_rope_layers(fields, layers)
    types = fields.get("layer_types")
    if types is not None:
        _check_layer_types(types, layers, family, window)
    elif family.default_layer_types is not None:
        types = family.default_layer_types(fields, have_rope)
    else:
        types = [SLIDING if window else FULL] * layers
    if SLIDING in types and not window:
        raise FieldError("layer_types: sliding_attention needs a sliding_window, but there is none")
    return [BlockForm(*form) for form in zip(types, have_rope, strict=True)]


def _check_layer_types(types: Any, layers: int, family: HubFamily, window: Any) -> None:
    """Raise FieldError if layer_types is wrong, or not supported in the family."""
    allowed = (*LAYER_TYPES, *family.mixers)
    if not isinstance(types, list) or len(types) != layers or not all(kind in allowed for kind in types):
        known = " or ".join(allowed)
        raise FieldError(f"layer_types: must be {known} for each of num_hidden_layers blocks, not {types!r}")
    if family.default_layer_types is not None:
        return
    if len(set(types)) > 1:
        raise FieldError("layer_types: a sliding window of some blocks and not of others is not supported in this type")
    if FULL in types and window:
        # transformers' AutoConfig reads a mistral with this field as a ministral, and a mixtral without it
        raise FieldError(f"layer_types: is full_attention, but sliding_window is {window}: remove one of them")


def _read_no_rope_layers(fields: Fields, layers: int) -> list[bool]:
    """Return whether each block has rotary positions: a 1 in no_rope_layers. Raises FieldError."""
    have_rope = fields.get("no_rope_layers")
    interval = fields.get("no_rope_layer_interval", 4)
    if have_rope is None:
        if type(interval) is not int or interval < 1:
            raise FieldError(f"no_rope_layer_interval: must be a whole number of at least 1, not {interval!r}")
        return [(index + 1) % interval != 0 for index in range(layers)]
    if not isinstance(have_rope, list) or len(have_rope) < layers or not all(entry in (0, 1) for entry in have_rope):
        raise FieldError(f"no_rope_layers: must be 0 or 1 for each of num_hidden_layers blocks, not {have_rope!r}")
    return [entry == 1 for entry in have_rope[:layers]]


def keys_of_blocks(blocks: Sequence[BlockForm], keys: Mapping[BlockForm, dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of [model] for the blocks of a model. keys: of each form.

    If blocks differ, there are a pattern and its kinds. A kind has the keys that are neither the same in all blocks nor
    the default.
    """
    first, *others = keys.values()
    if not others:
        return first
    shared = {}
    for key, value in first.items():
        if all(key in other and other[key] == value for other in others):
            shared[key] = value
    names = dict(zip(keys, _names_of_kinds(list(keys)), strict=True))
    kinds: dict[str, dict[str, Any]] = {}
    for block, table in keys.items():
        kind = kinds.setdefault(names[block], {})
        for key, value in table.items():
            if key not in shared and value != getattr(Model, key):
                kind[key] = value
    return shared | {"pattern": _shortest_period([names[block] for block in blocks]), "kinds": kinds}


def _names_of_kinds(forms: Sequence[BlockForm]) -> list[str]:
    """Return a name for each of several forms of blocks: the words for the features that differ."""
    words = zip(*(form.words for form in forms), strict=True)
    differing = [of_feature for of_feature in words if len(set(of_feature)) > 1]
    return ["_".join(parts) for parts in zip(*differing, strict=True)]


def _shortest_period(names: Sequence[str]) -> list[str]:
    """Return the shortest list that, repeated, begins with these names."""
    for length in range(1, len(names)):
        if all(name == names[index % length] for index, name in enumerate(names)):
            return list(names[:length])
    return list(names)


def write_blocks(model: Model, family: HubFamily) -> dict[str, Any]:
    """Return the fields of config.json for the windows and the rotary positions of a model's blocks."""
    views = model.views[: model.layers]
    types_of_mixers = {name: layer_type for layer_type, name in family.mixers.items()}
    types = [types_of_mixers.get(view.mixer, SLIDING if view.window else FULL) for view in views]
    turned = [view for view in views if view.has_rotary_positions and "rope_theta" not in mixer(view).unread]
    with_rope = next(iter(turned), model)
    written: dict[str, Any] = {}
    if family.has_rope_by_type:
        written |= write_rope_by_type(dict(zip(types, views, strict=True)), family)
    elif family.has_rotary_positions:
        written |= write_rope(with_rope) if turned or not family.has_optional_rope else write_no_rope()
    if family.scales_queries:
        written |= with_query_scale(written, with_rope)
    if family.rotary_fraction is not None:
        written[FRACTION] = with_rope.rotary_fraction
        written["rope_parameters"][FRACTION] = with_rope.rotary_fraction
    if family.rotary_width:
        written[family.rotary_width] = with_rope.rotary_width
    if family.has_no_rope_layers:
        written["no_rope_layers"] = [int(view.has_rotary_positions) for view in views]
    if family.has_window_fields:
        full = types.index(SLIDING) if SLIDING in types else model.layers
        written |= {"use_sliding_window": SLIDING in types, "max_window_layers": full}
    if family.default_layer_types is not None:
        written["layer_types"] = types
    return written
