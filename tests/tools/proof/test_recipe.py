"""Commands read the config of the fork that RECIPE names, as its own --check does."""

import sys
from pathlib import Path

import pytest

from recipes import plan
from recipes.prepare import PrepareConfig
from recipes.tokenizer import TokenizerConfig
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.tools.front.resolve import load_sizes
from torchllm.tools.proof.recipe import MODULE, schema_of_fork

ROOT = Path(__file__).parents[3]
FORK = """
from dataclasses import dataclass, field
from torchllm.config import Config, NonNegative

@dataclass(frozen=True)
class ZLoss:
    weight: NonNegative = 0.0

@dataclass(frozen=True)
class MyConfig(Config):
    z_loss: ZLoss = field(default_factory=ZLoss)
"""
HINT = "z_loss: if a fork has it, set RECIPE to the fork's file"


@pytest.fixture(autouse=True)
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a fork, beside a config with its section."""
    (tmp_path / "mine.py").write_text(FORK)
    config = f'base = "{ROOT}/train_configs/debug.toml"\n[z_loss]\nweight = 0.5\n'
    (tmp_path / "my.toml").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RECIPE", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("schema", [Config, PrepareConfig, TokenizerConfig])
def test_commands_of_one_process_read_the_sections_of_a_fork(
    schema: type[Config], fork: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_sizes(["my.toml"], schema)
    assert HINT in capsys.readouterr().err
    monkeypatch.setenv("RECIPE", str(fork))
    config = load_sizes(["my.toml"], schema)
    assert isinstance(config, schema)
    assert config.z_loss.weight == 0.5  # type: ignore[attr-defined]  # the fork's
    with pytest.raises(SystemExit):
        load_sizes(["my.toml", "--z_loss.wieght=1"], schema)
    assert "--z_loss.wieght: unknown key; did you mean z_loss.weight?" in capsys.readouterr().err


def test_plan_explain_reads_the_sections_of_a_fork(
    fork: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explain", "my.toml", "--cluster", "dgx_h100", "--gpus", "2"]
    with pytest.raises(UserError, match=HINT):
        plan.main(arguments)
    monkeypatch.setenv("RECIPE", str(fork))
    plan.main(arguments)
    assert capsys.readouterr().out.startswith("my on 2 x H100")


def test_a_fork_without_a_config_has_the_library_s(fork: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork.write_text("")
    monkeypatch.setenv("RECIPE", str(fork))
    assert schema_of_fork(PrepareConfig) is PrepareConfig
    monkeypatch.setenv("RECIPE", "nowhere.py")
    with pytest.raises(UserError, match=r"nowhere\.py: there is no such file"):
        schema_of_fork(PrepareConfig)
