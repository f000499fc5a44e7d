"""An empty working folder and an environment of one rank, for tests that load a config."""

from collections.abc import Callable
from pathlib import Path

import pytest

from torchllm.config import Config, Parallel
from torchllm.tools.proof.layouts import Settings, with_settings

RANK_VARIABLES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "NNODES",
    "NPROC",
    "NPROC_IS_DEFAULT",
    "SLURM_JOB_ID",
    "PET_RDZV_ID",
    "TORCHELASTIC_RUN_ID",
    "TORCHLLM_LAUNCHED",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and an environment of one rank."""
    enter_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "1")
    return tmp_path


def enter_empty_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder the working folder, in an environment that no launcher has set up."""
    monkeypatch.chdir(folder)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def config_of(settings: Settings) -> Config:
    """Return the defaults on one rank, with some keys changed."""
    return with_settings(Config(parallel=Parallel(dp_shard=1)), settings)


def refusal(capsys: pytest.CaptureFixture[str], load: Callable[[], object]) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        load()
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()
