"""What the README tells a reader to type works, and what it shows is what comes out."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchllm.config_file import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.S)
COMMANDS = [line.strip().split("  #")[0].strip() for line in PROSE.splitlines() if line.startswith("    ")]


def check_config(arguments: list[str], recipe: str = "pretrain.py") -> subprocess.CompletedProcess[str]:
    """What a recipe says of a config, without starting anything."""
    command = [sys.executable, str(ROOT / "recipes" / recipe), *arguments, "--check"]
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1"}
    if "--run.dry_run=true" not in arguments:  # that of as many ranks as its degrees say
        environment["NPROC"] = "2"
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_every_command_is_known() -> None:
    starts = ("pip install", "./run_train.sh", "python recipes/", "cp ", "RECIPE=", "sbatch ")
    assert COMMANDS
    assert [command for command in COMMANDS if not command.startswith(starts)] == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("./run_train.sh train_configs")])
def test_run_command_is_a_valid_run(command: str) -> None:
    checked = check_config(shlex.split(command)[1:])
    assert checked.returncode == 0, checked.stderr
    assert ("DRY_RUN=1" if "--run.dry_run=true" in command else "NPROC=2") in checked.stdout


def test_files_named_exist() -> None:
    names = re.findall(r"`((?:recipes|torchllm|tests|train_configs)/[\w./]+|[A-Z]+\.md)`", README)
    for whole, inner in re.findall(r"`(torchllm/parallel/\{([\w,]+)\}\.py)`", README):
        names += [f"torchllm/parallel/{name}.py" for name in inner.split(",")]
        assert whole
    assert len(names) > 15
    assert [name for name in names if not (ROOT / name).exists() and name != "recipes/mine.py"] == []


def test_example_config_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", README, re.S)
    file = tmp_path / "run.toml"
    file.write_text(example.replace('base = "models/', f'base = "{ROOT}/train_configs/models/'))
    monkeypatch.setenv("WORLD_SIZE", "64")
    config = load_config([str(file), "--run.folder=unused"])
    assert config.parallel.dp_replicate == 8


def test_errors_are_as_shown() -> None:
    (command, shown) = re.findall(r"```text\n\$ \./run_train\.sh (.*?)\n(.*?)```", README, re.S)[0]
    checked = check_config(shlex.split(command))
    assert checked.returncode == 2
    assert checked.stderr == shown
