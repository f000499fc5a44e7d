"""config.json -> the keys of [model], and back. No torch.

read = read_config_json(fields)         values of [model], what the weights fix, all problems at once
fields = write_config_json(model, family)       every field, in the spelling of transformers 4 and 5
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torchllm.config import Model
from torchllm.config.checks import NO_EXPORT_OF_EXPERTS
from torchllm.config.errors import UserError
from torchllm.config.read import Fault, read_table
from torchllm.hugging_face.family import HubFamily, UnmappedParameter
from torchllm.hugging_face.registry import HUB_FAMILIES, UNSUPPORTED_TYPES
from torchllm.hugging_face.rope import RopeError, read_rope, write_rope

ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
WINDOW_FIELDS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
UNUSED_FIELDS = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
}
"""fields of any config.json that do not change the weights or what is computed with them"""
PLAIN_FEATURES = {"qk_norm": "none", "qkv_bias": False, "norm_position": "before", "experts": 0}
"""keys of [model] that a family's `features` may say otherwise"""
ZERO_MEANS_NULL = {"kv_heads", "head_dim", "window"}
"""keys of [model] whose 0 is null in config.json: as many as heads; hidden / heads; no window"""
FREE_KEYS = {"attention", "from_hf"}
"""keys of [model] that no config.json knows"""


class NoFamily(UserError):
    """A model that no family of Hugging Face has the form of."""


@dataclass
class ReadConfig:
    """What a config.json says."""

    family: HubFamily | None = None
    """None: unknown, or not supported"""
    values: dict[str, Any] = field(default_factory=dict)
    """keys of [model]"""
    fixed: dict[str, str] = field(default_factory=dict)
    """keys of [model] that the weights fix -> the fields of config.json that say so"""
    problems: list[str] = field(default_factory=list)
    """what is wrong with it, each with its field"""
    unknown_fields: list[str] = field(default_factory=list)
    """fields that nothing here knows, and that are not used"""

    def report(self, name: str, message: str) -> None:
        """Add a problem of a field."""
        self.problems.append(f"{name}: {message}")


def read_config_json(content: Mapping[str, Any]) -> ReadConfig:
    """Return what a config.json says of [model], with all that is wrong or not supported."""
    read = ReadConfig()
    model_type = content.get("model_type")
    read.family = HUB_FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if content.get("quantization_config"):
        read.report("quantization_config", "quantized weights are not supported: take the model's original ones")
    if content.get("partial_rotary_factor") not in (None, 1, 1.0):
        read.report("partial_rotary_factor", "rotary positions of a part of each head are not supported")
    if content.get("auto_map"):
        read.report("auto_map", "a model with code of its own is not supported")
    if read.family is None:
        read.report("model_type", _why_unsupported(model_type))
        return read
    _check_required(content, read.family, read)
    _read_fields(content, read.family, read)
    if read.family.has_rotary_positions:
        try:
            read.values |= read_rope(content)
        except RopeError as error:
            read.problems.append(str(error))
    _read_window(content, read.family, read)
    _check_values(read)
    read.unknown_fields = sorted(content.keys() - _known_fields(read.family))
    return read


def _why_unsupported(model_type: Any) -> str:
    """Return why models of a type cannot be read."""
    supported = f"supported are {', '.join(HUB_FAMILIES)}"
    if model_type is None:
        return f"is missing; {supported}"
    if model_type in UNSUPPORTED_TYPES:
        return f"{model_type!r} has {UNSUPPORTED_TYPES[model_type]}, which cannot be read here; {supported}"
    return f"{model_type!r} is not supported; {supported}"


def _known_fields(family: HubFamily) -> set[str]:
    """Return the fields of a family's config.json that are understood, or of which it is known that they do nothing."""
    names = set(UNUSED_FIELDS) | family.field_names | set(family.ignored_fields)
    names |= {required.name for required in family.required}
    names |= {"quantization_config", "partial_rotary_factor", "auto_map"}
    if family.has_rotary_positions:
        names |= set(ROPE_FIELDS)
    if family.has_window_fields:
        names |= set(WINDOW_FIELDS)
    return names


