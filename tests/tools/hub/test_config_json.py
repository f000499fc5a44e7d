"""config.json in both directions, against the classes of transformers."""

import copy
import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

from tests.facts.test_model_sizes import load
from tests.tools.hub.published import (
    CONFIGS,
    FULL,
    LLAMA3_SCALING,
    SLIDING,
    SUPPORTED_DEFAULTS,
    YARN,
    as_json,
    content_of,
    hub_config,
)
from tests.tools.hub.published_sizes import PUBLISHED
from torchllm.config import Kinds, Model
from torchllm.facts.flops import active_parameter_count, parameter_count
from torchllm.models.layers import rotary_frequencies
from torchllm.tools.hub.config_json import (
    NoFamily,
    family_to_export,
    form_of,
    known_fields,
    read_config_json,
    why_no_family,
    write_config_json,
)
from torchllm.tools.hub.families.registry import HUB_FAMILIES
from torchllm.tools.hub.files import WHOLE_MODEL
from torchllm.tools.hub.rope import unknown_rope_fields
from torchllm.tools.hub.safetensors_header import read_header

pytestmark = pytest.mark.quick


def model_of(content: dict[str, Any]) -> Model:
    """Return the [model] of a config.json in which nothing is wrong."""
    read = read_config_json(content)
    assert not read.problems
    model = Model(**read.values)
    return replace(model, kv_heads=model.kv, head_dim=model.head_width)


def models() -> Iterator[tuple[str, Model]]:
    for name in CONFIGS:
        yield name, model_of(content_of(name))


def test_a_missing_field_is_the_default_of_its_class() -> None:
    wrong = []
    for model_type in HUB_FAMILIES:
        supported = SUPPORTED_DEFAULTS.get(model_type, {})
        default = transformers.AutoConfig.for_model(model_type, **supported)
        if model_of({"model_type": model_type, **supported}) != model_of(as_json(default)):
            wrong.append(model_type)
    assert not wrong


def test_each_field_may_be_missing() -> None:
    wrong = []
    for name in CONFIGS:
        config = hub_config(name)
        family = HUB_FAMILIES[config.model_type]
        nulls = {of_part.name for of_part in family.fields if of_part.needs}  # a model with the part must have them
        for field in family.field_names - nulls:
            content = dict(content_of(name))
            content.pop(field, None)  # some classes have no head_dim
            if field in ("num_hidden_layers", "sliding_window"):
                content |= dict.fromkeys(
                    {"layer_types", "mlp_layer_types", "no_rope_layers"} & content.keys()
                )  # one per layer
                for of_layers in ("per_layer_config", "moe_layer_end_index"):
                    content.pop(of_layers, None)
            if model_of(content) != model_of(as_json(type(config)(**content))):
                wrong.append((name, field))
    assert not wrong


def test_what_is_written_is_read_alike_by_transformers_and_here() -> None:
    """In both spellings: transformers 4 has rope_theta and rope_scaling, transformers 5 rope_parameters."""
    for name, model in models():
        config = hub_config(name)
        written = write_config_json(model, family_to_export(model, config.model_type))
        assert model_of(written) == model, name
        read_back = type(config)(**written)
        assert model_of(as_json(read_back)) == model, name
        assert read_back.model_type == config.model_type
        has_no_old = HUB_FAMILIES[config.model_type].has_no_old_rope
        for spelling in (("rope_theta", "rope_scaling"), ("rope_parameters",))[: 1 if has_no_old else 2]:
            content = {key: value for key, value in written.items() if key not in spelling}
            assert model_of(content) == model, (name, spelling)


UNSCALED: dict[str, Any] = {"rope_scaling_factor": 1.0, "rope_query_scale": 0.0, "rope_attention_factor": 0.0}
LINEAR = UNSCALED | {"rope_scaling": "linear", "rope_scaling_factor": 4.0}
ALTERED: list[tuple[str, dict[str, Any]]] = [
    ("gpt-oss", {"window": 0, "kinds": Kinds(), "pattern": ()}),
    ("gemma2", {"window": 0, "kinds": Kinds(), "pattern": ()}),
    ("ministral", {"window": 0, "kinds": Kinds(), "pattern": ()}),
    ("ministral3", UNSCALED),
    ("ministral3", LINEAR),
    ("ministral3", {"rope_query_scale": 0.0}),
    ("smollm3", {"rotary_fraction": 0.0, "kinds": Kinds(), "pattern": ()}),
    ("qwen3-next", {"mixer": "gated_delta", "kinds": Kinds(), "pattern": ()}),
]
"""models of a family whose own published model is another"""


