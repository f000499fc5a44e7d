"""config.json -> the keys of [model], and back. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from torchllm.config import Config, Model
from torchllm.config.errors import UserError
from torchllm.config.schema import KIND_KEYS, OPTIONS, ROPE_KEYS
from torchllm.facts.parts.registry import feed_forward, mixer
from torchllm.tools.config.checks import problems_of_use
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.hub.blocks import BlockForm, keys_of_blocks, read_blocks, write_blocks
from torchllm.tools.hub.families.family import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    ConfigField,
    FieldError,
    HubFamily,
    RequiredField,
    UnmappedParameter,
)
from torchllm.tools.hub.families.registry import HUB_FAMILIES
from torchllm.tools.hub.families.text_part import TEXT_CONFIG, TEXT_PARTS, TextPart
from torchllm.tools.hub.missing_parts import lines_of_missing
from torchllm.tools.hub.quantization import Plain, Quantization, read_quantization
from torchllm.tools.hub.rope import (
    FRACTION,
    LENGTH,
    ORIGINAL_LENGTH,
    QUERY_SCALE,
    WINDOW_THETA,
    read_rope,
    read_rotary_fraction,
    read_softmax_scale,
    rope_keys,
    rope_names,
    rope_of_type,
    unknown_rope_fields,
    write_softmax_scale,
)

ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
SPARSE_STEP_FIELDS = ("decoder_sparse_step", "mlp_only_layers")
WINDOW_FIELDS = ("use_sliding_window", "max_window_layers")
NO_ROPE_FIELDS = ("no_rope_layers", "no_rope_layer_interval")
UNUSED_FIELDS = {
    "_attn_implementation",
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation",
    "_experts_implementation_internal",
    "_name_or_path",
    "_output_attentions",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "base_model_ep_plan",
    "base_model_fsdp_plan",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "experts_implementation",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "ignore_keys_at_rope_validation",
    "is_decoder",
    "label2id",
    "model_type",
    "mtp_layer_types",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_cross_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
    "vision_aspect_ratio",
    "vision_feature_layer",
    "vision_feature_select_strategy",
}
"""fields of any config.json that do not change the weights or the computation"""
BASE_FIELDS = (
    RequiredField("is_causal", (True,), "attention to later tokens"),
    RequiredField("is_encoder_decoder", (False, None), "an encoder"),
    RequiredField("attention_chunk_size", (None,), "attention within chunks"),
    RequiredField("kv_sharing_modes", (None,), "keys and values that several blocks share"),
    RequiredField("per_layer_config", (None, {}), "blocks of several forms"),
    *(RequiredField(name, (None,), "a model within the model") for name in ("decoder", "generator", "text_config")),
    *(
        RequiredField(name, (None,), "an attribute of transformers' classes, not of a model")
        for name in (
            "_heterogeneity_spec",
            "_rope_type_labels",
            "default_rope_type",
            "default_theta",
            "is_heterogeneous",
            "sub_configs",
            "sub_configs_defaults",
        )
    ),
)
"""fields that transformers' base classes read of any config.json; no export writes them"""
WINDOW = RequiredField("sliding_window", (None,), "a sliding window in a model of this type")
PLAIN_FEATURES = {
    **{key: getattr(Model, key) for key in OPTIONS},
    "mixer": "attention",
    "rope_interleaved": False,
    "router_groups": 1,
    "router_top_groups": 1,
    "experts": 0,
    "shared_experts": 0,
    "shared_gate": False,
    "dense_layers": 0,
    "router_score": "softmax",
    "router_bias": False,
}
"""keys of [model] that a family's `features` or fields may say otherwise"""
EXPERT_KEYS = (
    "top_k",
    "expert_ffn",
    "shared_experts",
    "shared_gate",
    "dense_beside",
    "dense_layers",
    "router_score",
    "router_renormalize",
    "router_scale",
    "router_bias",
    "expert_biases",
    "router_groups",
    "router_top_groups",
)
"""keys of [model] that say nothing of a dense model"""
ZERO_MEANS_NULL = {"kv_heads", "head_dim", "window", "logit_softcap", "score_softcap", "latent_q_width"}
"""keys of [model] whose 0 is null in config.json: kv_heads = heads; head_dim = hidden / heads; none of the others"""
FREE_KEYS = {
    "attention",
    "base_width",
    "frozen",
    "from_hf",
    "kinds",
    "pattern",
    "upcycle",
    "upcycle_noise",
    "vocab_padding",
    "router_dtype",
    "router_bias_rate",
    "balance_loss",
    "balance_weight",
    "router_z_loss",
    "mtp_weight",
}
"""keys of [model] that no config.json knows: they say how a model is trained or run, not its form, or as pattern and
kinds how it is written"""