def _check_required(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> None:
    """Report the fields that say what the model here cannot do."""
    architectures = content.get("architectures")
    if architectures and architectures != [family.architecture]:
        read.report("architectures", f"must be {[family.architecture]}, a language model, not {architectures}")
    for required in family.required:
        value = content.get(required.name, required.values[0])
        if value not in required.values:
            read.report(required.name, f"is {value!r}: {required.feature}, not supported")


def _read_fields(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> None:
    """Read the fields that are keys of [model] by themselves."""
    read.values |= PLAIN_FEATURES | family.features
    read.fixed |= dict.fromkeys([*PLAIN_FEATURES, "family"], "model_type")
    for config_field in family.fields:
        value = content.get(config_field.name, config_field.default)
        if value is None and config_field.key == "ffn" and family.computes_ffn:
            value = 4 * content.get("n_embd", 768)
        if value is None and config_field.key in ZERO_MEANS_NULL:
            value = 0
        read.values[config_field.key] = value
        if config_field.is_fixed:
            read.fixed[config_field.key] = config_field.name


def _read_window(content: Mapping[str, Any], family: HubFamily, read: ReadConfig) -> None:
    """Read the sliding window of a family that says it by layers: Qwen's is off unless use_sliding_window is true."""
    if not family.has_window_fields:
        return
    read.values["window"] = 0
    if not content.get("use_sliding_window", False) or content.get("sliding_window", 4096) is None:
        return
    layers = read.values["layers"]
    kinds = content.get("layer_types")
    if kinds is None:
        full = content.get("max_window_layers", 28)
        kinds = ["full_attention"] * min(full, layers) + ["sliding_attention"] * max(0, layers - full)
    if len(set(kinds)) > 1:
        name = "layer_types" if content.get("layer_types") else "max_window_layers"
        read.report(name, "a sliding window of some blocks and not of others is not supported")
    elif "sliding_attention" in kinds:
        read.values["window"] = content.get("sliding_window", 4096)


def _check_values(read: ReadConfig) -> None:
    """Report the values that [model] does not allow, by the names of their fields."""
    assert read.family is not None
    names = {config_field.key: config_field.name for config_field in read.family.fields}
    faults: list[Fault] = []
    read_table(Model, read.values, faults)
    for fault in faults:
        (key,) = fault.path
        read.report(names.get(key, "rope_parameters"), fault.message)
        del read.values[key]


def write_config_json(model: Model, family: HubFamily) -> dict[str, Any]:
    """Return a config.json of a model: every field that changes what is computed, in all spellings.

    Raises NoFamily if the family's models cannot be like this one.
    """
    written = _write_fields(model, family)
    read = read_config_json(written)
    differences = [key for key in form_of(model) if form_of(model)[key] != form_of(Model(**read.values))[key]]
    if read.problems or differences:
        text = ", ".join(f"model.{key} = {getattr(model, key)!r}" for key in differences) or "; ".join(read.problems)
        raise NoFamily(f"models of type {family.model_type!r} cannot have {text}")
    try:
        list(family.stored_tensors(model))
    except UnmappedParameter as error:
        raise NoFamily(str(error)) from error
    return written


def _write_fields(model: Model, family: HubFamily) -> dict[str, Any]:
    """Return the fields of config.json that say what [model] says, and those that a family's models share."""
    resolved = form_of(model)
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for config_field in family.fields:
        value = resolved[config_field.key]
        is_null = config_field.key in ZERO_MEANS_NULL and value == 0
        written[config_field.name] = None if is_null else value
    for required in family.required:
        written[required.name] = required.values[0]
    if family.has_rotary_positions:
        written |= write_rope(model)
    if family.has_window_fields:
        kind = "sliding_attention" if model.window else "full_attention"
        written |= {"use_sliding_window": model.window > 0, "sliding_window": model.window or None}
        written |= {"max_window_layers": 0 if model.window else model.layers, "layer_types": [kind] * model.layers}
    return written


def form_of(model: Model) -> dict[str, Any]:
    """Return the keys of [model] that a config.json can say, with kv_heads and head_dim resolved."""
    values = {item.name: getattr(model, item.name) for item in fields(model) if item.name not in FREE_KEYS}
    return values | {"kv_heads": model.kv, "head_dim": model.head_width}


def fitting_families(model: Model) -> Iterator[HubFamily]:
    """Yield the families as which a model can be exported."""
    for family in HUB_FAMILIES.values():
        try:
            write_config_json(model, family)
        except NoFamily:
            continue
        yield family


def family_to_export(model: Model, model_type: str = "") -> HubFamily:
    """Return the family as which a model is exported: that of model_type, from which it came, else the first that fits.

    Raises NoFamily if there is none, with the reason of each.
    """
    if model.experts:
        raise NoFamily(
            f"model.experts = {model.experts}: {NO_EXPORT_OF_EXPERTS}; recipes/generate.py and "
            "recipes/evaluate.py read the checkpoint itself"
        )
    fitting = list(fitting_families(model))
    for family in fitting:
        if family.model_type == model_type:
            return family
    if fitting:
        return fitting[0]
    reasons = []
    for family in HUB_FAMILIES.values():
        try:
            write_config_json(model, family)
        except NoFamily as error:
            reasons.append(str(error))
    raise NoFamily("the model has the form of no published family:\n  " + "\n  ".join(reasons))