@pytest.mark.parametrize(("name", "change"), ALTERED)
def test_an_altered_model_is_exported_as_one_that_transformers_runs(name: str, change: dict[str, Any]) -> None:
    model = replace(model_of(content_of(name)), **change)
    family = HUB_FAMILIES[content_of(name)["model_type"]]
    written = write_config_json(model, family)
    assert form_of(model_of(written)) == form_of(model)
    config = transformers.AutoConfig.for_model(**written | dict.fromkeys(["pad_token_id", "eos_token_id"]))
    computed = getattr(transformers, family.architecture)(config).eval()
    assert computed(torch.zeros(1, 4, dtype=torch.long), use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("name", ["deepseek-v3", "minimax-m2"])
def test_fields_that_only_vllm_reads_are_written(name: str) -> None:
    """transformers' class has no such fields."""
    content = content_of(name)
    written = write_config_json(model_of(content), HUB_FAMILIES[content["model_type"]])
    choice = {"deepseek-v3": {"topk_method": "noaux_tc"}, "minimax-m2": {"use_routing_bias": True}}[name]
    assert written.items() >= {"scoring_func": "sigmoid", **choice}.items()


LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD_YARN = {key: value for key, value in YARN.items() if key != "rope_theta"}
OLD_LLAMA3 = {key: value for key, value in LLAMA3_SCALING.items() if key != "rope_theta"}
SAID_ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_scaling": {"rope_theta": 1e6, "rope_type": "default"}}),
    ("llama", {"rope_scaling": LINEAR | {"rope_theta": 1e6}}),
    ("llama", {"rope_scaling": LINEAR | {"rope_theta": 1e6}, "rope_theta": 1e6}),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16}),
    ("llama", {"rope_scaling": YARN, "rope_theta": 1e4, "original_max_position_embeddings": 16}),
    ("llama", {"rope_scaling": OLD_LLAMA3, "original_max_position_embeddings": 16}),
    ("llama", {"rope_scaling": LINEAR, "original_max_position_embeddings": 16}),
    ("glm4-moe", {"rope_scaling": LINEAR | {"partial_rotary_factor": 0.25}}),
    ("minimax-m2", {"rotary_dim": 4, "rope_theta": 1e6}),
    ("olmo3", {"rope_theta": 500000, "rope_scaling": OLD_YARN, "layer_types": None}),
    (
        "gemma3",
        {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": LINEAR}
        | {"layer_types": None, "sliding_window_pattern": 3},
    ),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "layer_types": None}),
    ("gemma2", {"layer_types": None}),
    ("qwen2-windows", {"layer_types": None, "max_window_layers": 1}),
    ("qwen3-next", {"rope_theta": 1e6, "layer_types": None, "full_attention_interval": 2}),
    ("qwen3.5", {"rope_scaling": {"mrope_section": [1, 1, 0], "mrope_interleaved": True}, "layer_types": None}),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
    ("smollm3-windows", {"layer_types": None}),
    ("gpt2", {"num_attention_heads": 8, "num_hidden_layers": 3, "hidden_size": 64, "max_position_embeddings": 16}),
]
"""changes of a published config.json that transformers reads by another name, or at another place"""


def test_a_field_by_another_name_or_at_another_place_is_read_as_transformers_does() -> None:
    own_names = {name for name in HUB_FAMILIES["gpt2"].field_names if name.startswith("n_")}
    for name, change in SAID_ELSEWHERE:
        content = {key: value for key, value in content_of(name).items() if key not in {"rope_parameters", *own_names}}
        theirs = type(hub_config(name))(**copy.deepcopy(content | change))
        if theirs.model_type != "gpt2":
            theirs.standardize_rope_params()  # as each reader does
        assert model_of(content | change) == model_of(as_json(theirs)), change


def fields_that_transformers_reads(name: str) -> set[str]:
    """Return the fields of config.json that transformers reads to make and run a tiny published model.

    They are the attributes of the config that are read, their aliases, and what its classes take from further
    arguments.
    """
    config = hub_config(name)
    reads: set[str] = set()

    class Recording(type(config)):  # type: ignore[misc]
        def __getattribute__(self, field: str) -> Any:
            reads.add(field)
            return super().__getattribute__(field)

    model = getattr(transformers, HUB_FAMILIES[config.model_type].architecture)(Recording(**CONFIGS[name][1]))
    model.eval()(torch.zeros(1, 4, dtype=torch.long))
    for kind in type(config).__mro__:
        for method in ("__post_init__", "convert_rope_params_to_dict"):
            if method in vars(kind) and kind.__module__.startswith("transformers."):
                source = inspect.getsource(vars(kind)[method])
                reads |= set(re.findall(r"""kwargs\.(?:pop|get)\(["'](\w+)["']""", source))
    methods = {field for field in reads if callable(getattr(type(config), field, None))}
    return {field for field in reads - methods if not field.startswith("__")} | set(config.attribute_map)


