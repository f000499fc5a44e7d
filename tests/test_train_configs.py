"""Every file of train_configs/ is a config that loads, and says what it is and how to start it."""

from pathlib import Path

import pytest

from torchllm.config_file import load_config

FOLDER = Path(__file__).parent.parent / "train_configs"
FILES = sorted(FOLDER.rglob("*.toml"))
RUNS = [file for file in FILES if file.parent == FOLDER]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_file_loads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = next((line for line in file.read_text().splitlines() if line.startswith("#   NPROC=")), "#   NPROC=1 ")
    monkeypatch.setenv("NPROC", launch.split("NPROC=")[1].split()[0])
    load_config([str(file), "--run.folder=unused"])


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
