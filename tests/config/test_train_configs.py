"""Every file of train_configs/ loads and can be dry-run; the header of a run says what it needs and how to start it."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
import torch

from tests.facts.test_model_sizes import MODELS_BY_FEATURES
from tests.runtime.test_run_train import clean
from tests.test_docs import load_script
from torchllm.config import Config, write_config
from torchllm.config.paths import absolute_paths
from torchllm.facts.flops import parameter_count
from torchllm.models.decoder import build_model
from torchllm.tools.config.load import load_config
from torchllm.tools.dry_run.run import examine

planned = load_script("planned").planned

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "train_configs"
# These are no runs: tests/tools/planner/test_cluster.py, tests/recipes/test_sweep.py, tests/tools/pipeline read them.
OF_NO_RUN = ("clusters", "ladders", "sweeps", "pipeline")
NO_RUNS = {file for folder in OF_NO_RUN for file in FOLDER.glob(f"{folder}/**/*.toml")}
FILES = sorted({*FOLDER.rglob("*.toml")} - NO_RUNS)
MODELS_BY_DEFAULT = ("llama3_1b.toml", "moe_debug.toml")
RUNS = sorted({*FOLDER.glob("*.toml")} | {*FOLDER.glob("benchmarks/*.toml")})
PLANNED_BY_DEFAULT = ("llama_1b_1gpu.toml", "llama3_8b_64gpu.toml", "qwen3_30b_a3b_8gpu.toml")
REAL_RUNS = sorted(file for file in FOLDER.glob("*.toml") if "debug" not in file.name)
"""runs on a data set that the user prepares"""


def left_for_the_night(files: list[Path], *by_default: str) -> list[Any]:
    """Return the parameters of a test, of which these files are tried by default."""
    exhaustive = pytest.mark.exhaustive
    return [file if file.name in by_default else pytest.param(file, marks=exhaustive) for file in files]


def name_of(file: Path) -> str:
    return str(file.relative_to(FOLDER))


class HeaderCommand(NamedTuple):
    environment: dict[str, str]
    words: list[str]


def header_commands(file: Path) -> list[HeaderCommand]:
    """Return the indented lines of a file's header comment, without the remark that may follow on the same line."""
    indented = [line[4:] for line in file.read_text().splitlines() if line.startswith("#   ")]
    text = re.sub(r" \\\n\s*", " ", "\n".join(indented))  # a backslash continues a command on the next line
    commands = []
    for line in text.splitlines():
        command = line.split("   ")[0]
        words = shlex.split(command)
        variables = [word for word in words if re.fullmatch("[A-Z]+=[0-9]+", word)]
        environment = dict(variable.split("=") for variable in variables)
        commands.append(HeaderCommand(environment, [word for word in words if word not in variables]))
    return commands


def dry_run_environment(file: Path) -> dict[str, str]:
    """Return the variables of the header's dry-run command; without one, those of its first command, or NPROC=2."""
    commands = header_commands(file)
    for command in commands:
        if "--run.dry_run=true" in command.words:
            return command.environment
    return commands[0].environment if commands and commands[0].environment else {"NPROC": "2"}


def load_for_dry_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    for variable, value in dry_run_environment(file).items():
        monkeypatch.setenv(variable, value)
    return load_config([str(file), "--run.folder=unused", "--run.dry_run=true"])


@pytest.mark.quick
def test_files_and_their_resolved_configs_load_without_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No key of them does nothing, on as many ranks as their headers say."""
    for file in FILES:
        with monkeypatch.context() as environment:
            config = load_for_dry_run(file, environment)
            write_config(config, tmp_path / "config.toml")
            assert load_config([str(tmp_path / "config.toml")]) == absolute_paths(config), file
            assert capsys.readouterr() == ("", ""), file


@pytest.mark.parametrize("file", left_for_the_night(MODELS_BY_FEATURES, *MODELS_BY_DEFAULT), ids=name_of)
def test_model_dry_runs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file of each set of features, whose sizes are in tests/facts/test_model_sizes.py.

    On one rank, with two blocks, or one of each place in the pattern; with experts, the first may be dense.
    """
    monkeypatch.setenv("NPROC", "1")
    text = file.read_text()
    blocks = max(2, len(tomllib.loads(text)["model"].get("pattern", ())))
    few_blocks = [f"--model.layers={blocks}", "--training.global_batch_size=1", "--training.sequence_length=256"]
    if "dense_layers" in text:
        few_blocks.append("--model.dense_layers=1")
    config = load_config([str(file), *few_blocks, "--run.dry_run=true", "--cluster.name=dgx_h100"])
    (kind,) = examine(config).kinds
    with torch.device("meta"):
        numbers = [buffer.numel() for buffer in build_model(config.model).buffers()]  # biases of routers, block scales
    assert kind.memory["parameters"] == 4 * (parameter_count(config.model) + sum(numbers))
    assert kind.memory["optimizer"] >= 8 * parameter_count(config.model)
    assert sum(kind.memory.values()) > 3 * kind.memory["parameters"]


