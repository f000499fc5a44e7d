"""Quantized files: the values that transformers makes of them, read by each rank in its own parts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.tools.hub.published import content_of, save_published
from tests.tools.hub.test_import import check_layout, config_of, layout, one_process
from torchllm.tools.hub.config_json import read_config_json
from torchllm.tools.hub.files import check_tensors, find_hub_files, read_hub_config

Block = tuple[int, int]
KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "block_sparse_moe.gate.", "bias")
"""parts of the keys of tensors that are published as they are"""


def to_blocks(weight: Tensor, block: Block) -> dict[str, Tensor]:
    """Return a matrix in float8 and the scales of its blocks: the largest value of each becomes the largest float8.

    A stack of matrices has a stack of both.
    """
    if weight.dim() == 3:
        stacks = [to_blocks(matrix, block) for matrix in weight]
        return {suffix: torch.stack([stack[suffix] for stack in stacks]) for suffix in stacks[0]}
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            scales[row, column] = weight[place].abs().max() / torch.finfo(torch.float8_e4m3fn).max
            quantized[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
    return {"": quantized, "_scale_inv": scales}


def from_blocks(quantized: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Return the values, by the formula of DeepSeek-V3: each times the scale of its block."""
    rows, columns = quantized.shape[-2:]
    of_values = scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return quantized.float() * of_values


def quantize(folder: Path, block: Block) -> dict[str, Tensor]:
    """Rewrite the files of a published model in float8, as one file; return the values that they hold, by key."""
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for key, weight in load_file(path).items():
            if weight.dim() < 2 or any(part in key for part in KEPT):
                stored[key] = values[key] = weight
                continue
            pieces = to_blocks(weight, block)
            stored |= {key + suffix: tensor for suffix, tensor in pieces.items()}
            values[key] = from_blocks(pieces[""], pieces["_scale_inv"], block)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))
    return values


def unquantized(folder: Path, values: dict[str, Tensor]) -> Path:
    """Write the same values without quantization."""
    plain = folder.with_name(f"{folder.name}-plain")
    plain.mkdir()
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    del content["quantization_config"]
    (plain / "config.json").write_text(json.dumps(content))
    return plain


BLOCKS: list[tuple[str, Block, bool]] = [
    ("qwen3", (5, 7), False),
    ("glm4-moe", (16, 8), False),
    ("qwen3-moe", (128, 128), False),
    ("mixtral", (5, 7), True),
]
"""models, the blocks of their matrices, most of which have blocks that their borders cut, and whether experts are
stacked"""


def test_values_are_those_of_the_scaled_blocks(tmp_path: Path) -> None:
    """Bitwise, also of matrices whose sides are no multiples of a block's."""
    for name, block, stacks in BLOCKS:
        folder = tmp_path / name
        save_published(name, folder, stacks=stacks)
        plain = unquantized(folder, quantize(folder, block))
        ours, expected = (one_process(config_of(files, {})) for files in (folder, plain))
        for (parameter, found), value in zip(ours.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(found, value), (name, parameter)


def test_the_formula_is_that_of_transformers() -> None:
    """Of whole blocks alone: of others transformers 5.24 takes the sides of a block from the number of scales, which
    is an error or a wrong size."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 384, generator=generator)
    pieces = to_blocks(weight, (128, 128))
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(pieces[""], pieces["_scale_inv"], torch.float32)
    assert torch.equal(from_blocks(pieces[""], pieces["_scale_inv"], (128, 128)), theirs)


@pytest.mark.parametrize(
    ("name", "axes", "block"),
    [
        ("llama", ("tp",), (5, 7)),
        pytest.param("glm4-moe", ("1f1b", "tp"), (5, 7), marks=pytest.mark.exhaustive),
        pytest.param("qwen3", ("sp", "v"), (16, 8), marks=pytest.mark.exhaustive),
        pytest.param("gpt2", ("fsdp", "tp"), (7, 5), marks=pytest.mark.exhaustive),
    ],
)
def test_a_layout_reads_the_same_values(name: str, axes: tuple[str, ...], block: Block, tmp_path: Path) -> None:
    save_published(name, tmp_path / name)
    quantize(tmp_path / name, block)
    check_layout(tmp_path / name, layout(axes))


def test_ranks_read_their_own_bytes_and_the_scales_of_blocks_that_they_share(tmp_path: Path) -> None:
    """Counted, of four ranks that share all weights, in blocks of 6 rows where a rank has 8 of 32: 9 rows of scales are
    read for the 6 that there are."""
    save_published("llama", tmp_path / "llama")
    quantize(tmp_path / "llama", (6, 32))
    folder = tmp_path / "llama"
    files = find_hub_files(folder, read_hub_config(folder))
    sizes = {key: tensor.end - tensor.begin for key, tensor in files.tensors.items()}
    scales = sum(size for key, size in sizes.items() if key.endswith("_scale_inv"))
    totals = check_layout(folder, {"parallel.dp_shard": 4}).totals
    read = sum(of_rank for of_rank, _ in totals)
    assert sum(sizes.values()) < read <= sum(sizes.values()) + 2 * scales
    assert max(of_rank for of_rank, _ in totals) <= 1.05 * read / 4


def problem_of(change: dict[str, Any]) -> str:
    (problem,) = read_config_json(content_of("llama") | {"quantization_config": change}).problems
    return problem


def test_other_methods_are_refused_by_name_with_what_to_do() -> None:
    for method in ("awq", "gptq", "compressed-tensors", None):
        problem = problem_of({"quant_method": method, "bits": 4})
        assert problem.startswith(f"quantization_config.quant_method: {method!r} cannot be read (supported: fp8")
        assert "take a repository with the original weights" in problem
    for size in (None, [128], [128, 0], "128"):
        problem = problem_of({"quant_method": "fp8", "weight_block_size": size})
        assert problem.startswith(
            f"quantization_config.weight_block_size: is {size!r}: float8 weights can be read that"
        )


def test_a_missing_scale_or_one_of_another_shape_is_named(tmp_path: Path) -> None:
    save_published("llama", tmp_path)
    quantize(tmp_path, (16, 16))
    tensors = load_file(tmp_path / "model.safetensors")
    scale = "model.layers.1.self_attn.q_proj.weight_scale_inv"
    for change, message in (
        ({}, f"{scale}: is missing; it must be [2, 2]"),
        ({scale: torch.ones(2, 1)}, f"{scale}: is [2, 1], but by config.json it must be [2, 2]"),
        ({scale: torch.ones(2, 2).half()}, f"{scale}: is F16; weights can be read that are F32, BF16"),
    ):
        tensors.pop(scale, None)
        save_file(tensors | change, tmp_path / "model.safetensors", {"format": "pt"})
        config = read_hub_config(tmp_path)
        (problem,) = check_tensors(find_hub_files(tmp_path, config), config, config.model, is_tying_chosen=False)
        assert problem.endswith(message)
