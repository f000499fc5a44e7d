"""Safetensors files written tensor by tensor."""

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from torchllm.checkpoint.manifest import CheckpointError
from torchllm.config import Model
from torchllm.facts.shapes import parameter_shapes
from torchllm.tools.hub.families.family import HubFamily, stored_shapes
from torchllm.tools.hub.families.glm4_moe import GLM4_MOE
from torchllm.tools.hub.families.gpt2 import GPT2
from torchllm.tools.hub.families.llama import LLAMA
from torchllm.tools.hub.families.mixtral import MIXTRAL
from torchllm.tools.hub.files import INDEX_JSON, WHOLE_MODEL
from torchllm.tools.hub.hf_writer import new_folder, weight_bytes, write_weights

LLAMA_MODEL = Model(layers=3, hidden=16, heads=4, ffn=24, vocab=50)
SPARSE_MODEL = replace(LLAMA_MODEL, experts=5, expert_ffn=12)
GPT_MODEL = Model(family="gpt", layers=2, hidden=16, heads=4, ffn=24, vocab=50, tied_embeddings=True)


class RandomWeights:
    """Weights of a model, made when they are read; notes how many of the earlier ones are alive then."""

    def __init__(self, model: Model) -> None:
        self.shapes = parameter_shapes(model)
        self.read_before: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def __call__(self, name: str) -> Tensor:
        self.alive.append(sum(reference() is not None for reference in self.read_before))
        weight = self.value(name)
        self.read_before.append(weakref.ref(weight))
        return weight

    def value(self, name: str) -> Tensor:
        seed = torch.Generator().manual_seed(list(self.shapes).index(name))
        return torch.randn(self.shapes[name], generator=seed)


def written(folder: Path, family: HubFamily, model: Model, bytes_per_file: int) -> RandomWeights:
    weights = RandomWeights(model)
    write_weights(folder, list(family.stored_tensors(model)), weights, torch.float32, bytes_per_file)
    return weights


def test_one_file_has_no_index_and_is_what_transformers_expects(tmp_path: Path) -> None:
    weights = written(tmp_path, LLAMA, LLAMA_MODEL, 10**9)
    assert [path.name for path in tmp_path.iterdir()] == [WHOLE_MODEL]
    with safe_open(tmp_path / WHOLE_MODEL, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(tmp_path / WHOLE_MODEL)
    assert len(tensors) == len(weights.shapes)
    assert torch.equal(tensors["model.layers.2.mlp.up_proj.weight"], weights.value("layers.2.mlp.up_proj.weight"))
    header_length = int.from_bytes((tmp_path / WHOLE_MODEL).read_bytes()[:8], "little")
    assert header_length % 8 == 0


def test_files_have_a_limit_and_an_index(tmp_path: Path) -> None:
    limit = 4000
    weights = written(tmp_path, LLAMA, LLAMA_MODEL, limit)
    index = json.loads((tmp_path / INDEX_JSON).read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert [path.name for path in files] == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    total = 0
    for path in files:
        tensors = load_file(path)
        sizes = [tensor.nbytes for tensor in tensors.values()]
        assert sum(sizes) <= limit or len(sizes) == 1
        assert {index["weight_map"][key] for key in tensors} == {path.name}
        total += sum(sizes)
    assert index["metadata"] == {"total_size": total}
    assert len(index["weight_map"]) == len(weights.shapes)


def test_no_weight_outlives_its_tensor(tmp_path: Path) -> None:
    """When a weight is read, none is alive but the one before it in its tensor: k, when v of c_attn is read."""
    for number, (family, model, most) in enumerate(
        [(LLAMA, LLAMA_MODEL, 0), (GPT2, GPT_MODEL, 1), (MIXTRAL, SPARSE_MODEL, 0)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights = written(folder, family, model, 4000)
        assert len(weights.alive) == len(weights.shapes), family
        assert max(weights.alive) == most, family


def test_the_bias_of_a_router_is_float32_in_files_of_any_type(tmp_path: Path) -> None:
    """transformers computes with it in float32 in any model: bfloat16 has no digits for steps of 0.001."""
    model = replace(SPARSE_MODEL, router_score="sigmoid", router_bias=True, shared_experts=1)
    weights = RandomWeights(model)
    weights.shapes |= stored_shapes(model)
    tensors = list(GLM4_MOE.stored_tensors(model))
    write_weights(tmp_path, tensors, weights, torch.bfloat16)
    saved = load_file(tmp_path / WHOLE_MODEL)
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(saved.pop(key), weights.value("layers.1.mlp.routed.router.bias"))
    assert {tensor.dtype for name, tensor in saved.items() if "bias" not in name} == {torch.bfloat16}
    size = (tmp_path / WHOLE_MODEL).stat().st_size
    header_length = int.from_bytes((tmp_path / WHOLE_MODEL).read_bytes()[:8], "little")
    assert weight_bytes(tensors, torch.bfloat16) == size - 8 - header_length


def test_a_checkpoint_of_another_shape_is_an_error(tmp_path: Path) -> None:
    for family, model, name, shape, message in (
        (MIXTRAL, SPARSE_MODEL, "layers.0.mlp.routed.experts.gate_proj", (6, 12, 16), "has 5 experts by the config, 6"),
        (LLAMA, LLAMA_MODEL, "layers.0.mlp.up_proj.weight", (25, 16), r"is \(24, 16\) by the config, \(25, 16\)"),
    ):
        weights = RandomWeights(model)
        weights.shapes[name] = shape
        with pytest.raises(CheckpointError, match=f"{name.rpartition('.')[2]}: {message}"):
            write_weights(tmp_path, list(family.stored_tensors(model)), weights, torch.float32)
        (tmp_path / WHOLE_MODEL).unlink()


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "made" / "model"
    with (
        pytest.raises(CheckpointError, match="cannot be written: disk on fire; nothing is left"),
        new_folder(final, 10),
    ):
        raise OSError("disk on fire")
    assert list((tmp_path / "made").iterdir()) == []
    with new_folder(final, 10) as folder:
        (folder / "file").write_text("content")
        assert not final.exists()
    assert (final / "file").read_text() == "content"
    with pytest.raises(CheckpointError, match="exists, and nothing is overwritten"), new_folder(final, 10):
        pass
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["model"]
