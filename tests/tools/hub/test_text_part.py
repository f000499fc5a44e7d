"""Text models within models of text and more: read without the other parts, and exported alone."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.tools.hub import published
from tests.tools.hub.published import content_of, hub_config, save_published
from tests.tools.hub.test_adapter import LORA, start_and_save
from tests.tools.hub.test_adapter import config_of as adapter_run
from tests.tools.hub.test_import import (
    LENGTH,
    SEQUENCES,
    check_layout,
    config_of,
    error_of_logits,
    layout,
    one_process,
    tokens_of,
)
from tests.workers import run
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.config import Model
from torchllm.tools.hub.config_json import family_to_export, read_config_json
from torchllm.tools.hub.export import export_adapter
from torchllm.tools.hub.families.text_part import TEXT_PARTS
from torchllm.tools.hub.files import check_tensors, find_hub_files, read_hub_config

NAMES = list(published.TEXT_PARTS)


def keys_of(folder: Path) -> list[str]:
    keys: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys += file.keys()
    return keys


@pytest.mark.parametrize("name", NAMES)
def test_the_text_model_has_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """Of text alone; in the names of transformers 5 and those before it, which it writes; some are newer."""
    hub_model = save_published(name, tmp_path / "old")
    save_published(name, tmp_path / "new", stacks=True)
    prefixes = {key.split("layers.")[0] for key in keys_of(tmp_path / "old") + keys_of(tmp_path / "new") if "q_" in key}
    assert {"model.language_model.", *(["language_model.model."] if name in ("llava", "mistral3") else [])} <= prefixes
    tokens = tokens_of(0) % 95  # without the id that stands for a picture
    for folder in (tmp_path / "old", tmp_path / "new"):
        model = one_process(config_of(folder, {}))
        with torch.no_grad():
            theirs = hub_model(tokens).logits
            ours = model(tokens, torch.arange(LENGTH + 1).expand(SEQUENCES, LENGTH + 1))
        assert error_of_logits(ours.numpy(), theirs.numpy()) <= 1e-5


def test_other_parts_are_left_out_and_counted(tmp_path: Path) -> None:
    save_published("llava", tmp_path)
    config = read_hub_config(tmp_path)
    files = find_hub_files(tmp_path, config)
    assert check_tensors(files, config, config.model, is_tying_chosen=False) == []
    others = [key for key in keys_of(tmp_path) if "language_model" not in key]
    (note,) = files.notes
    assert note.startswith(f"{tmp_path}: {len(others)} tensors are not read, because the model here has no such part: ")
    assert f"vision_tower ({len(others) - 4}), multi_modal_projector (4)" in note


@pytest.mark.exhaustive
def test_a_layout_reads_the_same_weights(tmp_path: Path) -> None:
    save_published("mistral3", tmp_path)
    check_layout(tmp_path, layout(("1f1b", "tp")))


def test_the_text_model_is_exported_alone() -> None:
    assert TEXT_PARTS.keys() == published.TEXT_PARTS.keys()
    for name in NAMES:
        read = read_config_json(content_of(name))
        alone = read_config_json(content_of(name)["text_config"])
        assert (read.problems, read.unknown_fields) == ([], [])
        assert read.family is alone.family
        assert read.values == alone.values
        assert family_to_export(Model(**read.values), alone.family.model_type) is alone.family  # type: ignore[union-attr]


def test_tying_is_said_by_the_whole_model_as_transformers_does() -> None:
    for name, of_text, of_whole in (
        ("llava", True, None),
        ("llava", None, None),
        ("llava", False, False),
        ("mistral3", None, None),
        ("mistral3", True, False),
        ("mistral3", False, None),
        ("qwen3_5", True, None),
        ("qwen3_5", False, True),
    ):
        content = copy.deepcopy(content_of(name))
        for table, value in ((content, of_whole), (content["text_config"], of_text)):
            table.pop("tie_word_embeddings")
            if value is not None:
                table["tie_word_embeddings"] = value
        theirs = type(hub_config(name))(**copy.deepcopy(content)).tie_word_embeddings
        assert read_config_json(content).values["tied_embeddings"] == theirs, (name, of_text, of_whole)


def test_faults_are_named_with_the_place_of_the_text_model() -> None:
    text = content_of("llava")["text_config"]
    for change, message in (
        ({"text_config": text | {"mlp_bias": True}}, "text_config.mlp_bias: is True: biases of the feed-forward layer"),
        ({"text_config": None}, "text_config: must be a table with the model_type of the text model"),
        ({"architectures": ["LlavaModel"]}, "architectures: must be ['LlavaForConditionalGeneration'], not"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: is True, but text_config.tie_word_embeddings is False"),
    ):
        (problem,) = read_config_json(content_of("llava") | change).problems
        assert problem.startswith(message)


def test_an_adapter_is_refused_because_peft_would_leave_it_out(tmp_path: Path) -> None:
    save_published("llava", tmp_path / "published")
    config = adapter_run(tmp_path / "published", LORA)
    run(start_and_save, 1, config, str(tmp_path), 1)
    config = replace(config, run=replace(config.run, folder=str(tmp_path)))
    with pytest.raises(CheckpointError, match="is a LlavaForConditionalGeneration, whose modules have other names"):
        export_adapter(config, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
