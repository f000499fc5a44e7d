import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evidence.benchmark import NAMES
from tests.patience import patience
from tests.tiny_run import ROOT, SMALL

RECIPE = str(ROOT / "recipes" / "benchmark")
SHORT = [*SMALL, "--benchmark.rounds=2", "--benchmark.steps=2", "--benchmark.warmup=1", "--benchmark.seconds=0.001"]


def benchmark(*arguments: str, ranks: int = 0, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the recipe; `ranks` over 0: under torchrun. seconds: after which it is ended, and the test fails."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    folder = ROOT / "evidence" / "benchmark" if arguments[0] in NAMES else RECIPE
    command += [str(folder), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads of processes beside each other wait for each other
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(seconds), env=environment)


def measured(name: str, folder: Path, *overrides: str, ranks: int = 0) -> dict[str, Any]:
    """What a short benchmark prints as JSON, its only line on stdout."""
    done = benchmark(name, *SHORT, f"--run.folder={folder}", "--benchmark.json=true", *overrides, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert not (folder / "scratch").exists()
    result: dict[str, Any] = json.loads(done.stdout)
    assert result.pop("benchmark") == name
    assert result.pop("environment")["ranks"] == (ranks or 1)
    return result


def test_a_wrong_name_lists_the_right_ones() -> None:
    done = benchmark("stpe")
    assert (done.returncode, done.stdout) == (2, "")
    assert "matmul, step" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_key_is_found_before_torch_is_imported() -> None:
    program = f"import sys, runpy; sys.modules['torch'] = None; sys.argv[1:] = ['step', '--benchmark.round=1']; \
runpy.run_path({RECIPE!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 2
    assert "did you mean benchmark.rounds?" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "baseline"), [(0, "bare loop"), (2, "bare FSDP2")])
def test_step_compares_with_a_bare_loop(tmp_path: Path, ranks: int, baseline: str) -> None:
    result = measured("step", tmp_path, "--metrics.peak_tflops=100", ranks=ranks)
    assert [row["loop"] for row in result["training step"]] == ["torchllm", baseline]
    for row in result["training step"]:
        assert row["tokens_per_second"] == pytest.approx(16 * 32 / row["step_ms"] * 1e3)
        assert 0 < row["mfu"] == row["hfu"] < 1
        assert row["peak_memory_gib"] is None  # of a GPU
    row = result["step time"][0]
    assert row["what"] == f"torchllm / {baseline}"
    assert 0 < row["least"] <= row["ratio"] <= row["largest"] < 100


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "titles"),
    [("matmul", {"matrix products"}), ("checkpoint", {"saves", "time taken from training"})],
)
def test_a_benchmark_prints_its_tables(name: str, titles: set[str], tmp_path: Path) -> None:
    """Nothing is said of the seconds, which depend on what else the machine does."""
    tables = measured(name, tmp_path / "run")
    assert titles <= tables.keys()
    assert all(tables.values())
    values = [value for table in tables.values() for row in table for value in row.values()]
    assert all(math.isfinite(value) for value in values if isinstance(value, float))