class NoFamily(UserError):
    """A model that a family of Hugging Face, or none of them, has the form of."""

    def __init__(self, message: str, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = keys
        """of [model], whose values the family cannot have"""


@dataclass
class ReadConfig:
    family: HubFamily | None = None
    """None: unknown, or not supported"""
    values: dict[str, Any] = field(default_factory=dict)
    """keys of [model]"""
    fixed: dict[str, str] = field(default_factory=dict)
    """keys of [model] that the weights fix -> the fields of config.json that say so"""
    problems: list[str] = field(default_factory=list)
    """faults, each with its field"""
    quantization: Quantization = field(default_factory=Plain)
    """how the files store the weights"""
    text_part: TextPart | None = None
    """the model that the text model is a part of; None: it is the whole model"""
    unknown_fields: list[str] = field(default_factory=list)
    """fields that nothing here knows, and that are not used"""

    def report(self, name: str, message: str) -> None:
        """Add a problem of a field."""
        self.problems.append(f"{name}: {message}")


def read_config_json(content: Mapping[str, Any]) -> ReadConfig:
    """Return the values of [model] in a config.json, with all faults and unsupported settings.

    For a model of text and more these are the values of its text model.
    """
    read = ReadConfig()
    model_type = content.get("model_type")
    text_part = TEXT_PARTS.get(model_type) if isinstance(model_type, str) else None
    if text_part is not None:
        return _read_text_part(content, text_part)
    read.family = _family_of(model_type)
    try:
        read.quantization = read_quantization(content.get("quantization_config"))
    except FieldError as error:
        read.problems.append(str(error))
    if read.family is None:
        _report_unsupported(content, read)
        return read
    _check_architecture(content, read.family, read)
    try:
        content = read.family.prepared(content)
    except FieldError as error:
        read.problems.append(str(error))
        return read
    if read.family.type_of_kinds and _has_kinds(content):
        read.family = HUB_FAMILIES[read.family.type_of_kinds]
    if read.family.has_window_fields and not content.get("use_sliding_window", False):
        content = {**content, "sliding_window": None}
    _check_required(content, read.family, read)
    _read_fields(content, read.family, read)
    _read_blocks(content, read.family, read)
    _check_values(content, read)
    if read.family.has_scaled_scores and not read.problems:
        read.values["softmax_scale"] = read_softmax_scale(content, Model(**read.values).head_width)
    if read.family.has_experts:
        _read_experts(content, read.family, read)
    read.unknown_fields = sorted(content.keys() - known_fields(read.family))
    if read.family.has_rotary_positions:
        read.unknown_fields += sorted(unknown_rope_fields(content))
    return read


def _read_text_part(content: Mapping[str, Any], text_part: TextPart) -> ReadConfig:
    """Return the result of `read_config_json` for the text model within a model."""
    try:
        read = read_config_json(text_part.fields(content))
    except FieldError as error:
        return ReadConfig(problems=[str(error)])
    read.text_part = text_part
    read.problems = [f"{TEXT_CONFIG}.{problem}" for problem in read.problems]
    read.unknown_fields = [f"{TEXT_CONFIG}.{name}" for name in read.unknown_fields]
    return read


def _family_of(model_type: Any) -> HubFamily | None:
    """Return the family that reads a model_type; None: there is none."""
    families = HUB_FAMILIES.values()
    return next((family for family in families if model_type in (family.model_type, *family.other_types)), None)


def _has_kinds(content: Mapping[str, Any]) -> bool:
    """Return whether some blocks have the window and others not."""
    types = content.get("layer_types")
    return isinstance(types, list) and all(layer_type in types for layer_type in LAYER_TYPES)


def _report_unsupported(content: Mapping[str, Any], read: ReadConfig) -> None:
    """Report that models of a type cannot be read, and which of their parts are missing here."""
    model_type = content.get("model_type")
    supported = f"supported are {', '.join([*HUB_FAMILIES, *TEXT_PARTS])}"
    if not isinstance(model_type, str):
        read.report("model_type", f"is missing; {supported}")
        return
    read.report("model_type", f"{model_type!r} is not supported; {supported}")
    read.problems += lines_of_missing(content, fields_of_families())


@cache
def fields_of_families() -> frozenset[str]:
    """Return the fields that some family reads, or that do nothing in any model."""
    names = {TEXT_CONFIG, "auto_map"}
    for family in HUB_FAMILIES.values():
        names |= known_fields(family)
    return frozenset(names)


def known_fields(family: HubFamily) -> set[str]:
    """Return the fields of a family's config.json that are understood, or known to do nothing."""
    names = set(UNUSED_FIELDS) | family.field_names | set(family.ignored_fields)
    names |= {required.name for required in _required_fields(family)}
    names |= {"quantization_config", FRACTION, "layer_types"} | family.constant_fields.keys()
    if family.has_rotary_positions:
        names |= set(ROPE_FIELDS)
    if family.window_rope_theta is not None:
        names.add(WINDOW_THETA)
    if family.has_rotary_positions and not family.has_rope_by_type:  # those have it in their tables alone
        names.add(ORIGINAL_LENGTH)
    if family.rotary_width:
        names.add(family.rotary_width)
    if family.names_own_code:
        names.add("auto_map")
    if family.has_window_fields:
        names |= set(WINDOW_FIELDS)
    if family.has_no_rope_layers:
        names |= set(NO_ROPE_FIELDS)
    if family.has_sparse_step:
        names |= set(SPARSE_STEP_FIELDS)
    if family.has_mlp_layer_types:
        names.add("mlp_layer_types")
    return names


def _required_fields(family: HubFamily) -> list[RequiredField]:
    """Return the fields that must have one of some values in a family's config.json."""
    required = [*family.required, *family.unwritten, *BASE_FIELDS]
    has_window = "sliding_window" in family.field_names | set(family.ignored_fields)
    return required if has_window else [*required, WINDOW]


def _check_architecture(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> None:
    """Report an architecture that is not the family's."""
    architectures = content.get("architectures")
    if architectures and architectures != [family.architecture]:
        read.report("architectures", f"must be {[family.architecture]}, a language model, not {architectures}")


def _check_required(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> None:
    """Report fields that ask for an unsupported feature."""
    for required in _required_fields(family):
        value = required.value_in(content)
        if value not in required.values:
            read.report(required.name, f"is {value!r}: {required.feature}, not supported")


def _read_fields(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> None:
    """Read the fields that are keys of [model] by themselves."""
    read.values |= PLAIN_FEATURES | family.features
    read.fixed |= dict.fromkeys([*PLAIN_FEATURES, "family"], "model_type")
    for config_field in family.fields:
        if config_field.needs and not read.values.get(config_field.needs):
            continue
        value = _read_field(content, config_field, read)
        if value is None and config_field.key == "ffn" and family.computes_ffn:
            hidden = read.values.get("hidden")
            value = 4 * hidden if type(hidden) is int else 1  # another problem is about the width
        if value is None and config_field.key in ZERO_MEANS_NULL:
            value = 0
        elif value == 0 and config_field.key in (*ZERO_MEANS_NULL, "expert_ffn", "softmax_scale"):
            least = "over 0" if isinstance(getattr(Model, config_field.key), float) else "at least 1"
            read.report(_name_in(content, config_field), f"must be {least}, not {value}")
        if value is None:
            read.report(_name_in(content, config_field), "is null, which says nothing")
        else:
            read.values[config_field.key] = config_field.value_of(value)
        if config_field.is_fixed:
            read.fixed[config_field.key] = config_field.name
        else:
            read.fixed.pop(config_field.key, None)
    for key, value_of in family.derived.items():
        read.fixed[key] = "model_type"
        if "hidden" in read.values and type(read.values["hidden"]) is int:  # else another problem is about it
            read.values[key] = value_of(read.values["hidden"])


def _name_in(content: Mapping[str, Any], config_field: ConfigField) -> str:
    """Return the name of a field in a config.json; the first of its names if it lacks it."""
    return next((name for name in config_field.names if name in content), config_field.name)


def _read_field(content: Mapping[str, Any], config_field: ConfigField, read: ReadConfig) -> Any:
    """Return the value of a field, by the first of its names that is there; report another name with another value."""
    first = _name_in(content, config_field)
    value = content.get(first, config_field.default)
    for other in config_field.names:
        if content.get(other, value) != value:
            read.report(other, f"is {content[other]!r}, but {first} is {value!r}: remove one of them")
    return value


def _read_experts(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> None:
    """Read which blocks have experts, and the expert width of a family whose blocks all have experts."""
    for config_field in family.fields:
        is_one_of = config_field.key in ("experts", "shared_experts") and not config_field.needs
        if is_one_of and read.values.get(config_field.key) == 0:
            read.report(_name_in(content, config_field), "is 0, but all models of this type have some")
    if family.has_shared_width and {"shared_experts", "expert_ffn"} <= read.values.keys():
        read.values["shared_experts"] = _read_shared_experts(read)
    if family.has_sparse_step and "layers" in read.values:
        read.values["dense_layers"] = _read_dense_layers(content, read.values["layers"], read)
    if family.has_mlp_layer_types and "layers" in read.values:
        read.values["dense_layers"] = _read_mlp_layer_types(content, read)
    if read.values.get("dense_layers", 0) >= read.values.get("layers", math.inf):
        read.report(read.fixed["dense_layers"], "leaves no block with experts")
    has_dense_width = any(config_field.key == "ffn" for config_field in family.fields)
    if not has_dense_width and "expert_ffn" in read.values:
        read.values |= {"ffn": read.values["expert_ffn"], "expert_ffn": 0}
        read.fixed["ffn"] = read.fixed["expert_ffn"]


def _read_shared_experts(read: ReadConfig) -> int:
    """Return the number of shared experts, whose width was read; report it if it is not a whole number."""
    width, of_one = read.values["shared_experts"], read.values["expert_ffn"]
    if of_one and width % of_one:
        reason = f"is {width}, no multiple of {read.fixed['expert_ffn']} = {of_one}, not supported"
        read.report(read.fixed["shared_experts"], reason)
    return width // max(1, of_one)


def _read_dense_layers(content: Mapping[str, Any], layers: int, read: ReadConfig) -> int:
    """Return how many of the first blocks have no experts; report it if that is so of others.

    A block has experts if its number, counted from 1, is a multiple of decoder_sparse_step, and its index, counted from
    0, is not in mlp_only_layers.
    """
    step = content.get("decoder_sparse_step", 1)
    dense = content.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        read.report("decoder_sparse_step", f"must be a whole number of at least 1, not {step!r}")
        return 0
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        read.report("mlp_only_layers", f"must be a list of whole numbers, not {dense!r}")
        return 0
    sparse = [index for index in range(layers) if (index + 1) % step == 0 and index not in dense]
    dense_layers = layers - len(sparse)
    name = "mlp_only_layers" if step == 1 else "decoder_sparse_step"
    read.fixed["dense_layers"] = name
    if sparse and sparse[0] != dense_layers:
        read.report(name, f"is {content[name]!r}: a block without experts after one with experts is not supported")
    return dense_layers


def _read_mlp_layer_types(content: Mapping[str, Any], read: ReadConfig) -> int:
    """Return how many of the first blocks have no experts; report it if that is so of others."""
    types = content.get("mlp_layer_types")
    dense, layers = read.values.get("dense_layers", 0), read.values["layers"]
    if types is None:
        return dense
    first = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * first + ["sparse"] * (layers - first):
        read.report("mlp_layer_types", f'must be {layers} words, "dense" for the first blocks, then "sparse"')
    elif content.get("first_k_dense_replace", first) != first:
        read.report("mlp_layer_types", f"has {first} dense blocks, but first_k_dense_replace is {dense}")
    read.fixed["dense_layers"] = "mlp_layer_types"
    return first


def _read_blocks(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> None:
    """Read the windows and the rotary positions of the blocks."""
    layers = read.values.get("layers")
    window = read.values.pop("window", 0)
    blocks = [BlockForm(FULL, has_rope=True)]
    try:
        if type(layers) is int and layers > 0:  # else another problem is about it
            blocks = read_blocks(content, family, layers, window)
    except FieldError as error:
        read.problems.append(str(error))
    keys: dict[BlockForm, dict[str, Any]] = {}
    for block in dict.fromkeys(blocks):
        keys[block] = {"window": window if block.layer_type == SLIDING else 0}
        if block.layer_type in family.mixers:
            keys[block]["mixer"] = family.mixers[block.layer_type]
        elif family.mixers:
            keys[block]["mixer"] = read.values["mixer"]
        keys[block] |= family.of_types.get(block.layer_type, {})
        if block.layer_type == FULL:
            keys[block] |= _read_full_fields(content, family, read)
        if family.has_rotary_positions:
            keys[block] |= _read_rotary_positions(content, block, family, read)
    read.values |= keys_of_blocks(blocks, keys)


def _read_full_fields(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> dict[str, Any]:
    """Return the keys of [model] of the blocks with full attention, by the fields that are theirs alone."""
    found = {}
    for config_field in family.full_fields:
        read.fixed[config_field.key] = config_field.name
        value = _read_field(content, config_field, read)
        if value is not None:
            found[config_field.key] = value
    return found


def _read_rotary_positions(
    content: Mapping[str, Any], block: BlockForm, family: HubFamily, read: ReadConfig
) -> dict[str, Any]:
    """Return the keys of [model] for the rotary positions of a block; without those that it reports as unsupported."""
    try:
        if family.has_rope_by_type:
            content = rope_of_type(content, block.layer_type, family)
        if family.rope_scaling and not (content.get("rope_parameters") or content.get("rope_scaling")):
            content = {**content, "rope_scaling": family.rope_scaling}
        fraction = read_rotary_fraction(content, family.rotary_fraction, _share_of_width(content, family, read))
        length = read.values.get("max_sequence_length")  # also where it is a default
        rope = read_rope({**content, LENGTH: length}, family.rope_theta)
        if rope.get("rope_query_scale") and not family.scales_queries:
            raise FieldError(f"{QUERY_SCALE}: queries scaled by position are not supported in this type")
        if rope.get("rope_scaling") == "yarn" and family.norms_after_rotation:
            raise FieldError("rope_parameters: yarn is not supported in this type, whose norms divide its factor out")
    except FieldError as error:
        if str(error) not in read.problems:  # else another block has it, too
            read.problems.append(str(error))
        return {}
    return {"rotary_fraction": fraction if block.has_rope else 0.0} | rope


def _share_of_width(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> dict[str, float]:
    """Return the share of a head that the field with the width of its rotary positions says, by its name; none if there
    is none. Raises FieldError."""
    width = content.get(family.rotary_width) if family.rotary_width else None
    if width is None:
        return {}
    head_dim = read.values.get("head_dim")
    if type(width) is not int or type(head_dim) is not int or not 0 < width <= head_dim:
        raise FieldError(f"{family.rotary_width}: must be a whole number from 1 to head_dim, not {width!r}")
    return {family.rotary_width: width / head_dim}


def _check_values(content: Mapping[str, Any], read: ReadConfig) -> None:
    """Report the values that [model] does not allow, by the names of their fields."""
    faults: list[ConfigError] = []
    checked = read_table(Model, read.values, faults)
    wrong = set()
    for fault in faults:
        read.report(_field_of(fault.path[-1], content, read), fault.message)
        wrong.add(fault.path[0])
    read.values = {key: getattr(checked, key) for key in read.values if key not in wrong}


def check_combination(content: Mapping[str, Any], read: ReadConfig) -> None:
    """Report the values that [model] allows, but not together, by the names of their fields. read: without problems."""
    for fault in problems_of_use(Config(model=Model(**read.values))):
        if fault.path[0] == "model" and fault.path[-1] not in FREE_KEYS:  # else it is about a run, which decides more
            read.report(_field_of(fault.path[-1], content, read), fault.message)


def _field_of(key: str, content: Mapping[str, Any], read: ReadConfig) -> str:
    """Return the name of the field that says a key of [model]."""
    assert read.family is not None
    names = {"rotary_fraction": FRACTION, "window": "sliding_window", "head_dim": "num_attention_heads"}
    names |= {config_field.key: _name_in(content, config_field) for config_field in read.family.fields}
    return (read.fixed | names | rope_names(content)).get(key, "rope_parameters")


def write_config_json(model: Model, family: HubFamily) -> dict[str, Any]:
    """Return a config.json of a model: every field that changes the computation, in all spellings.

    Raises NoFamily if the family's models cannot be like this one.
    """
    if family.heads_divide_hidden and model.hidden % model.heads:
        raise NoFamily(
            f"models of type {family.model_type!r} cannot have model.heads = {model.heads}: transformers reads none "
            f"whose heads do not divide hidden_size = {model.hidden}",
            ["heads"],
        )
    written = _write_fields(model, family)
    read = read_config_json(written)
    ours, theirs = form_of(model), form_of(Model(**read.values))
    differences = [key for key in ours if ours[key] != theirs[key]]
    if read.problems or differences:
        text = ", ".join(_said(model, key) for key in differences) or "; ".join(read.problems)
        raise NoFamily(f"models of type {family.model_type!r} cannot have {text}", differences)
    try:
        blocks = model.dense_layers + max(1, len(model.pattern))  # a block of each kind
        list(family.stored_tensors(replace(model, layers=blocks)))
    except UnmappedParameter as error:
        raise NoFamily(str(error)) from error
    return written


def _said(model: Model, key: str) -> str:
    """Return a key of [model], or of the kinds of blocks that have it, or of both, with its value."""
    said = [f"model.kinds.{kind}.{key} = {keys[key]!r}" for kind, keys in model.kinds.items() if key in keys]
    is_of_blocks = len(said) < len(model.kinds) and getattr(model, key) != getattr(Model, key)
    if not said or is_of_blocks:
        said.insert(0, f"model.{key} = {getattr(model, key)!r}")
    return ", ".join(said)


def _write_fields(model: Model, family: HubFamily) -> dict[str, Any]:
    """Return the fields of config.json that say what [model] says, and those that a family's models share."""
    resolved = form_of(model) | {"window": max(view.window for view in model.views)}
    if len(model.sparse_blocks) == model.blocks:
        resolved["ffn"] = model.ffn
    if family.has_shared_width:
        resolved["shared_experts"] *= resolved["expert_ffn"]
    resolved["softmax_scale"] = model.softmax_scale or model.head_width**-0.5
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    written |= family.constant_fields
    for config_field in (*family.fields, *family.full_fields):
        value = resolved[config_field.key]
        if isinstance(value, tuple):  # blocks differ: `write_config_json` says so where it reads one value again
            is_of_full = config_field in family.full_fields
            of_blocks = [view for view in model.views if family.full_fields and (view.window == 0) == is_of_full]
            value = form_of(of_blocks[0])[config_field.key] if of_blocks else value[0]
        if config_field.key == "window" and not value and family.says_windows_by_type:
            value = config_field.default  # of no block; transformers wants a number
        is_absent = config_field.needs != "" and not resolved[config_field.needs]
        if is_absent or (config_field.key in ZERO_MEANS_NULL and value == 0):
            value = None
        written |= dict.fromkeys(config_field.written_names, config_field.spelling_of(value))
    for required in family.required:
        written[required.name] = required.values[0]
    written |= write_blocks(model, family)
    if family.has_scaled_scores:
        for table in ROPE_FIELDS[1:]:
            written[table] = written[table] and written[table] | write_softmax_scale(model)
    if family.has_sparse_step:
        written |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": sorted({*range(model.layers)} - {*model.sparse_blocks}),
        }
    if family.has_mlp_layer_types:
        written["mlp_layer_types"] = ["sparse" if view.experts else "dense" for view in model.views[: model.layers]]
    return written


def form_of(model: Model) -> dict[str, Any]:
    """Return the keys of [model] that a config.json can say; those that 0 leaves to others are resolved.

    If blocks differ in a key, it has a tuple: its values in the blocks that it concerns. Keys without meaning for the
    model have their default: e.g. expert keys in a dense model, and `ffn` if no block has a layer of that width.
    """
    defaults = {item.name: item.default for item in fields(model)}
    values = {name: getattr(model, name) for name in defaults if name not in FREE_KEYS}
    of_views = [_form_of_block(view) for view in model.views[: model.layers]]
    for key in {*KIND_KEYS, *(key for of_view in of_views for key in of_view)} - FREE_KEYS:
        of_blocks = tuple(of_view[key] for of_view in of_views if key in of_view)
        values[key] = of_blocks if len(set(of_blocks)) > 1 else next(iter(of_blocks), defaults[key])
    if model.softmax_scale == model.head_width**-0.5:
        values["softmax_scale"] = 0.0
    if not model.experts:
        return values | {key: defaults[key] for key in EXPERT_KEYS}
    dense = model.blocks - len(model.sparse_blocks)
    if model.sparse_blocks[:1] in ((), (dense,)):  # no block without experts after one with experts
        values |= {"experts": model.experts, "dense_layers": dense}
    return values


def _form_of_block(view: Model) -> dict[str, Any]:
    """Return the keys that say something of a block, of those that kinds may have; see `form_of`."""
    keys = {*KIND_KEYS} - {*ROPE_KEYS} | rope_keys(view)
    keys -= {*feed_forward(view).unread, *mixer(view).unread}
    form = {key: getattr(view, key) for key in keys} | {"kv_heads": view.kv, "head_dim": view.head_width}
    form |= mixer(view).resolved(view)
    return form | {"expert_ffn": view.expert_width} if view.experts else form


def why_unfit(model: Model, family: HubFamily) -> NoFamily | None:
    """Return why a model cannot be exported as one of a family; None if it can."""
    try:
        write_config_json(model, family)
    except NoFamily as reason:
        return reason
    return None


def family_to_export(model: Model, model_type: str = "") -> HubFamily:
    """Return the family to export a model as: the family of model_type, where it came from, else the first that fits.

    Raises NoFamily if there is none, with the reason of each.
    """
    fitting = [family for family in HUB_FAMILIES.values() if why_unfit(model, family) is None]
    if not fitting:
        reasons = [str(reason) for reason in why_no_family(model)]
        raise NoFamily("the model has the form of no published family:\n  " + "\n  ".join(reasons))
    return next((family for family in fitting if family.model_type == model_type), fitting[0])


def why_no_family(model: Model) -> list[NoFamily]:
    """Return why a model cannot be exported as each family with experts, or without, like the model; nearest first.

    The list is empty if it can be exported as one of them.
    """
    families = [family for family in HUB_FAMILIES.values() if family.may_have(model.experts > 0)]
    reasons = [reason for family in families if (reason := why_unfit(model, family)) is not None]
    return sorted(reasons, key=lambda reason: len(reason.keys)) if len(reasons) == len(families) else []
