"""The reference run on GPUs: it trains, its profiled step is split by what its kernels did, several agree with one.

It has not run on a GPU yet; the same runs on CPU processes are as they must be.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.tiny_run import DEBUG, ROOT, curve, metrics

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


def test_a_run_trains_and_knows_where_its_time_goes(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", 1)
    losses = [loss for _, loss, *_ in curve(folder)]
    assert len(losses) == 40
    assert losses[0] == pytest.approx(5.79, abs=0.1)  # ln(264) and what the initial weights add
    assert losses[-1] < 3.2  # 2.9 on a CPU
    assert all(record["memory_gib"] > 0 for record in metrics(folder) if "loss" in record)
    profiled = [
        {key.removeprefix("breakdown/"): share for key, share in record.items() if key.startswith("breakdown/")}
        for record in metrics(folder)
        if any(key.startswith("breakdown/") for key in record)
    ]
    assert profiled
    for parts in profiled:
        assert sum(parts.values()) == pytest.approx(1, abs=0.02)
        assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed for a second rank")
@pytest.mark.parametrize(
    "layout", ["--parallel.dp_shard=2", "--parallel.tp=2", "--parallel.pp=2", "--parallel.cp=2"]
)  # fmt: skip
def test_two_gpus_train_as_one(layout: str, tmp_path: Path) -> None:
    degrees = ["--parallel.dp_shard=1"] if "dp_shard" not in layout else []
    float32 = "--training.dtype=float32"
    one = curve(trained(tmp_path / "one", 1, float32))
    two = curve(trained(tmp_path / "two", 2, float32, layout, *degrees))
    # float32 sums in another order, which 10 steps enlarge: the first ten agree to 1e-3, a wrong gradient to 1e-1.
    assert [loss for _, loss, *_ in two[:10]] == pytest.approx([loss for _, loss, *_ in one[:10]], rel=1e-3)
