"""Frozen parameters (model.frozen) under every technique."""

import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.parity import FEW, Settings, check, tiny
from tests.recipes.test_unapplied_keys import instead
from tests.recipes.warm import alone, pretrain
from tests.tiny_run import DEBUG, ROOT
from torchllm.checkpoint import tensors
from torchllm.checkpoint.tensors import open_checkpoint
from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.facts.shapes import parameter_shapes
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import fill_all
from torchllm.tools.front.start import load_configs
from torchllm.tools.hub.by_key import WeightReader
from torchllm.tools.hub.weights import AVERAGED_WEIGHTS, load_weights

PREFIX = r"embed_tokens.*|layers\.[01]\..*"
"""embedding and first blocks: they have no backward pass"""
SOME = r"layers\.[02]\.self_attn\..*|layers\.1\.mlp\.up_proj\.weight|norm\.weight"
"""parts of blocks: FSDP's units have both kinds of parameters"""


EXPERTS: Settings = {
    "model.experts": 4,
    "model.top_k": 2,
    "model.balance_loss": "global",
    "model.router_bias": True,
    "model.router_score": "sigmoid",
}
PIPELINE: Settings = {"parallel.pp": 2}
CASES: dict[str, tuple[str, Settings]] = {
    "fsdp": (SOME, {"parallel.dp_shard": 2, "training.micro_batch_size": 2}),
    "all but the head": (r"(?!lm_head).*", {"parallel.dp_shard": 2, "parallel.keep_last_block": False}),
    "tp, gpt": (r".*bias|embed_positions.*", {"parallel.tp": 2, "model.family": "gpt", "training.loss_chunk": 20}),
    "sp": (SOME, {"parallel.tp": 2, "parallel.sequence_parallel": True, "recompute.mode": "full"}),
    "pp, tied": ("embed_tokens.*", {**PIPELINE, "model.tied_embeddings": True}),
    # the first linear layers of a stage have inputs without a gradient
    "split backward": (r"embed_tokens.*|.*norm.*", {**PIPELINE, "parallel.schedule": "ZBVZeroBubble"}),
    "last stage": (r"norm.*|lm_head.*|layers\.[23]\..*", {**PIPELINE, "parallel.schedule": "InterleavedZeroBubble"}),
    "routers": (r".*router\.weight|layers\.2\..*experts.*", {**EXPERTS, "parallel.dp_shard": 2, "parallel.ep": 2}),
    # routers count their tokens in the backward pass, which frozen blocks at the start would not have
    "prefix of experts": (PREFIX, {**EXPERTS, "parallel.dp_shard": 2, "parallel.tp": 2}),
}


AT_NIGHT = ("all but the head", "sp", "prefix of experts")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in AT_NIGHT else name for name in CASES]
)
def test_the_others_train_as_in_one_process(name: str) -> None:
    frozen, layout = CASES[name]
    check({**FEW, "model.frozen": frozen, **layout}, ragged=True)


def keys(folder: Path, step: int, prefix: str) -> set[str]:
    stored = open_checkpoint(None, folder / f"checkpoints/step-{step:08}")
    return {key.removeprefix(prefix) for key in stored.index.tensors if key.startswith(prefix)}


def test_frozen_parameters_are_saved_and_may_be_others_when_a_run_goes_on(tmp_path: Path) -> None:
    """On a pipeline rank that trains nothing, with an average; then on another layout. The command is the guide's."""
    assert f"--model.frozen='{PREFIX}'" in (ROOT / "docs/finetune.md").read_text()
    common = ["--optimizer.ema_decay=0.5", "--evaluate.ema=true", "--model.tied_embeddings=true"]
    first = ["--parallel.pp=2", "--training.steps=2", "--optimizer.name=adamw"]
    assert pretrain(2, tmp_path, *common, *first, f"--model.frozen={PREFIX}") == ["", ""]
    names = parameter_shapes(alone(tmp_path).model).keys()
    frozen = {name for name in names if re.fullmatch(PREFIX, name)}
    assert keys(tmp_path, 2, "model.") == names
    assert keys(tmp_path, 2, "extra.ema.") == names - frozen
    steps = {name.removesuffix(".step") for name in keys(tmp_path, 2, "optimizer.") if name.endswith(".step")}
    assert steps == names - frozen

    averaged = build_model(alone(tmp_path).model)
    with mock.patch.object(tensors, "read_piece", wraps=tensors.read_piece) as reads:
        load_weights(tmp_path / "checkpoints/step-00000002", [averaged], prefix=AVERAGED_WEIGHTS)
    assert reads.call_count == len(names)  # of each parameter the average or the frozen weights, in one piece
    start = build_model(alone(tmp_path).model)
    fill_all([start], start.model, alone(tmp_path).run.seed)
    read = WeightReader(tmp_path / "checkpoints/step-00000002", AVERAGED_WEIGHTS)
    for name, weight in averaged.named_parameters():
        assert torch.equal(weight, start.get_parameter(name)) == (name in frozen), name
        assert torch.equal(weight, read.read(name))

    assert pretrain(2, tmp_path, *common, "--training.steps=4", r"--model.frozen=layers\.[12]\..*") == ["", ""]
    assert "frozen" in (tmp_path / "config.toml").read_text()
    trained = {name for name in names if not re.fullmatch(r"layers\.[12]\..*", name)}
    states = WeightReader(tmp_path / "checkpoints/step-00000004", "optimizer.")
    assert {name: int(states.read(f"{name}.step")) for name in trained} == {
        name: 2 if name in frozen else 4 for name in trained
    }
    assert {name.rpartition(".")[0] for name in states.entries} == trained


def _build_trained(model: Model, *arguments: float) -> Decoder:
    return build_model(replace(model, frozen=""), *arguments)


def test_a_fork_that_does_not_freeze_is_refused(tmp_path: Path) -> None:
    (error,) = pretrain(1, tmp_path, "--model.frozen=lm_head.*", change=instead("build_model", _build_trained))
    assert error.startswith('--model.frozen: is "lm_head.*", but this recipe does not apply it: call build_model(')


def test_what_matches_no_parameter_or_all_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for frozen, message in (
        ("layers.[0", "'layers.[0' is no regular expression: unterminated character set"),
        (".*", "matches all parameters, so nothing would be trained"),
        ("embed_tokens", "matches only a part of embed_tokens.weight: it must match whole names, e.g. '.*(embed_"),
        ("lm_haed.weight", r"matches no parameter: did you mean 'lm_head\.weight'?"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            build_model(replace(tiny({}).model, frozen=frozen))
    file = tmp_path / "run.toml"
    file.write_text(f"base = '{ROOT / DEBUG}'\n[model]\nfrozen = '{frozen}'\n")
    with pytest.raises(SystemExit, match="2"):
        load_configs([str(file), "--check", "--parallel.dp_shard=1"])
    error = capsys.readouterr().err
    assert error.startswith(f"{file}:3: model.frozen: ")
    assert message in error
