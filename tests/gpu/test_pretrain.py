"""The reference run on GPUs: it trains, its profiled step is split by what its kernels did, several agree with one.

It has not run on a GPU yet; the same runs on CPU processes are as they must be.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.tiny_run import DEBUG, ROOT, metrics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: NCCL and CUDA's kernels need one")

SHORT = [
    "--training.steps=40",
    "--schedule.warmup_steps=5",
    "--metrics.log_interval=1",
    "--metrics.breakdown_interval=5",
    "--evaluate.interval=0",
    "--generate.after_training=false",
]


def trained(folder: Path, processes: int, *options: str) -> Path:
    command = ["./run_train.sh", DEBUG, *SHORT, *options, f"--run.folder={folder}"]
    environment = os.environ | {"NPROC": str(processes)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def losses_of(folder: Path) -> list[float]:
    """The loss of every step of a run."""
    return [record["loss"] for record in metrics(folder) if "loss" in record]


def breakdowns(folder: Path) -> list[dict[str, float]]:
    """The parts of every profiled step, each a fraction of the step."""
    profiled = []
    for record in metrics(folder):
        parts = {}
        for key, share in record.items():
            prefix, _, part = key.partition("/")
            if prefix == "breakdown":
                parts[part] = share
        if parts:
            profiled.append(parts)
    return profiled


def test_a_run_trains_and_knows_where_its_time_goes(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", 1)
    losses = losses_of(folder)
    assert len(losses) == 40
    assert losses[0] == pytest.approx(5.79, abs=0.1)  # ln(264) and what the initial weights add
    assert losses[-1] < 3.2  # 2.9 on a CPU
    for record in metrics(folder):
        if "loss" in record:
            assert record["memory_gib"] > 0
    profiled = breakdowns(folder)
    assert profiled
    for parts in profiled:
        assert sum(parts.values()) == pytest.approx(1, abs=0.02)
        assert parts["forward"] > 0
        assert parts["backward"] > 0
        assert parts["optimizer"] > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed for a second rank")
@pytest.mark.parametrize(
    "layout", ["--parallel.dp_shard=2", "--parallel.tp=2", "--parallel.pp=2", "--parallel.cp=2"]
)  # fmt: skip
def test_two_gpus_train_as_one(layout: str, tmp_path: Path) -> None:
    options = ["--training.dtype=float32"]
    one_gpu = trained(tmp_path / "one", 1, *options)
    options.append(layout)
    if "dp_shard" not in layout:
        options.append("--parallel.dp_shard=1")
    two_gpus = trained(tmp_path / "two", 2, *options)
    # float32 sums in another order, which 10 steps enlarge: the first ten agree to 1e-3, a wrong gradient to 1e-1.
    expected = losses_of(one_gpu)[:10]
    assert losses_of(two_gpus)[:10] == pytest.approx(expected, rel=1e-3)
