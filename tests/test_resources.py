"""Files that come with torchllm are found from any folder; a file of the user's own comes first."""

from pathlib import Path

import pytest

from tests.tiny_run import ROOT
from torchllm.tools.config.load import load_config
from torchllm.tools.config.named_base import name_base
from torchllm.tools.resources import NamedRun, find_base, find_config, find_run, resource


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    return tmp_path


def test_a_path_of_the_documentation_works_in_any_folder(folder: Path) -> None:
    assert resource("run_train.sh") == ROOT / "run_train.sh"
    for name in ("debug.toml", "./debug.toml", "recipes/pretrain.py", "train_configs/nosuch.toml"):
        assert find_config(name) == name  # only paths of shipped files are looked up
    assert load_config(["train_configs/debug.toml", "--run.folder=unused"]).model.hidden == 160
    nearer = folder / "train_configs" / "debug.toml"
    nearer.parent.mkdir()
    nearer.write_text("[model]\nhidden = 64\n")
    assert load_config(["train_configs/debug.toml", "--run.folder=unused"]).model.hidden == 64


def test_a_run_is_named_by_its_folder_its_config_or_a_checkpoint(folder: Path) -> None:
    step = folder / "run/checkpoints/step-00000004"
    step.mkdir(parents=True)
    for name in ("run", "run/config.toml", "run/checkpoints/step-00000004"):
        assert find_run(name) is None
        assert find_config(name) == name
    (folder / "run/config.toml").touch()
    for name in ("run", "run/", "run/config.toml", str(folder / "run")):
        assert find_run(name) == NamedRun(Path(name.removesuffix("/config.toml")), None)
    assert find_run("run/checkpoints/step-00000004") == NamedRun(folder / "run", step)
    assert find_config("run/checkpoints/step-00000004") == str(folder / "run/config.toml")
    for name in ("run/checkpoints", "run/checkpoints/step-00000004/model", "other", "mine.toml"):
        assert find_run(name) is None


def test_a_base_is_beside_the_file_or_among_the_shipped_configs(folder: Path) -> None:
    (folder / "mine.toml").write_text('base = "models/llama3_8b.toml"\n')
    assert load_config(["mine.toml", "--run.folder=unused"]).model.hidden == 4096
    (folder / "models").mkdir()
    (folder / "models" / "llama3_8b.toml").write_text("[model]\nhidden = 64\n")
    assert load_config(["mine.toml", "--run.folder=unused"]).model.hidden == 64


def test_a_missing_base_is_named_as_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.toml").write_text('base = "models/nosuch.toml"\n')
    with pytest.raises(SystemExit):
        load_config(["mine.toml", "--run.folder=unused"])
    assert capsys.readouterr().err.startswith("mine.toml:1: models/nosuch.toml: no such file")


def test_a_written_file_names_a_shipped_base_as_on_every_machine(folder: Path) -> None:
    shipped = str(ROOT / "train_configs" / "models" / "debug.toml")
    assert name_base(shipped, str(folder)) == "models/debug.toml"
    assert find_base(str(folder), "models/debug.toml") == shipped
    (folder / "models").mkdir()
    (folder / "models" / "debug.toml").touch()  # would be read instead
    relative = name_base(shipped, str(folder))
    assert (folder / relative).resolve() == Path(shipped)
    assert name_base(str(folder / "own.toml"), str(folder / "models")) == "../own.toml"
