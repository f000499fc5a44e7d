"""What the README tells a reader to type works, and what it shows is what comes out."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchllm.config import load_config
from torchllm.planner.evidence.calibrate import calibrate_file
from torchllm.planner.evidence.measurements import read_rows
from torchllm.planner.evidence.score import score_files, score_rows
from torchllm.spec.cluster import read_cluster

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.S)
COMMANDS = [line.strip().split("  #")[0].strip() for line in PROSE.splitlines() if line.startswith("    ")]
RUNS = [c.removeprefix("NPROC=8 ") for c in COMMANDS]
RUNS = [command for command in RUNS if command.startswith("./run_train.sh train_configs")]


def check_config(arguments: list[str], recipe: str = "pretrain.py") -> subprocess.CompletedProcess[str]:
    """What a recipe says of a config, without starting anything."""
    command = [sys.executable, str(ROOT / "recipes" / recipe), *arguments, "--check"]
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1"}
    if "--run.dry_run=true" not in arguments:  # that of as many ranks as its degrees say
        environment["NPROC"] = "2"
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_every_command_is_known() -> None:
    starts = ("pip install", "./run_train.sh", "NPROC=8 ./run_train.sh", "python recipes/", "cp ", "RECIPE=", "sbatch ")
    assert COMMANDS
    assert [command for command in COMMANDS if not command.startswith(starts)] == []


@pytest.mark.parametrize("command", RUNS)
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


def test_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert len(pictures) == 5
    assert [name for name in pictures if not (ROOT / name).is_file()] == []


def place_of_the_best(cluster: str) -> int:
    """Where the planner has the measured best of the sweep, from 1."""
    rows = score_rows(row for row in read_rows(str(ROOT / "docs/sweep/results.csv"), cluster) if row.seconds)
    expected = {row.row.cells["layout"]: row.prediction.step for row in rows if row.prediction}
    measured = {row.row.cells["layout"]: row.row.seconds or 0.0 for row in rows}
    return sorted(expected, key=expected.__getitem__).index(min(measured, key=measured.__getitem__)) + 1


def test_the_sweeps_figures_are_as_shown(tmp_path: Path) -> None:
    rows = read_rows(str(ROOT / "docs/sweep/results.csv"))
    assert [len(rows), sum(row.seconds is not None for row in rows)] == [72, 52]
    fitted = tmp_path / "fitted.toml"
    said = calibrate_file(str(ROOT / "docs/sweep/results.csv"), str(fitted), "")
    assert said.replace(str(fitted), "docs/sweep/fitted.toml") in README
    kept = read_cluster(str(ROOT / "docs/sweep/fitted.toml"), [])
    now = read_cluster(str(fitted), [])
    assert kept is not None
    assert kept == now
    before, after = (
        json.loads(score_files([str(ROOT / "docs/sweep/results.csv")], True, cluster))["sweep"]
        for cluster in ("", str(fitted))
    )
    assert f"{after['spearman']:.2f} instead of {before['spearman']:.2f}" in README
    ranks = [place_of_the_best(cluster) for cluster in ("", str(fitted))]
    assert ranks[0] > 12
    assert ranks[1] == 8
    assert f"slower by {before['groups']['sweep/s128/8']['regret_seconds']:.0%}".replace("%", " %") in README
