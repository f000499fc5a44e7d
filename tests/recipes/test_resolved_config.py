"""The config.toml of a run, with keys of [optimizer] that others need, is read by every recipe that uses the run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes import evaluate, export, generate
from tests.recipes.warm import pretrain
from tests.tiny_run import metrics
from torchllm.config import Config
from torchllm.tools.front.preflight import inspect_evaluation, inspect_export
from torchllm.tools.front.resolve import load_run, load_sizes
from torchllm.tools.front.start import load_configs

RUN = ["--training.steps=2", "--schedule.warmup_steps=1", "--checkpoint.interval=1", "--evaluate.interval=2"]
CHOSEN = ["--optimizer.ema_decay=0.5", "--evaluate.ema=true", "--optimizer.name=sgd", "--schedule.name=constant"]


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that evaluates an average; keys of its base do nothing by a choice of the command line."""
    folder = tmp_path_factory.mktemp("averaged")
    assert pretrain(1, folder, *RUN, *CHOSEN) == [""]
    return folder


def test_a_run_that_evaluates_an_average_is_evaluated_sampled_and_exported(
    averaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(averaged / "config.toml")
    capsys.readouterr()
    held_out = metrics(averaged)[-1]["validation_loss"]
    config = load_run([file], one_device=True, inspect=inspect_evaluation)
    assert evaluate.main(config) == pytest.approx(held_out, rel=1e-6)
    config = load_run([file, "--evaluate.ema=false"], one_device=True, inspect=inspect_evaluation)
    assert abs(evaluate.main(config) - held_out) > 1e-5
    assert generate.main(load_run([file, "--generate.tokens=3"], one_device=True))
    for ema in ("true", "false"):
        words = [file, f"--export.folder={tmp_path / ema}", f"--export.ema={ema}"]
        export.main(load_run(words, one_device=True, inspect=inspect_export))
    average, weights = (load_file(tmp_path / ema / "model.safetensors") for ema in ("true", "false"))
    assert not torch.equal(average["lm_head.weight"], weights["lm_head.weight"])
    assert "does nothing" not in capsys.readouterr().err


def test_it_is_trained_examined_and_measured_by_its_file(
    averaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by pretrain.py, its dry run, prove.py and plan.py."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    file = str(averaged / "config.toml")
    configs: list[Config] = [*load_configs([file]), *load_configs([file, "--run.dry_run=true"]), load_sizes([file])]
    assert {(config.optimizer.ema_decay, config.evaluate.ema, config.optimizer.beta2) for config in configs} == {
        (0.5, True, 0.98)
    }
    assert capsys.readouterr().err == ""
    load_sizes([file, "--optimizer.ema_decay=0"])  # a choice of the command line
    assert "config.toml" in (line := capsys.readouterr().err)
    assert ": evaluate.ema: does nothing in this run: it needs optimizer.ema_decay over 0\n" in line


def test_what_a_fork_has_written_into_the_sections_of_training_is_passed_over(averaged: Path, tmp_path: Path) -> None:
    text = (averaged / "config.toml").read_text()
    text = text.replace('name = "sgd"', 'name = "lion"\nlion = 1').replace('name = "constant"', 'name = "sqrt"')
    (tmp_path / "config.toml").write_text(text)
    config = load_run([str(tmp_path / "config.toml")], one_device=True)
    assert (config.optimizer.ema_decay, config.run.folder) == (0.5, str(averaged))
