"""Every file of train_configs/ is a config that loads, can be dry-run, and says what it is and how to start it."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.test_run_train import clean
from torchllm.config import load_config, write_config
from torchllm.dry_run.run import examine
from torchllm.spec.flops import parameter_count

FOLDER = Path(__file__).parents[2] / "train_configs"
OTHERS = {
    *FOLDER.glob("clusters/*"),
    *FOLDER.glob("sweeps/*"),
}  # tests/spec/test_cluster.py, tests/recipes/test_sweep.py
FILES = sorted({*FOLDER.rglob("*.toml")} - OTHERS)
RUNS = [file for file in FILES if file.parent == FOLDER]
CLUSTER_RUNS = [file for file in RUNS if "[cluster]" in file.read_text()]
"""too large to be anything but looked at here"""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_file_and_its_resolved_config_load_without_a_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No key of it does nothing, on as many ranks as its header says."""
    if file not in CLUSTER_RUNS:
        launch = re.search(r"^#   NPROC=(\d+)", file.read_text(), re.MULTILINE)
        monkeypatch.setenv("WORLD_SIZE", launch[1] if launch else "2")
    dry_run = ["--run.dry_run=true"] if file in CLUSTER_RUNS else []
    config = load_config([str(file), "--run.folder=unused", *dry_run])
    write_config(config, tmp_path / "config.toml")
    assert load_config([str(tmp_path / "config.toml")]) == config
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("file", [file for file in FILES if file not in RUNS], ids=lambda file: file.name)
def test_model_dry_runs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, with two of its blocks, which are all alike."""
    monkeypatch.setenv("NPROC", "1")
    few = ["--model.layers=2", "--training.global_batch_size=1", "--training.sequence_length=256"]
    config = load_config([str(file), *few, "--run.dry_run=true", "--cluster.name=dgx_h100"])
    (kind,) = examine(config).kinds
    assert kind.memory["parameters"] == 4 * parameter_count(config.model)
    assert kind.memory["optimizer"] >= 2 * kind.memory["parameters"]
    assert sum(kind.memory.values()) > 3 * kind.memory["parameters"]


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.name)
def test_run_dry_runs(file: Path) -> None:
    environment = clean({} if file in CLUSTER_RUNS else {"NPROC": "1"})
    command = [str(FOLDER.parent / "run_train.sh"), str(file), "--run.dry_run=true", "--json"]
    # Each process may have 1 GiB of its own: the target is 2 GB for the two that run at a time.
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30)); "
    limit += "os.execv(sys.argv[1], sys.argv[1:])"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", limit, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kinds"][0]["peak"] > 0
    if file in CLUSTER_RUNS:
        assert all(kind["fits"] == "fits" for kind in found["kinds"])
    # The largest, Llama 3 405B on 16,384 ranks, takes 21 s on two idle cores (target 60).
    assert time.monotonic() - started < 2 * 60


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.name)
def test_run_says_what_it_is_and_how_to_start_it(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert len(header) >= 3
    assert any("run_train.sh" in line for line in header)


def test_debug_run_lets_every_axis_up_to_its_limit_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, layout in [
        (4, ["--parallel.tp=4"]),
        (8, ["--parallel.dp_shard=8"]),
        (8, ["--parallel.dp_replicate=8", "--parallel.dp_shard=1"]),
        (8, ["--parallel.tp=2", "--parallel.dp_replicate=2", "--parallel.sequence_parallel=true"]),
    ]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        load_config([str(FOLDER / "debug.toml"), "--run.folder=unused", *layout])
