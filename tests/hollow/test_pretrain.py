"""The reference run on GPUs: NCCL groups, CUDA streams and pinned memory are torch's own, numbers are not."""

import json
from pathlib import Path

import pytest

from tests.hollow.bed import Machine, run

SMALL = (
    "--model.hidden=256",  # heads of width 32
    "--model.ffn=64",
    "--training.sequence_length=64",
    "--schedule.warmup_steps=2",
    "--metrics.log_interval=1",
    "--checkpoint.interval=2",
    "--evaluate.interval=2",
    "--evaluate.sequences=16",
    "--generate.tokens=4",
    "--compile.block=false",  # compiled ones are counted in test_launches.py
    "--compile.loss=false",
)


def train(folder: Path, ranks: int, *settings: str, steps: int = 4) -> str:
    """Train on so many GPUs; return what was printed."""
    run_settings = [f"--run.folder={folder}", f"--training.steps={steps}"]
    command = ["./run_train.sh", "train_configs/debug.toml", *run_settings, *SMALL, *settings]
    done = run(command, Machine(devices=ranks), NPROC=str(ranks))
    assert done.returncode == 0, done.stdout
    return done.stdout


def logged_steps(folder: Path) -> list[int]:
    """Return the steps that metrics.jsonl has."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if "loss" in record]


def test_one_gpu_trains_evaluates_saves_and_generates(tmp_path: Path) -> None:
    printed = train(tmp_path / "run", 1)
    assert logged_steps(tmp_path / "run") == [1, 2, 3, 4]
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()
    assert "attention: torch's flash kernel" in printed
    assert "checkpoints are written in the background: checkpoint.asynchronous is auto" in printed


def test_a_run_resumes(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, "--generate.after_training=false")
    train(tmp_path / "run", 1, "--generate.after_training=false", steps=6)
    assert logged_steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "layout",
    [
        ["--parallel.zero_stage=3", "--checkpoint.asynchronous=false"],
        ["--parallel.tp=2", "--parallel.sequence_parallel=true"],
        ["--parallel.cp=2"],
        ["--parallel.cp=2", "--parallel.cp_method=ulysses", "--data.document_mask=true"],
        ["--parallel.pp=2"],
        ["--parallel.pp=2", "--parallel.schedule=Interleaved1F1B"],
        ["--parallel.pp=2", "--parallel.schedule=ZBVZeroBubble"],
        ["--run.deterministic=true", "--recompute.mode=selective"],
    ],
    ids=" ".join,
)
def test_two_gpus_train_in_every_layout(tmp_path: Path, layout: list[str]) -> None:
    train(tmp_path / "run", 2, "--generate.after_training=false", *layout)
    assert logged_steps(tmp_path / "run") == [1, 2, 3, 4]
