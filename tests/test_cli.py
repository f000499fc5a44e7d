"""The console command: what it starts, copies and refuses. tests/test_package.py runs it as installed."""

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.tiny_run import ROOT
from torchllm import __version__, cli
from torchllm.config import Model
from torchllm.tools.config.toml_files import read_files
from torchllm.tools.hub.files import read_hub_config


class Started(Exception):
    """Stands for the process that the command becomes."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def start(program: str, command: list[str]) -> None:
        assert program == command[0]
        raise Started(*command)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execvp", start)
    monkeypatch.delenv("PYTHON", raising=False)
    return tmp_path


def test_the_package_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["torchllm", "--version"])
    runpy.run_module("torchllm", run_name="__main__")
    assert capsys.readouterr().out == f"{__version__}\n"


def started(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(Started) as command:
        cli.main(arguments)
    return command.value.args


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_train_is_run_train_sh_with_this_python_and_other_commands_are_recipes() -> None:
    assert started("train", "mine.toml", "--help") == ("bash", str(ROOT / "run_train.sh"), "mine.toml", "--help")
    assert os.environ.pop("PYTHON") == sys.executable
    assert started("plan", "rank") == (sys.executable, str(ROOT / "recipes" / "plan.py"), "rank")
    assert started("benchmark", "matmul") == (sys.executable, str(ROOT / "recipes" / "benchmark"), "matmul")


def test_help_names_every_recipe_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([])
    text = capsys.readouterr().out
    assert [name for name in cli.recipes() if name not in text] == []
    assert [name for name in cli.COMMANDS if f"  torchllm {name}" not in text] == []
    assert set(re.findall(r"^  torchllm ([a-z]+)", text, re.MULTILINE)) <= {*cli.COMMANDS, *cli.recipes()}
    assert str(ROOT) in text


def test_what_copy_lists_it_copies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["copy"])
    names = capsys.readouterr().out.splitlines()
    assert {"pretrain", "sweep", "run_train.sh", "train_configs/models/llama3_8b.toml"} <= set(names)
    assert "train_configs/kubernetes/indexed_job.yaml" in names
    recipe = (ROOT / "recipes" / "pretrain.py").read_bytes()
    cli.main(["copy", "pretrain"])
    cli.main(["copy", "pretrain", "mine.py"])
    (folder / "recipes").mkdir()
    cli.main(["copy", "pretrain", "recipes"])
    for copied in ("pretrain.py", "mine.py", "recipes/pretrain.py"):
        assert (folder / copied).read_bytes() == recipe
    cli.main(["copy", "run_train.sh"])
    assert os.access(folder / "run_train.sh", os.X_OK)
    cli.main(["copy", "sweep", "study"])
    assert (folder / "study" / "__main__.py").is_file()
    assert not list(folder.rglob("__pycache__"))


def test_what_is_unknown_or_would_overwrite_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "trian") == "torchllm: trian: unknown command; did you mean train?\n"
    assert refused(capsys, "evalute") == "torchllm: evalute: unknown command; did you mean evaluate?\n"
    assert refused(capsys, "xyz") == "torchllm: xyz: unknown command; torchllm --help lists them\n"
    assert "did you mean pretrain?" in refused(capsys, "copy", "pretrian")
    assert "torchllm copy lists the names" in refused(capsys, "copy", "/etc/passwd")
    (folder / "pretrain.py").write_text("mine")
    assert "pretrain.py exists already" in refused(capsys, "copy", "pretrain")
    assert (folder / "pretrain.py").read_text() == "mine"


def test_a_published_model_is_written_as_toml_from_its_config_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "llama").mkdir()
    sizes = {"num_hidden_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
    (folder / "llama/config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    cli.main(["model", "llama"])
    text = capsys.readouterr().out
    (folder / "model.toml").write_text(text)
    errors: list[str] = []
    table = read_files("model.toml", errors).table["model"]
    assert not errors
    assert Model(**table) == read_hub_config(folder / "llama").model
    assert text.startswith("# config.json of llama\n[model]\nlayers = 2\nhidden = 4096\n")
    assert "head_dim" not in text
    (folder / "llama/config.json").write_text('{"model_type": "smollm3", "num_hidden_layers": 8}')
    cli.main(["model", "llama"])
    kinds = "\n[model.kinds.rope]\n\n[model.kinds.no_rope]\nrotary_fraction = 0.0\n"
    assert capsys.readouterr().out.endswith(kinds)
    (folder / "llama/config.json").write_text('{"model_type": "gpt2", "n_embd": 768, "n_positions": 1024}')
    cli.main(["model", "llama"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--check" in line]
    assert line == ("# In a run, --check refuses training.sequence_length: 2048 is over model.max_sequence_length 1024")


def test_a_model_that_is_not_supported_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text('{"model_type": "falcon_h1", "mamba_d_state": 16}')
    said = refused(capsys, "model", str(folder))
    assert "config.json: model_type: 'falcon_h1' is not supported; supported are llama, " in said
    assert "config.json: missing: Mamba (mamba_d_state = 16)\n" in said
    assert refused(capsys, "model") == "torchllm: usage: torchllm model FOLDER_OR_HUB_ID\n"


def test_convert_has_a_help_and_takes_the_gpus_as_plan_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["convert", "--help"])
    assert exit.value.code == 0
    assert "--gpus N" in capsys.readouterr().out
    (folder / "args.json").write_text('{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}')
    cli.main(["convert", "args.json", "--gpus", "64"])
    assert "global_batch_size = 128" in capsys.readouterr().out
    assert "not a whole number of at least 1: 0" in refused(capsys, "convert", "args.json", "--gpus=0")
