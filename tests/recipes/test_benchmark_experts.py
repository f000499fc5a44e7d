"""`recipes/benchmark experts`: the same tokens for a dense model and one with experts, and how they are compared."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.benchmark import experts as benchmark_experts
from recipes.benchmark.experts import TrainedRun, check_alike, experts
from recipes.benchmark.settings import Benchmark, BenchmarkConfig
from tests.recipes.test_benchmark import benchmark
from tests.tiny_run import SMALL
from torchllm.config import Evaluate, Schedule, Training
from torchllm.config.errors import UserError

DATA = {"sequences": 4096, "steps": 512, "stages": [], "fingerprint": {"sources": [["a" * 64, 1.0]], "seed": 0}}
SIZES = ("--training.steps", "--evaluate.interval")
"""of SMALL, which the test sets otherwise"""
Pretended = dict[tuple[str, int], TrainedRun]
EVALUATED = BenchmarkConfig(evaluate=Evaluate(interval=4), benchmark=Benchmark(rounds=3))


def as_runtime(folder: Path) -> Any:
    return SimpleNamespace(world_size=1, is_main=True, folder=folder, barrier=lambda: None)


@pytest.mark.exhaustive
def test_both_are_trained_with_the_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of runs beside other tests wait for each other
    options = [word for word in SMALL if not word.startswith(SIZES)]
    options += ["--training.steps=3", "--evaluate.interval=3", "--run.seed=5", "--metrics.tensorboard=false"]
    options += ["--benchmark.rounds=1", "--benchmark.json=true", f"--run.folder={tmp_path}"]
    done = benchmark("experts", *options, seconds=280)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "scratch").exists()
    result = json.loads(done.stdout)
    of_seed, mean = result["validation loss, nats per byte"]
    assert (of_seed["seed"], mean["seed"]) == ("5", "mean")
    assert 4 < of_seed["experts"] != of_seed["dense"] < 6  # after 3 steps little less than ln 264 = 5.6
    assert mean == of_seed | {"seed": "mean", "target": -0.01}
    (seconds,) = result["seconds of each run"]
    (ratio,) = result["seconds, all seeds"]
    assert seconds["ratio"] == ratio["ratio"] == ratio["least"] == seconds["experts_s"] / seconds["dense_s"]
    dense, sparse = result["training data of both"]
    assert (dense.pop("run"), sparse.pop("run")) == ("dense", "experts")
    assert dense.pop("active_parameters") == dense.pop("parameters") < sparse.pop("active_parameters")
    assert sparse.pop("parameters") > 500_000
    assert dense == sparse
    assert (dense["steps"], dense["tokens"]) == (3, 3 * 16 * 32)
    assert len(dense["data"]) == 16


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """What `experts` takes for the runs that it has started, by side and seed, in the order of their starts."""
    losses = {"dense": [1.5, 1.6, 1.4], "experts": [1.4, 1.7, 1.1]}
    runs: Pretended = {}

    def pretend(name: str, seeds: Iterator[int], overrides: Mapping[str, str], folder: Path) -> TrainedRun:
        seed = next(seeds)
        assert overrides == {"training.steps": "512"}
        config = replace(EVALUATED, run=replace(EVALUATED.run, seed=seed))
        seconds = 100.0 if name == "dense" else 150.0 + 30 * seed
        return runs.setdefault((name, seed), TrainedRun(config, losses[name][seed], seconds, DATA))

    monkeypatch.setattr(benchmark_experts, "train_next", pretend)
    monkeypatch.setattr(benchmark_experts, "build_loader", lambda *_: SimpleNamespace(close=lambda: None))
    return runs


def test_every_seed_trains_both_and_the_last_row_has_the_means(pretended: Pretended, tmp_path: Path) -> None:
    tables = experts(EVALUATED, as_runtime(tmp_path), {"training.steps": "512", "benchmark.rounds": "3"})
    turns = [("dense", 0), ("experts", 0), ("experts", 1), ("dense", 1), ("dense", 2), ("experts", 2)]
    assert list(pretended) == turns
    *of_seeds, mean = tables["validation loss, nats per byte"]
    assert [(row["seed"], row["dense"], row["experts"], row["target"]) for row in of_seeds] == [
        ("0", 1.5, 1.4, None),
        ("1", 1.6, 1.7, None),
        ("2", 1.4, 1.1, None),
    ]
    assert (mean["seed"], mean["target"]) == ("mean", -0.01)
    assert (mean["dense"], mean["experts"], mean["difference"]) == pytest.approx((1.5, 1.4, -0.1))
    assert [row["ratio"] for row in tables["seconds of each run"]] == [1.5, 1.8, 2.1]
    (ratio,) = tables["seconds, all seeds"]
    assert (ratio["ratio"], ratio["least"], ratio["largest"], ratio["target"]) == (1.8, 1.5, 2.1, 2)
    with pytest.raises(UserError, match=r"set evaluate\.interval over 0"):
        experts(replace(EVALUATED, evaluate=Evaluate(interval=0)), as_runtime(tmp_path), {"training.steps": "512"})
    assert list(pretended) == turns  # nothing is trained


def test_runs_that_differ_in_more_than_the_model_are_not_compared() -> None:
    dense = TrainedRun(EVALUATED, 1.5, 100.0, DATA)
    check_alike(dense, dense)
    different: dict[str, dict[str, Any]] = {
        "data": {"data": DATA | {"sequences": 4080}},
        "training": {"config": replace(EVALUATED, training=Training(global_batch_size=32))},
        "schedule": {"config": replace(EVALUATED, schedule=Schedule(warmup_steps=1))},
        "evaluate": {"config": replace(EVALUATED, evaluate=Evaluate(sequences=1))},
    }
    for name, changes in different.items():
        with pytest.raises(UserError, match=f"do not have the same {name}: "):
            check_alike(dense, dense._replace(**changes))
