"""Published blocks of multi-token prediction: the logits of transformers' `MtpModel`, and files as they went in."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from tests.tools.hub.published import save_published
from tests.tools.hub.test_import import LENGTH, SEQUENCES, TOKENS, config_of, error_of_logits, one_process
from torchllm.config import Config
from torchllm.facts.parameters import canonical_name
from torchllm.tools.hub.families.registry import HUB_FAMILIES
from torchllm.tools.hub.files import WHOLE_MODEL, check_tensors, find_hub_files, read_hub_config
from torchllm.tools.hub.hf_writer import write_weights

DEPTH, BLOCKS = 2, 4
PUBLISHED = ("glm4-moe", "glm4-moe-air", "deepseek-v3", "glm4-moe-lite")


def save_with_blocks(name: str, folder: Path) -> tuple[Any, Any]:
    """Write a tiny model with the blocks of `MtpModel` as such models are published; return it and them."""
    hub_model = save_published(name, folder, num_nextn_predict_layers=DEPTH, num_mtp_layers=DEPTH)
    hub_model.config.mtp_mlp_layer_types = ["sparse"] * DEPTH  # GLM-4.7-Flash's class asks for it
    blocks = MtpModel(hub_model, DEPTH).eval()
    tensors = load_file(folder / WHOLE_MODEL)
    with torch.no_grad():
        for block in blocks.layers:
            for parameter in block.parameters():
                parameter.normal_(mean=float(parameter.dim() == 1), std=0.2)
            for buffer in block.buffers():
                buffer.normal_(std=0.2)
    for index, block in enumerate(blocks.layers, BLOCKS):
        for key, tensor in block.state_dict().items():
            place = key.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
            for end, part in of_experts(place, tensor):
                tensors[f"model.layers.{index}.{end}"] = part.contiguous().clone()
        tensors[f"model.layers.{index}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{index}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / WHOLE_MODEL, {"format": "pt"})
    return hub_model, blocks


def of_experts(key: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of a file for one of transformers' modules, where experts are stacked."""
    place, _, name = key.rpartition(".experts.")
    if name not in ("gate_up_proj", "down_proj"):
        return [(key, tensor)]
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[name]
    return [
        (f"{place}.experts.{expert}.{part}.weight", matrix)
        for expert, rows in enumerate(tensor)
        for part, matrix in zip(names, rows.chunk(len(names)), strict=True)
    ]


def states_of(config: Config, ids: Tensor) -> list[Tensor]:
    """Return the hidden states that predict the next token and each further one: (B, S, D), from ids (B, S + 1 + D)."""
    model = one_process(config)
    seen: list[Tensor] = []
    assert model.lm_head is not None
    model.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    depths = range(1, DEPTH + 1)
    ahead = torch.stack([torch.stack([ids[:, k + shift :][:, :LENGTH] for k in depths], 1) for shift in (0, 1)], 1)
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    model(ids[:, :LENGTH], positions, None, ids[:, 1 : LENGTH + 1], 0, ahead)
    return list(seen[0].chunk(1 + DEPTH))


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_logits_of_each_depth_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    hub_model, blocks = save_with_blocks(name, tmp_path)
    config = config_of(tmp_path, {})
    assert config.model.mtp_depth == DEPTH
    ids = torch.randint(0, TOKENS, (SEQUENCES, LENGTH + 1 + DEPTH), generator=torch.Generator().manual_seed(1))
    hidden = hub_model(ids[:, :LENGTH], output_hidden_states=True).hidden_states[-1]
    expected = [hidden]
    for depth in range(1, DEPTH + 1):  # its own forward chooses the tokens ahead by itself
        positions = torch.arange(depth, depth + LENGTH).expand(SEQUENCES, LENGTH)
        tokens = ids[:, depth : depth + LENGTH]
        expected.append(blocks.forward_layer(depth - 1, expected[-1], positions, None, input_ids=tokens))
    with torch.enable_grad():
        found = states_of(config, ids)
    for ours, theirs in zip(found, expected, strict=True):
        logits = [hub_model.lm_head(states).numpy() for states in (ours, theirs)]
        assert error_of_logits(*logits) <= 1e-5
    wrong = blocks.forward_layer(0, hidden, positions, None, input_ids=ids[:, :LENGTH])  # of the token itself
    assert error_of_logits(hub_model.lm_head(found[1]).numpy(), hub_model.lm_head(wrong).numpy()) > 1e-2


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_blocks_come_out_as_they_went_in(name: str, tmp_path: Path) -> None:
    save_with_blocks(name, tmp_path)
    config = config_of(tmp_path, {})
    decoder = one_process(config)
    weights = {canonical_name(key): tensor.detach() for key, tensor in decoder.state_dict().items()}
    family = HUB_FAMILIES[json.loads((tmp_path / "config.json").read_text())["model_type"]]
    (tmp_path / "out").mkdir()
    stored = list(family.stored_tensors(config.model))
    write_weights(tmp_path / "out", stored, weights.__getitem__, torch.float32, 10**9)
    theirs, ours = load_file(tmp_path / WHOLE_MODEL), load_file(tmp_path / "out" / WHOLE_MODEL)
    copies = {f"model.layers.{index}.{end}.weight" for index in (4, 5) for end in ("embed_tokens", "shared_head.head")}
    assert theirs.keys() - ours.keys() == copies
    assert ours.keys() <= theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_run_may_leave_the_blocks_out_and_transformers_own_files_have_none(tmp_path: Path) -> None:
    save_with_blocks("glm4-moe", tmp_path / "with")
    config = config_of(tmp_path / "with", {})
    without = replace(config.model, mtp_depth=0)
    assert not any("eh_proj" in name for name in one_process(replace(config, model=without)).state_dict())
    files = find_hub_files(tmp_path / "with", read_hub_config(tmp_path / "with"))
    for model, faults in ((without, 0), (config.model, 0), (replace(config.model, mtp_depth=DEPTH + 1), 20 + 1)):
        problems = check_tensors(files, read_hub_config(tmp_path / "with"), model, is_tying_chosen=False)
        assert len(problems) == faults, problems
    save_published("glm4-moe", tmp_path / "own")
    content = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (content["num_nextn_predict_layers"], config_of(tmp_path / "own", {}).model.mtp_depth) == (1, 0)
