"""The parts that a config.json asks for and that are not here: named by its fields, for any class of transformers."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tools.hub.published import SUPPORTED_DEFAULTS, as_json
from torchllm.tools.hub.config_json import fields_of_families, read_config_json
from torchllm.tools.hub.families.registry import HUB_FAMILIES
from torchllm.tools.hub.families.text_part import TEXT_PARTS
from torchllm.tools.hub.missing_parts import PARTS, is_on, missing_parts

NO_DEFAULT = {"gemma4_assistant"}
"""types without a default config, which is an error in transformers 5.24"""
MOST_LINES = 6
LONGEST_LINE = 450
"""characters, also with the names of all families"""


@functools.cache
def default_configs() -> dict[str, dict[str, Any]]:
    """Return the default config.json of each class for causal language models, by model_type."""
    configs = {}
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if model_type not in NO_DEFAULT:
            supported = SUPPORTED_DEFAULTS.get(model_type, {})
            content = as_json(transformers.AutoConfig.for_model(model_type, **supported))
            configs[content["model_type"]] = content
    return configs


def unsupported() -> Iterator[tuple[str, dict[str, Any]]]:
    return (item for item in default_configs().items() if item[0] not in HUB_FAMILIES | TEXT_PARTS)


def test_each_default_config_is_supported_or_refused_with_a_reason() -> None:
    assert len(default_configs()) > 150
    for model_type, content in default_configs().items():
        problems = read_config_json(content).problems
        if model_type in HUB_FAMILIES | TEXT_PARTS:
            assert problems == [], model_type
            continue
        assert problems[0].startswith(f"model_type: '{model_type}' is not supported; supported are llama, ")
        assert 2 <= len(problems) <= MOST_LINES, (model_type, problems)
        assert max(map(len, problems)) <= LONGEST_LINE, (model_type, problems)


def test_a_reason_is_a_field_of_the_config_that_asks_for_something() -> None:
    for model_type, content in unsupported():
        flat = content | {f"text_config.{name}": value for name, value in (content.get("text_config") or {}).items()}
        parts, unread = missing_parts(content, fields_of_families())
        named = [said.split(" = ")[0] for fields in parts.values() for said in fields]
        for name in named + unread:
            assert is_on(flat[name], flat), (model_type, name)
        for name in unread:
            assert name.removeprefix("text_config.") not in fields_of_families(), (model_type, name)
        if not parts and not unread:
            (reason,) = read_config_json(content).problems[1:]
            assert reason.startswith("no field asks for a missing part")


PARTS_OF_TYPES = {
    "deepseek_v32": {"sparse attention", "multi-head latent attention", "experts in groups"},
    "deepseek_v4": {"sparse attention", "multi-head latent attention", "hyper-connections", "a clamped SwiGLU"},
    "gemma2": {"soft caps of scores or logits"},
    "gemma3": {"pictures or sound"},
    "gemma3n_text": {"per-layer embeddings", "keys and values shared by blocks", "soft caps of scores or logits"},
    "gpt_neox": {"attention and feed-forward layer in parallel"},
    "llama4_text": {"attention within chunks", "a scale of scores by position", "blocks of other types"},
    "mamba2": {"Mamba"},
    "ministral3": {"a scale of scores by position"},
    "nemotron_h": {"Mamba", "another activation"},
    "kimi_linear": {"another linear attention", "blocks of other types"},
}
"""parts that these models have by their papers; those that are here by now are left out below"""


def test_the_parts_of_known_models_are_named() -> None:
    missing = {part.name for part in PARTS}
    for model_type, expected in PARTS_OF_TYPES.items():
        if model_type not in HUB_FAMILIES:
            parts = missing_parts(default_configs()[model_type], fields_of_families()).parts
            assert expected & missing <= parts.keys(), model_type


FIELDS_OF_PARTS = {
    "a gate of the attention": {"attn_output_gate": True},
    "another scale of scores": {"query_pre_attn_scalar": 224, "head_dim": 128},
    "attention to later tokens": {"is_causal": False},
    "experts in groups": {"n_group": 8},
    "keys as values": {"attention_k_eq_v": True},
    "sinks of the attention": {"add_swa_attention_sink_bias": True},
    "ALiBi positions": {"alibi": True},
}
"""parts that no default config of a class asks for, or by another field"""
OFF = {
    "llama-like": {"n_group": 1, "logits_scaling": 1.0, "query_pre_attn_scalar": 128, "head_dim": 128, "alibi": False},
    "other": {"num_kv_shared_layers": 0, "attn_logit_softcapping": None, "mlp_multipliers": [1.0, 1.0]},
}


def test_a_part_is_missing_only_if_its_field_asks_for_it() -> None:
    for name, fields in FIELDS_OF_PARTS.items():
        if name in {part.name for part in PARTS}:
            assert list(missing_parts(fields, fields_of_families()).parts) == [name]
    for fields in OFF.values():
        assert not missing_parts(fields, fields_of_families()).parts
    assert missing_parts({"mystery": 1, "riddle": None}, fields_of_families()).unread == ["mystery"]


def test_the_type_of_blocks_that_is_not_here_is_named() -> None:
    """Not linear attention, where the fields of Gated DeltaNet say which it is."""
    types = {"layer_types": ["linear_attention", "mystery_attention"]}
    for fields, named in (({}, "linear_attention"), ({"linear_num_key_heads": 2}, "mystery_attention")):
        parts = missing_parts(types | fields, fields_of_families()).parts
        assert parts["blocks of other types"] == [f"layer_types = {named}"]


def test_each_row_is_asked_by_some_class() -> None:
    """A row that no config.json can match would be a misspelled one."""
    contents = [content for _, content in unsupported()] + list(FIELDS_OF_PARTS.values())
    names = {name for content in contents for name in content}
    for part in PARTS:
        assert any(re.fullmatch(part.fields, name) for name in names), part.fields


@pytest.mark.skipif(not transformers.__version__.startswith("5.24."), reason="the page counts the classes of 5.24")
def test_the_page_counts_them() -> None:
    asking = [missing_parts(content, fields_of_families()) for _, content in unsupported()]
    with_parts = sum(bool(missing.parts) for missing in asking)
    unread = sum(bool(missing.unread) and not missing.parts for missing in asking)
    supported, others = len(default_configs()) - len(asking), len(asking) - with_parts - unread
    sentence = (
        f"Of the default configs of {len(default_configs())} classes for causal language models in transformers 5.24, "
        f"{supported} are of a family here, {with_parts} ask for a missing part, {unread} have only fields that "
        f"nothing here reads, and {others} neither."
    )
    page = (Path(__file__).parents[3] / "docs/add_a_family.md").read_text()
    assert sentence in " ".join(page.split())


@pytest.mark.exhaustive
def test_no_config_of_any_class_ends_with_an_exception() -> None:
    """Not only of language models."""
    count = 0
    for model_type in transformers.CONFIG_MAPPING:
        try:
            content = as_json(transformers.AutoConfig.for_model(model_type))
        except Exception:  # transformers has no default of it: errors of any class
            continue
        count += 1
        problems = read_config_json(content).problems
        assert len(problems) <= MOST_LINES or content["model_type"] in HUB_FAMILIES, (model_type, problems)
    assert count > 400