def test_each_field_that_transformers_reads_is_known_or_refused() -> None:
    for model_type in HUB_FAMILIES:
        name = next(name for name in CONFIGS if hub_config(name).model_type == model_type)
        reads = fields_that_transformers_reads(name)
        assert {"is_causal", "per_layer_config", "rope_parameters", "quantization_config"} <= reads, (
            model_type
        )  # it records
        assert reads - known_fields(HUB_FAMILIES[model_type]) == set(), model_type


def test_each_field_of_a_rope_table_that_transformers_reads_is_known() -> None:
    reader = re.compile(r"""rope_parameters(?:_dict)?(?:\[|\.get\(|\.setdefault\()["'](\w+)["']""")
    for kind in ("linear", "llama3", "yarn", "proportional"):
        readers = (ROPE_INIT_FUNCTIONS[kind], RotaryEmbeddingConfigMixin.standardize_rope_params)
        sources = [inspect.getsource(read) for read in readers]
        fields = {field for source in sources for field in reader.findall(source)}
        assert {"rope_theta", "factor", "type"} <= fields
        table = dict.fromkeys(fields, 1.0) | {"rope_type": kind}
        assert unknown_rope_fields({"rope_scaling": table}) == [], kind


MIXED = [FULL, SLIDING] * 2
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.5}
REFUSED = {
    "llama": [
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method: None cannot be read"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: rotary positions of a part of each head"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters.rope_type: 'longrope' is not"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters.low_freq_factor: is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: rotary"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters: is another one for each kind"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "rope_scaling: must be a table"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type: \"['yarn']\" is not supported"),
        ({"rope_parameters": YARN | {"attention_factor": 0.0}}, "rope_parameters.attention_factor: is 0: queries"),
        ({"rope_parameters": YARN | {"factor": 1.0}}, "rope_parameters.attention_factor: is 1.3, with"),
        ({"rope_parameters": YARN | {"factor": 0.5}}, "rope_parameters.factor: must be a number of at least 1"),
        (
            {"rope_parameters": YARN | {"factor": "4", "attention_factor": None, **MSCALES}},
            "rope_parameters.factor: must",
        ),
        ({"rope_theta": 1e6}, "rope_parameters.rope_theta: is 10000.0, but rope_theta is 1000000.0: remove one"),
        (
            {"rope_parameters": YARN, "original_max_position_embeddings": 8},
            "rope_parameters.original_max_position_embeddings: is 16, but original_max_position_embeddings is 8",
        ),
        ({"is_causal": False}, "is_causal: is False: attention to later tokens, not supported"),
        ({"is_causal": None}, "is_causal: is None: attention to later tokens, not supported"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: is True: an encoder"),
        ({"per_layer_config": {"0": {"hidden_act": "gelu"}}}, "per_layer_config: is {'0': "),
        ({"attention_chunk_size": 8}, "attention_chunk_size: is 8: attention within chunks"),
        ({"sliding_window": 8}, "sliding_window: is 8: a sliding window in a model of this type"),
        ({"text_config": {"hidden_size": 8}}, "text_config: is {'hidden_size': 8}: a model within the model"),
        ({"default_theta": 1e6}, "default_theta: is 1000000.0: an attribute of transformers' classes"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: sliding_attention needs a sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types: must be full_attention or"),
        ({"hidden_act": "gelu"}, "hidden_act: is 'gelu': another activation"),
        ({"attention_bias": True}, "attention_bias: is True: biases"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: must be ['LlamaForCausalLM']"),
        ({"hidden_size": "32"}, "hidden_size: must be a whole number"),
        ({"hidden_size": None}, "hidden_size: is null, which says nothing"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: must be at least 1, not 0"),
        ({"head_dim": 0}, "head_dim: must be at least 1, not 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be a whole number of at least 1"),
    ],
    "mixtral-window": [
        ({"layer_types": MIXED}, "layer_types: a sliding window of some blocks and not of others is not")
    ],
    "nanochat": [({"rope_parameters": YARN}, "rope_parameters: yarn is not supported in this type")],
    "olmo3": [
        ({"sliding_window": None}, "layer_types: sliding_attention needs a sliding_window, but there is none"),
        ({"rope_parameters": YARN}, "rope_parameters: must have a table for each of layer_types"),
        ({"rope_parameters": None, "rope_theta": 1e6}, "rope_theta: is 1000000.0 for transformers 4, which"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters: says otherwise than rope_theta"),
        (
            {"rope_parameters": {FULL: YARN | {"factor": 0.5}}},
            "rope_parameters.full_attention.factor: must be a number",
        ),
        ({"sliding_window": "9"}, "sliding_window: must be a whole number"),
        (
            {"rope_parameters": None, "rope_scaling": YARN | {"truncate": False}},
            "truncate: is false in a table of one of layer_types",
        ),
        ({"rope_parameters": {FULL: YARN | {"truncate": False}}}, "truncate: is false in a table of one of"),
    ],
    "ministral3": [
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rope_parameters.llama_4_scaling_beta: is 0.1, without yarn",
        )
    ],
    "deepseek-v3": [({"qk_nope_head_dim": "128"}, "qk_nope_head_dim: must be a whole number")],
    "gemma3": [
        (
            {"layer_types": None, "sliding_window_pattern": "6"},
            "sliding_window_pattern: must be a whole number, not '6'",
        ),
        ({"rope_local_base_freq": 5e3}, "rope_parameters.rope_theta: is 100.0, but rope_theta is 5000.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: is True: attention to later tokens"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: is 50.0: a soft cap of scores, which transformers"),
        ({"hidden_activation": "gelu"}, "hidden_activation: is 'gelu': another activation"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: must be over 0, not 0"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping: must be over 0, not 0.0"),
    ],
    "gemma4-dense": [
        ({"per_layer_config": [1]}, "per_layer_config: must have a table for each index of a block"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: is 8: embeddings in each block, as in E2B"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: is 2: keys and values shared by blocks"),
        ({"per_layer_config": {"5": {"head_dim": 8}}}, "per_layer_config: other fields than those of all full blocks"),
        (
            {"per_layer_config": {"5": {"hidden_size": 8}, "6": {"hidden_size": 8}}},
            "per_layer_config: other fields than those of all full blocks",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: is 'all': attention to later tokens"),
    ],
    "gemma4-experts": [({"num_experts": None}, "num_experts: is null, which says nothing")],
    "ernie4.5-moe": [
        ({"moe_layer_end_index": 2}, "moe_layer_end_index: is 2: dense blocks after those with experts"),
        ({"moe_layer_interval": 2}, "moe_layer_interval: is 2: dense blocks after those with experts"),
        ({"use_bias": True}, "use_bias: is True: biases of all matrices"),
    ],
    "olmo-hybrid": [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types: must have blocks of both types"),
        ({"attention_bias": True}, "attention_bias: is True: biases"),
    ],
    "smollm3": [
        ({"no_rope_layers": [1, 1]}, "no_rope_layers: must be 0 or 1 for each of num_hidden_layers blocks, not [1, 1]"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval: must be a whole number of at"),
        ({"layer_types": MIXED}, "layer_types: sliding_attention needs a sliding_window, but there is none"),
    ],
    "mistral": [
        ({"sliding_window": 0}, "sliding_window: must be at least 1, not 0"),
        (
            {"layer_types": ["full_attention"] * 4},
            "layer_types: is full_attention, but sliding_window is 9: remove one",
        ),
    ],
    "qwen3-moe": [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: is 2: a block without experts after one with experts"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers: leaves no block with experts"),
        ({"mlp_only_layers": "x"}, "mlp_only_layers: must be a list of whole numbers, not 'x'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: must be a whole number of at least 1, not 0"),
        ({"num_local_experts": 0}, "num_local_experts: is 0, but all models of this type have some"),
        ({"moe_intermediate_size": 1.5}, "moe_intermediate_size: must be a whole number"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: must be at least 1, not 0"),
        ({"use_sliding_window": True}, "use_sliding_window: is True: a sliding window together with experts"),
    ],
    "qwen3-next": [
        (
            {"layer_types": [FULL, SLIDING] * 2},
            "layer_types: sliding_attention needs a sliding_window, but there is none",
        ),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: must be a whole number of at"),
        ({"shared_expert_intermediate_size": 24}, "shared_expert_intermediate_size: is 24, no multiple of moe_interm"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: is 0, but all models of this type"),
        ({"use_sliding_window": True}, "use_sliding_window: is True: a sliding window"),
    ],
    "qwen3.5": [({"attn_output_gate": False}, "attn_output_gate: is False: attention without a gate")],
    "qwen3.5-moe": [({"mlp_only_layers": [1]}, "mlp_only_layers: is [1]: blocks without experts")],
    "glm4-moe": [
        (
            {"partial_rotary_factor": 0.25},
            "rope_parameters.partial_rotary_factor: is 0.5, but partial_rotary_factor is 0.25",
        ),
        ({"n_group": 2}, "n_group: is 2: experts in groups"),
        ({"partial_rotary_factor": None}, "partial_rotary_factor: is null, which says nothing"),
    ],
    "gpt2": [
        ({"n_embd": None}, "n_embd: is null, which says nothing"),
        ({"num_attention_heads": 8}, "num_attention_heads: is 8, but n_head is 4: remove one of them"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters: is {'rope_type': 'default'}: rotary"),
    ],
    "minimax-m2": [
        ({"rotary_dim": 4}, "rotary_dim: is 0.25, but rope_parameters.partial_rotary_factor is 0.5"),
        ({"rotary_dim": 17}, "rotary_dim: must be a whole number from 1 to head_dim, not 17"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type: is 'per_head': norms of each head of q and k"),
    ],
    "olmoe": [({"head_dim": 16}, "head_dim: is 16: heads of another width")],
    "qwen2-window": [
        ({"layer_types": None, "max_window_layers": "0"}, "max_window_layers: must be a whole number, not '0'"),
        ({"use_sliding_window": False}, "layer_types: sliding_attention needs a sliding_window"),
        ({"layer_types": None, "sliding_window": 0}, "sliding_window: must be at least 1, not 0"),
    ],
}
"""changes of a published config.json, and how the one problem begins that each of them is"""


def test_what_the_model_has_not_is_refused_by_its_field() -> None:
    wrong = []
    for name, refused in REFUSED.items():
        content = content_of(name) | ({"mlp_only_layers": []} if name == "qwen3-moe" else {})
        for change, message in refused:
            problems = read_config_json(content | change).problems
            if len(problems) != 1 or not problems[0].startswith(message):
                wrong.append((name, change, problems))
    assert not wrong


KINDS = {
    "olmo3": {
        "pattern": ("window", "window", "window", "full"),
        "kinds": {
            "window": {"window": 9},
            "full": {
                "rope_scaling": "yarn",
                "rope_scaling_factor": 4.0,
                "rope_original_length": 16,
                "rope_beta_fast": 8.0,
                "rope_beta_slow": 0.5,
                "rope_attention_factor": 1.3,
            },
        },
    },
    "olmo3-linear": {
        "pattern": ("full", "window", "window"),
        "kinds": {"full": {"rope_scaling": "linear", "rope_scaling_factor": 2.0}, "window": {"window": 5}},
    },
    "qwen3-next": {
        "pattern": ("linear", "linear", "linear", "full"),
        "kinds": {"linear": {"mixer": "gated_delta"}, "full": {}},
    },
    "smollm3": {
        "pattern": ("rope", "rope", "rope", "no_rope"),
        "kinds": {"rope": {}, "no_rope": {"rotary_fraction": 0.0}},
    },
    "smollm3-windows": {
        "pattern": ("no_rope_window", "rope_full", "rope_full"),
        "kinds": {"no_rope_window": {"window": 9, "rotary_fraction": 0.0}, "rope_full": {}},
    },
    "qwen2-windows": {
        "pattern": ("full", "full", "full", "window"),
        "kinds": {"full": {}, "window": {"window": 9}},
    },
}


def test_blocks_that_differ_are_the_shortest_pattern_of_kinds() -> None:
    for name, expected in KINDS.items():
        values = read_config_json(content_of(name)).values
        assert {key: values[key] for key in ("pattern", "kinds")} == expected, name


def test_published_models_whose_blocks_differ_have_their_kinds() -> None:
    olmo3, smollm3 = (model_of(PUBLISHED[name].fields) for name in ("olmo3_7b", "smollm3_3b"))
    assert [view.window for view in olmo3.views[:4]] == [4096] * 3 + [0]
    assert [view.has_rotary_positions for view in smollm3.views] == [True, True, True, False] * 9
    gemma3 = {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1}
    gemma3 |= {"vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512}
    gemma3 |= {"rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "sliding_window_pattern": 6}
    model = model_of({"model_type": "gemma3_text", **gemma3, "rope_scaling": None})  # google/gemma-3-1b-pt
    assert parameter_count(model) == 999_885_952
    assert [view.window for view in model.views] == ([512] * 5 + [0]) * 4 + [512] * 2
    assert [view.rope_theta for view in model.views[4:6]] == [1e4, 1e6]
    assert (model.softmax_scale, model.embedding_multiplier) == (0.0625, 1152**0.5)


def test_published_models_have_their_parameters() -> None:
    """Of MiniMax-M2, its card says 230 billion in all, and 10 billion that are active."""
    for name, published in PUBLISHED.items():
        read = read_config_json(published.fields)
        assert (read.problems, read.unknown_fields) == ([], []), name
        model = Model(**read.values)
        assert (parameter_count(model), active_parameter_count(model)) == published[1:], name
    assert model_of(PUBLISHED["minimax_m2"].fields).rotary_width == 64


def test_a_mistral_whose_blocks_differ_is_a_ministral() -> None:
    """As Mistral AI has published Ministral 8B, and AutoConfig of transformers reads it."""
    named = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    read = read_config_json(content_of("ministral") | named)
    assert read.family is HUB_FAMILIES["ministral"]
    assert not read.problems
    assert read.values == read_config_json(content_of("ministral")).values


def test_a_pattern_that_is_written_otherwise_is_the_same_model() -> None:
    """Also where [model] has the keys of most blocks, and some say nothing in the others."""
    model = model_of(content_of("olmo3"))
    scaled = model.kinds["full"]
    kinds = Kinds({"a": {"window": 9, "rope_scaling_factor": 1.0}, "b": {}})
    other = replace(model, **scaled, pattern=("a", "a", "a", "b", "a"), kinds=kinds)
    assert form_of(other) == form_of(model)
    assert write_config_json(other, HUB_FAMILIES["olmo3"]) == write_config_json(model, HUB_FAMILIES["olmo3"])


def test_windows_are_off_where_the_classes_have_them_off() -> None:
    """Mistral's is 4096 where config.json lacks it, and off where it says null; Qwen's is off unless it is used."""
    windows = {"mistral": 4096, "qwen2": 0, "qwen3": 0}
    for model_type, window in windows.items():
        assert model_of({"model_type": model_type}).window == window
        assert model_of({"model_type": model_type, "sliding_window": None}).window == 0
    assert model_of({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}).window == 4096
    assert model_of({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 99}).window == 0


def test_yarn_takes_what_is_missing_from_other_fields_as_transformers_does() -> None:
    content = content_of("yarn") | {"max_position_embeddings": 65536, "head_dim": 1024}  # the betas count in each digit
    plain = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    for more in ({}, MSCALES, MSCALES | {"attention_factor": 1.7}, {"mscale": 1.0}, {"mscale_all_dim": 0.5}):
        scaling = plain | more
        model = model_of(content | {"rope_parameters": scaling})
        assert model.rope_original_length == content["max_position_embeddings"]
        config = transformers.LlamaConfig(**content | {"rope_parameters": scaling})
        frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        torch.testing.assert_close(rotary_frequencies(model, torch.device("cpu")), frequencies)
        computed = 0.1 * math.log(4.0) + 1.0  # what 0 stands for
        assert (model.rope_attention_factor or computed) == pytest.approx(factor), more
        assert model.rope_truncate


def test_the_length_before_a_scaling_is_that_of_the_class_where_no_field_says_one() -> None:
    for scaling in (YARN, LLAMA3_SCALING):
        parameters = {name: value for name, value in scaling.items() if name != "original_max_position_embeddings"}
        for model_type in ("llama", "mistral"):
            content = {"model_type": model_type, "rope_parameters": parameters}
            config = transformers.AutoConfig.for_model(**copy.deepcopy(content))
            expected = config.rope_parameters["original_max_position_embeddings"]
            assert model_of(content).rope_original_length == expected == config.max_position_embeddings


def test_a_scaling_by_one_is_none() -> None:
    """Nothing is left of it that a run would refuse for doing nothing, or that would keep the model from an export."""
    for scaling in (LINEAR, OLD_LLAMA3, YARN | {"attention_factor": None}):
        parameters = scaling | {"factor": 1.0, "rope_theta": 1e4}
        assert model_of(content_of("llama") | {"rope_parameters": parameters}) == model_of(content_of("llama")), scaling


def test_an_unsupported_family_is_named_with_those_that_are_supported() -> None:
    for model_type in ("unheard", None, 3):
        problem, *more = read_config_json({"model_type": model_type}).problems
        assert "supported are llama" in problem
        assert len(more) == (model_type == "unheard")


def test_an_unknown_field_is_named() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0, "finetuned": True}
    code = {"AutoModel": "modeling.Model"}  # of the repository; transformers runs its own, too, unless it is told
    read = read_config_json(content_of("llama") | {"mystery": 1, "rope_parameters": scaling, "auto_map": code})
    assert read.unknown_fields == ["auto_map", "mystery", "rope_parameters.finetuned"]
    assert not read.problems


def test_a_model_is_exported_as_the_family_from_which_it_came_if_it_still_can_be() -> None:
    model = Model()
    assert family_to_export(model).model_type == "llama"
    assert family_to_export(model, "qwen3").model_type == "llama"  # it has no norms of q and k
    assert family_to_export(replace(model, qk_norm="head")).model_type == "qwen3"


def test_a_llama_whose_heads_do_not_divide_its_width_is_exported_as_mistral() -> None:
    """transformers 5 refuses it as a llama, and computes the same as a mistral without a window."""
    model = Model(hidden=32, heads=6, head_dim=8)
    with pytest.raises(NoFamily, match=r"'llama' cannot have model.heads = 6: .* do not divide hidden_size = 32"):
        write_config_json(model, HUB_FAMILIES["llama"])
    assert family_to_export(model, "llama").model_type == "mistral"
    assert why_no_family(model) == []


SPARSE = Model(experts=8)
QWEN: dict[str, Any] = {"qk_norm": "head", "norm_offset": True, "attention_gate": "element", "rotary_fraction": 0.25}
QWEN |= {"pattern": ("delta", "full"), "kinds": Kinds(delta={"mixer": "gated_delta"}, full={})}
EXPORTED_AS = {
    "mixtral": SPARSE,
    "qwen3_moe": replace(SPARSE, qk_norm="head", dense_layers=2, expert_ffn=96, router_renormalize=False),
    "olmoe": replace(SPARSE, qk_norm="width", top_k=4),
    "glm4_moe": replace(
        SPARSE, router_score="sigmoid", router_bias=True, shared_experts=2, dense_layers=1, rotary_fraction=0.5
    ),
    "qwen3_next": replace(SPARSE, **QWEN, shared_experts=1, shared_gate=True, expert_ffn=96, router_renormalize=False),
    "gpt_oss": replace(
        SPARSE, sinks=True, qkv_bias=True, o_bias=True, expert_biases=True, activation="clamped_silu", window=9
    ),
}


def test_a_model_with_experts_is_exported_as_the_family_that_has_its_features() -> None:
    for model_type, model in EXPORTED_AS.items():
        assert family_to_export(model).model_type == model_type
        assert why_no_family(model) == []


OLMO = Model(qk_norm="width", norm_position="after")
NOT_EXPORTED = [
    (replace(SPARSE, router_renormalize=False), "'mixtral' cannot have model.router_renormalize = False"),
    (replace(SPARSE, router_scale=2.5), "'mixtral' cannot have model.router_scale = 2.5"),
    (replace(SPARSE, shared_experts=2), "'mixtral' cannot have model.shared_experts = 2"),
    (replace(SPARSE, rotary_fraction=0.5), "'mixtral' cannot have model.rotary_fraction = 0.5"),
    (replace(EXPORTED_AS["glm4_moe"], router_bias=False), "'glm4_moe' cannot have model.router_bias = False"),
    (replace(EXPORTED_AS["glm4_moe"], qk_norm="width"), "'glm4_moe' cannot have model.qk_norm = 'width'"),
    (replace(SPARSE, router_score="sigmoid"), "'mixtral' cannot have model.router_score = 'sigmoid'"),
    (replace(SPARSE, qk_norm="width", head_dim=64), "'olmoe' cannot have model.head_dim = 64"),
    (replace(EXPORTED_AS["qwen3_next"], shared_gate=False), "'qwen3_next' cannot have model.shared_gate = False"),
    (Model(**QWEN | {"attention_gate": "head"}), "'qwen3_5_text' cannot have model.attention_gate = 'head'"),
    (replace(EXPORTED_AS["gpt_oss"], sinks=False), "'gpt_oss' cannot have model.sinks = False"),
    (replace(SPARSE, qk_norm="head", window=64), "'qwen3_moe' cannot have model.window = 64"),
    (
        replace(SPARSE, pattern=("near", "all"), kinds=Kinds({"near": {"window": 64}, "all": {}})),
        "'mixtral' cannot have model.kinds.near.window = 64",
    ),
    (
        replace(SPARSE, window=64, pattern=("near", "all"), kinds=Kinds({"near": {}, "all": {"window": 0}})),
        "'mixtral' cannot have model.window = 64, model.kinds.all.window = 0",
    ),
    (
        replace(OLMO, pattern=("near", "all"), kinds=Kinds({"near": {"window": 64}, "all": {"window": 128}})),
        "'olmo3' cannot have model.kinds.near.window = 64, model.kinds.all.window = 128",
    ),
    (
        replace(OLMO, pattern=("rope", "none"), kinds=Kinds({"rope": {}, "none": {"rotary_fraction": 0.0}})),
        "'olmo2' cannot have model.kinds.none.rotary_fraction = 0.0",
    ),
    (
        Model(kv_heads=2, pattern=("few", "usual"), kinds=Kinds({"few": {"heads": 4, "head_dim": 32}, "usual": {}})),
        "'llama' cannot have model.kinds.few.heads = 4",
    ),
    (
        replace(OLMO, pattern=("narrow", "usual"), kinds=Kinds({"narrow": {"ffn": 64}, "usual": {}})),
        "'olmo2' cannot have model.kinds.narrow.ffn = 64",
    ),
]


def test_a_combination_of_features_that_no_family_has_is_named() -> None:
    glm = HUB_FAMILIES["glm4_moe"]
    with pytest.raises(NoFamily, match=r"'glm4_moe' cannot have n_shared_experts: is 0"):
        write_config_json(replace(EXPORTED_AS["glm4_moe"], shared_experts=0), glm)
    assert write_config_json(EXPORTED_AS["glm4_moe"], glm)["num_nextn_predict_layers"] == 0
    bases = Kinds({"near": {"window": 64}, "all": {"rope_theta": 1e6}})
    with pytest.raises(
        NoFamily, match=r"'olmo3' cannot have rope_theta: is 1000000.0 for transformers 4, .* 10000.0 in"
    ):
        write_config_json(replace(OLMO, pattern=("near", "all"), kinds=bases), HUB_FAMILIES["olmo3"])
    for model, reason in NOT_EXPORTED:
        reasons = why_no_family(model)
        assert len(reasons[0].keys) == 1, reason  # the family that it differs least from is the first
        assert f"models of type {reason}" in [str(found) for found in reasons]
        with pytest.raises(NoFamily, match=reason):
            family_to_export(model)


def test_keys_that_say_nothing_of_a_model_do_not_keep_it_from_an_export() -> None:
    assert family_to_export(Model(top_k=4, router_scale=2.0)).model_type == "llama"
    balanced = replace(SPARSE, balance_loss="global", balance_weight=0.1, router_z_loss=0.1)
    assert family_to_export(balanced).model_type == "mixtral"
    written = write_config_json(replace(SPARSE, ffn=7, expert_ffn=96), HUB_FAMILIES["mixtral"])
    assert written["intermediate_size"] == 96  # no block has a layer of width ffn


DENSE_BLOCKS = [
    ({"mlp_only_layers": [0, 1]}, 2),
    ({"mlp_only_layers": [1, 0, 9]}, 2),
    ({"decoder_sparse_step": 4}, 3),
    ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 3),
    ({"mlp_only_layers": None}, 0),
]


def test_first_blocks_without_experts_are_those_of_transformers() -> None:
    for change, dense_layers in DENSE_BLOCKS:
        content = content_of("qwen3-moe") | change
        assert model_of(content).dense_layers == dense_layers, change
        hub_model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**content))
        sparse = [hasattr(block.mlp, "experts") for block in hub_model.model.layers]
        assert sparse == [index >= dense_layers for index in range(4)], change


KEYS_OF_OTHER_FORMS = (".linear_attn.conv1d.weight",)
"""of families whose files transformers 5.24 writes in another form than the published one: OLMo Hybrid"""


def test_the_table_names_every_tensor_of_transformers_model_with_its_shape(tmp_path: Path) -> None:
    """Those of the modules, in which transformers 5 stacks experts, and those of the files that it writes of them."""
    for name, model in models():
        config = hub_config(name)
        hub_model = transformers.AutoModelForCausalLM.from_config(config)
        of_modules = {key: tuple(tensor.shape) for key, tensor in hub_model.state_dict().items()}
        if config.tie_word_embeddings:
            del of_modules["lm_head.weight"]
        hub_model.save_pretrained(tmp_path / name)
        header = read_header(tmp_path / name / WHOLE_MODEL)
        of_file = {key: tensor.shape for key, tensor in header.tensors.items()}
        family = HUB_FAMILIES[config.model_type]
        for saved in (of_modules, of_file)[: 1 if family.module_key in KEYS_OF_OTHER_FORMS else 2]:
            table = family.with_table_of(saved)  # transformers' classes lack the blocks of multi-token prediction
            stored = {tensor.key: tensor.shape for tensor in table.stored_tensors(replace(model, mtp_depth=0))}
            assert stored == saved, name


RELEASED = Path(__file__).parent / "released"
"""config.json as released, by the file of train_configs/models that has the same sizes"""


def test_a_released_config_says_what_the_file_of_its_sizes_says() -> None:
    files = sorted(RELEASED.glob("*.json"))
    assert len(files) == 7
    for file in files:
        name = file.stem
        read = read_config_json(json.loads(file.read_text()))
        assert (read.problems, read.unknown_fields) == ([], [])
        expected = form_of(load(name)) | {"mtp_depth": read.values["mtp_depth"]}  # which a run chooses by itself
        assert form_of(Model(**read.values)) == expected, name
        assert why_no_family(load(name)) == []
