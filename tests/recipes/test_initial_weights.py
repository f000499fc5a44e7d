"""A run that starts from weights: of a published model, and of another run; when it resumes it reads neither."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes import export
from tests.config.conftest import enter_empty_folder, refusal
from tests.recipes.saved_run import SIZES, save_run
from tests.recipes.warm import pretrain
from tests.tiny_run import metrics
from tests.tools.hub.published import save_published
from torchllm.config import Config, Model
from torchllm.config.schema import Lora
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import materialize
from torchllm.tools.config.load import load_config
from torchllm.tools.front.resolve import load_run
from torchllm.tools.front.start import load_configs
from torchllm.tools.hub.weights import load_newest_weights, load_weights

TOML = """
[run]
device = "cpu"
[model]
from_hf = "{published}"
[training]
steps = 2
global_batch_size = 4
sequence_length = 32
[optimizer]
learning_rate = 1e-12
weight_decay = 0.0
[metrics]
log_interval = 1
"""
UNCHANGED = 1e-6
"""of weights, in two steps with this learning rate"""


def manifest_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"checkpoints/step-{step:08d}/manifest.json").read_text())


def weights_of(folder: Path) -> Decoder:
    """Return the model of a run folder's newest checkpoint."""
    config = load_config([str(folder / "config.toml")], one_device=True)
    with torch.device("meta"):
        model = build_model(config.model)
    materialize([model], torch.device("cpu"))
    load_newest_weights(folder, partial(load_weights, stages=[model]))
    return model


def test_a_run_goes_on_from_published_weights_and_resumes_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tmp_path / "published"
    save_published("qwen2", published, vocab_size=264)
    file = tmp_path / "run.toml"
    file.write_text(TOML.format(published=published))
    folder = tmp_path / "run"
    tensors = load_tensors(published)

    assert pretrain(2, folder, config=file, settings=[]) == ["", ""]
    record = manifest_of(folder, 2)["record"]["initial"]
    assert (record["from"], record["model_type"], record["vocab"]) == (str(published), "qwen2", 264)
    assert list(record["files"]) == ["model.safetensors"]
    model = weights_of(folder)
    for name, key in (("layers.3.self_attn.q_proj.bias", "model.layers.3.self_attn.q_proj.bias"), ("norm.weight",) * 2):
        expected = tensors[key if key in tensors else f"model.{key}"]
        np.testing.assert_allclose(model.get_parameter(name).detach(), expected, atol=UNCHANGED)

    shutil.rmtree(published)  # nobody needs it now
    assert pretrain(2, folder, "--training.steps=3", config=file, settings=[]) == ["", ""]
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3]
    assert manifest_of(folder, 3)["record"]["initial"] == record

    other = tmp_path / "other"
    arguments = ["--model.from_hf=", f"--checkpoint.initial={folder}", "--training.steps=1", *sizes_of(folder)]
    assert pretrain(1, other, *arguments, config=file, settings=[]) == [""]
    assert manifest_of(other, 1)["record"]["initial"] == {"from": str(folder), "step": 3, "initial": record}
    for name, parameter in weights_of(other).named_parameters():
        np.testing.assert_allclose(parameter.detach(), model.get_parameter(name).detach(), atol=3 * UNCHANGED)

    for name in ("WORLD_SIZE", "RANK", "NPROC", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    wrong = [argument.replace("model.ffn=24", "model.ffn=48") for argument in arguments]
    wrong += ["--parallel.dp_shard=1", f"--run.folder={tmp_path / 'new'}", "--check"]
    line = "--checkpoint.initial: layers.0.mlp.gate_proj.weight: [24, 32] in the checkpoint, [48, 32] by [model]"
    assert line in refusal(capsys, lambda: load_configs([str(file), *wrong]))


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def sizes_of(folder: Path) -> list[str]:
    """Return the sizes of a run's model as arguments."""
    config: Config = load_config([str(folder / "config.toml")], one_device=True)
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "qkv_bias")
    return [f"--model.{name}={json.dumps(getattr(config.model, name))}" for name in names]


def test_a_recipe_that_reads_no_weights_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model.from_hf=org/name", "--checkpoint.initial=runs/x"]
    why = "this recipe reads no weights to start from: remove the key, or use recipes/pretrain.py"
    assert refusal(capsys, lambda: load_config(arguments, one_device=True)) == [
        f"--model.from_hf: {why}",
        f"--checkpoint.initial: {why}",
    ]


def test_the_updates_of_a_run_are_no_initial_weights_and_its_export_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("NPROC", "1")
    save_run(tmp_path / "run", Model(**SIZES), lora=Lora(rank=2))
    second = [*sizes_of(tmp_path / "run"), "--training.sequence_length=64", "--check"]
    (line,) = refusal(capsys, lambda: load_configs([*second, "--checkpoint.initial=run"]))
    assert line.startswith("--checkpoint.initial: run/checkpoints/step-00000002 holds low-rank updates, and not")
    assert "--export.folder=merged" in line
    export.main(load_run(["run", "--export.folder=merged"], one_device=True))
    assert passes([*second, "--model.from_hf=merged"])


def passes(arguments: list[str]) -> bool:
    """Return whether `--check` finds no fault."""
    with pytest.raises(SystemExit) as ended:
        load_configs(arguments)
    return ended.value.code == 0


def test_the_experts_of_a_run_start_from_a_dense_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("NPROC", "1")
    save_run(tmp_path / "run", Model(**SIZES))
    dense = [*sizes_of(tmp_path / "run"), "--training.sequence_length=64", "--checkpoint.initial=run", "--check"]
    experts = [*dense, "--model.experts=4"]
    first, *_ = refusal(capsys, lambda: load_configs(experts))
    assert first.startswith("--checkpoint.initial: layers.0.mlp.routed.router.weight: missing in the checkpoint")
    assert passes([*experts, "--model.upcycle=true"])


def test_a_run_with_a_copy_in_storage_may_resume_without_its_initial_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine: the start says it if storage has none either."""
    enter_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("NPROC", "1")
    gone = ["--training.sequence_length=64", "--checkpoint.initial=gone", "--check"]
    assert passes([*gone, "--checkpoint.remote=memory://run"])
    said = "checkpoint.initial: gone is missing; memory://run may have a checkpoint to resume"
    assert f"not checked: {said}" in capsys.readouterr().err.splitlines()
    fresh = [*gone, "--checkpoint.remote=memory://run", "--checkpoint.resume=none"]
    for arguments in (gone, fresh):
        lines = refusal(capsys, partial(load_configs, arguments))
        assert any("checkpoint.initial: gone" in line for line in lines)
