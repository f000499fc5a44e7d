"""gpt-oss's files as published, experts in MXFP4: the values that transformers makes of them, read in parts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.tools.hub.test_import import Settings, check_layout, config_of, layout, one_process, save_published
from torchllm.tools.hub.files import check_tensors, find_hub_files, read_hub_config

BLOCK = 32
KEPT = ("self_attn", "router", "lm_head", "embed_tokens")


def quantize(folder: Path) -> dict[str, Tensor]:
    """Rewrite the experts of a published model as random blocks and scales; return the values that they hold, by key.

    Every byte of a block is among them, and scales from 2**-9 to 2**6.
    """
    generator = torch.Generator().manual_seed(0)
    path = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for key, weight in load_file(path).items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[key] = values[key] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // BLOCK)
        blocks = torch.randint(0, 256, (*shape, BLOCK // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 134, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        values[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert values[key].shape == weight.shape
    save_file(stored, path, {"format": "pt"})
    method = {"quant_method": "mxfp4", "modules_to_not_convert": list(KEPT)}
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method}))
    return values


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "gpt-oss"
    save_published("gpt-oss", folder, intermediate_size=64)
    return folder


def test_values_are_those_of_transformers(published: Path) -> None:
    """Bitwise: of experts, and of tensors that are stored as they are."""
    values = quantize(published)
    state = dict(one_process(config_of(published, {})).named_parameters())
    for layer in range(4):
        file, ours = f"model.layers.{layer}.mlp.experts.", f"layers.{layer}.mlp.routed.experts."
        gate_and_up = values[f"{file}gate_up_proj"]
        assert torch.equal(state[f"{ours}gate_proj"], gate_and_up[..., ::2].mT)
        assert torch.equal(state[f"{ours}up_proj"], gate_and_up[..., 1::2].mT)
        assert torch.equal(state[f"{ours}down_proj"], values[f"{file}down_proj"].mT)
        assert torch.equal(state[f"{ours}gate_bias"], values[f"{file}gate_up_proj_bias"][..., ::2])


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel.tp": 2, "parallel.ep": 2},
        pytest.param(layout(("1f1b", "tp")), marks=pytest.mark.exhaustive),
        pytest.param({"parallel.dp_shard": 3, "training.global_batch_size": 12}, marks=pytest.mark.exhaustive),
        pytest.param({"parallel.dp_shard": 2, "parallel.tp": 2, "parallel.ep": 4}, marks=pytest.mark.exhaustive),
        pytest.param(layout(("cp", "sp")), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_layout_reads_the_same_values(settings: Settings, published: Path) -> None:
    quantize(published)
    check_layout(published, settings)


def test_ranks_read_their_own_experts(published: Path) -> None:
    """Counted, of two ranks: where rows of gate and up are in turns, both are read for each of them."""
    quantize(published)
    files = find_hub_files(published, read_hub_config(published))
    sizes = {key: tensor.end - tensor.begin for key, tensor in files.tensors.items()}
    again = sum(size for key, size in sizes.items() if "gate_up_proj" in key)
    totals = check_layout(published, {"parallel.dp_shard": 2, "parallel.ep": 2}).totals
    read = sum(of_rank for of_rank, _ in totals)
    assert sum(sizes.values()) <= read <= sum(sizes.values()) + again
    assert max(of_rank for of_rank, _ in totals) <= 1.01 * read / 2


def test_missing_scales_are_named(published: Path) -> None:
    quantize(published)
    tensors = load_file(published / "model.safetensors")
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    del tensors[scales]
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    config = read_hub_config(published)
    (problem,) = check_tensors(find_hub_files(published, config), config, config.model, is_tying_chosen=False)
    assert problem.endswith(f"{scales}: is missing; it must be [8, 32, 2]")