@pytest.mark.parametrize("file", left_for_the_night(RUNS, "debug.toml"), ids=name_of)
def test_run_dry_runs(file: Path) -> None:
    command = [str(ROOT / "run_train.sh"), str(file), "--run.dry_run=true", "--json"]
    # Each process may have 1 GiB of its own: the target is 2 GB for the two that run at a time.
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30)); "
    limit += "os.execv(sys.argv[1], sys.argv[1:])"
    environment = clean(dry_run_environment(file))
    done = subprocess.run([sys.executable, "-c", limit, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kinds = json.loads(done.stdout)["kinds"]
    assert kinds[0]["peak"] > 0
    if file in REAL_RUNS:
        assert all(kind["fits"] == "fits" for kind in kinds)
        (written,) = re.findall(r"# Dry run: ([\d.]+) GiB", file.read_text())
        assert max(kind["peak"] for kind in kinds) / 2**30 == pytest.approx(float(written), rel=0.01)


@pytest.mark.parametrize("file", left_for_the_night(REAL_RUNS, *PLANNED_BY_DEFAULT), ids=name_of)
def test_header_says_what_the_planner_does(file: Path) -> None:
    """If this fails because the planner was changed: `python docs/planned.py`."""
    assert planned(file) in file.read_text()


@pytest.mark.parametrize("file", left_for_the_night(REAL_RUNS, "llama_1b_1gpu.toml"), ids=name_of)
def test_prepare_command_writes_what_the_run_reads(file: Path, tmp_path: Path) -> None:
    """With two web pages for a data set and bytes for a tokenizer."""
    (prepare,) = [command for command in header_commands(file) if "recipes/prepare.py" in command.words]
    pages = tmp_path / "page.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["A page.", "Another page."]}), pages)
    words = [word for word in prepare.words if "path=" not in word]
    words = [sys.executable if word == "python" else word for word in words]
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    words += [f"--data.sources.0.path={tmp_path}/*.parquet", "--data.tokenizer=bytes", "--prepare.processes=1"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=clean({}))
    assert done.returncode == 0, done.stderr
    (path,) = re.findall(r'\[\[data\.sources\]\]\nkind = "tokens"\npath = "(.*)"', done.stdout)
    (source,) = load_config([str(file), "--run.folder=unused", "--run.dry_run=true"], one_device=True).data.sources
    assert source.kind == "tokens"
    assert Path(path) == (tmp_path / source.path).resolve()


def test_runs_say_what_they_are_and_how_to_start_them() -> None:
    for file in RUNS:
        text = file.read_text()
        header = text.split("base = ")[0]
        assert len(header.splitlines()) >= 3, file
        words = [word for command in header_commands(file) for word in command.words]
        assert any("run_train.sh" in word for word in words), file
        assert ("# Hardware: " in text) == (file in REAL_RUNS), file
        if "benchmarks" not in file.parts:
            assert "synthetic" not in text, file  # random tokens teach nothing


def test_debug_run_lets_every_axis_up_to_its_limit_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, layout in [
        (4, ["--parallel.tp=4"]),
        (4, ["--parallel.pp=4"]),
        (8, ["--parallel.cp=8"]),
        (8, ["--parallel.dp_shard=8"]),
        (8, ["--parallel.dp_replicate=8", "--parallel.dp_shard=1"]),
        (8, ["--parallel.tp=2", "--parallel.dp_replicate=2", "--parallel.sequence_parallel=true"]),
    ]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        load_config([str(FOLDER / "debug.toml"), "--run.folder=unused", *layout])
