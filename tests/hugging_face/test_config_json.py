"""config.json in both directions, against the classes of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.hugging_face.published import CONFIGS, as_json, hub_config
from torchllm.config import Model
from torchllm.hugging_face.config_json import (
    NoFamily,
    family_to_export,
    read_config_json,
    write_config_json,
)
from torchllm.hugging_face.registry import HUB_FAMILIES, UNSUPPORTED_TYPES


def model_of(content: dict[str, Any]) -> Model:
    """Return the [model] of a config.json in which nothing is wrong."""
    read = read_config_json(content)
    assert not read.problems
    model = Model(**read.values)
    return replace(model, kv_heads=model.kv, head_dim=model.head_width)


@pytest.mark.parametrize("model_type", HUB_FAMILIES)
def test_a_missing_field_is_the_default_of_its_class(model_type: str) -> None:
    default = transformers.AutoConfig.for_model(model_type)
    assert model_of({"model_type": model_type}) == model_of(as_json(default))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_field_may_be_missing(name: str) -> None:
    config = hub_config(name)
    family = HUB_FAMILIES[config.model_type]
    for field in family.field_names:
        content = as_json(config)
        content.pop(field, None)  # some classes have no head_dim
        if field in ("num_hidden_layers", "use_sliding_window"):
            content.pop("layer_types", None)  # one per layer
        assert model_of(content) == model_of(as_json(type(config)(**content))), field


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read_alike_by_transformers_and_here(name: str) -> None:
    model = model_of(as_json(hub_config(name)))
    family = family_to_export(model, hub_config(name).model_type)
    written = write_config_json(model, family)
    assert model_of(written) == model
    read_back = type(hub_config(name))(**written)
    assert model_of(as_json(read_back)) == model
    assert read_back.model_type == hub_config(name).model_type


@pytest.mark.parametrize("name", CONFIGS)
def test_both_spellings_are_read_and_written(name: str) -> None:
    """transformers 4 has rope_theta and rope_scaling, transformers 5 rope_parameters."""
    model = model_of(as_json(hub_config(name)))
    written = write_config_json(model, family_to_export(model))
    for spelling in (("rope_theta", "rope_scaling"), ("rope_parameters",)):
        content = {key: value for key, value in written.items() if key not in spelling}
        assert model_of(content) == model


def test_spellings_that_differ_are_refused() -> None:
    content = as_json(hub_config("llama31")) | {"rope_theta": 10000.0}
    assert read_config_json(content).problems == [
        "rope_parameters: says otherwise than rope_theta and rope_scaling: remove one of the spellings"
    ]


REFUSED = [
    ({"quantization_config": {"bits": 4}}, "quantization_config: quantized"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: rotary positions of a part"),
    ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map: a model with code"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters.rope_type: 'longrope' is not"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters.low_freq_factor: is missing"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: positions of a part"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters: is another one for each kind"),
    ({"rope_parameters": None, "rope_scaling": "linear"}, "rope_scaling: must be a table"),
    ({"hidden_act": "gelu"}, "hidden_act: is 'gelu': another activation"),
    ({"attention_bias": True}, "attention_bias: is True: biases"),
    ({"mlp_bias": True}, "mlp_bias: is True: biases"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: must be ['LlamaForCausalLM']"),
    ({"hidden_size": "32"}, "hidden_size: must be a whole number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_the_model_has_not_is_refused_by_its_field(change: dict[str, Any], message: str) -> None:
    (problem,) = read_config_json(as_json(hub_config("llama")) | change).problems
    assert problem.startswith(message)


def test_a_window_of_some_blocks_is_refused_by_its_field() -> None:
    content = as_json(hub_config("qwen2-window"))
    mixed = ["full_attention"] * 2 + ["sliding_attention"] * 2
    (problem,) = read_config_json(content | {"layer_types": mixed}).problems
    assert problem.startswith("layer_types: a sliding window of some blocks")
    (problem,) = read_config_json(content | {"layer_types": None, "max_window_layers": 2}).problems
    assert problem.startswith("max_window_layers: a sliding window of some blocks")


def test_windows_are_off_where_the_classes_have_them_off() -> None:
    """Mistral's is 4096 where config.json lacks it, and off where it says null; Qwen's is off unless it is used."""
    windows = {"mistral": 4096, "qwen2": 0, "qwen3": 0}
    for model_type, window in windows.items():
        assert model_of({"model_type": model_type}).window == window
        assert model_of({"model_type": model_type, "sliding_window": None}).window == 0
    assert model_of({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}).window == 4096
    assert model_of({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 99}).window == 0


def test_yarn_takes_what_is_missing_from_other_fields_as_transformers_does() -> None:
    content = as_json(hub_config("yarn"))
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "rope_theta": 10000.0}
    model = model_of(content | {"rope_parameters": scaling})
    assert model.rope_original_length == content["max_position_embeddings"]
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](transformers.LlamaConfig(**content | {"rope_parameters": scaling}), "cpu")
    assert model.rope_attention_factor == pytest.approx(factor)
    assert model.rope_truncate


def test_all_problems_are_found_at_once() -> None:
    content = as_json(hub_config("llama"))
    for change, _ in REFUSED:
        content |= change
    assert len(read_config_json(content).problems) >= 8


@pytest.mark.parametrize("model_type", [*UNSUPPORTED_TYPES, "unheard", None])
def test_an_unsupported_family_is_named_with_what_it_has(model_type: str | None) -> None:
    read = read_config_json({"model_type": model_type})
    assert len(read.problems) == 1
    assert "supported are llama" in read.problems[0]
    assert UNSUPPORTED_TYPES.get(model_type or "", "") in read.problems[0]


def test_an_unknown_field_is_named() -> None:
    read = read_config_json(as_json(hub_config("llama")) | {"mystery": 1})
    assert read.unknown_fields == ["mystery"]
    assert not read.problems


def test_a_model_is_exported_as_the_family_from_which_it_came_if_it_still_can_be() -> None:
    model = Model()
    assert family_to_export(model).model_type == "llama"
    assert family_to_export(model, "qwen3").model_type == "llama"  # it has no norms of q and k
    assert family_to_export(replace(model, qk_norm="head")).model_type == "qwen3"


def test_a_model_of_no_family_is_refused_with_the_reason_of_each() -> None:
    model = replace(Model(), family="gpt", kv_heads=2)
    with pytest.raises(NoFamily, match=r"'gpt2' cannot have model.kv_heads = 2"):
        family_to_export(model)


def test_a_model_with_experts_is_not_exported() -> None:
    sparse = replace(Model(), experts=8)
    with pytest.raises(NoFamily, match=r"^model\.experts = 8: a mixture of experts cannot be exported yet; "):
        family_to_export(sparse)
    for family in HUB_FAMILIES.values():
        with pytest.raises(NoFamily):
            write_config_json(sparse, family)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_names_every_tensor_of_transformers_model_with_its_shape(name: str) -> None:
    config = hub_config(name)
    hub_model = transformers.AutoModelForCausalLM.from_config(config)
    saved = {key: tuple(tensor.shape) for key, tensor in hub_model.state_dict().items()}
    if config.tie_word_embeddings:
        del saved["lm_head.weight"]
    family = HUB_FAMILIES[config.model_type]
    stored = {tensor.key: tensor.shape for tensor in family.stored_tensors(model_of(as_json(config)))}
    assert stored == saved
