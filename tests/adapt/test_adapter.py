"""What a run changes in itself: at a checkpoint, said, and with the same losses."""

import functools
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.parity import CPU
from tests.recipes.warm import pretrain, trained
from tests.tiny_run import curve, metrics
from tests.workers import run
from torchllm.adapt.adapter import MOST_WORKERS, SLOW_NODES, Adapter
from torchllm.config import Config, Data
from torchllm.metrics.watch import Profiled, Slow

__all__ = ["trained"]

PIPELINE = [
    "--parallel.pp=2",
    "--parallel.dp_shard=1",
    "--model.layers=6",
    "--training.steps=28",
    "--training.micro_batch_size=4",
    "--checkpoint.interval=8",
    "--evaluate.interval=0",
]


def _heavy(recipe: Any, rank: int) -> None:
    """The first two blocks take 25 ms more each, wherever they are."""
    parallelize = recipe.parallelize

    def heavier(*arguments: Any) -> Any:
        stages = parallelize(*arguments)
        for stage in stages:
            for name in {"0", "1"} & stage.layers.keys():
                stage.layers[name].register_forward_pre_hook(lambda *_: time.sleep(0.025))
        return stages

    recipe.parallelize = heavier


def split_of(folder: Path) -> str:
    found = re.search(r"^split = (\[.*)$", (folder / "config.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_blocks_leave_a_heavy_stage_until_it_is_the_best_split(tmp_path: Path) -> None:
    """3 + 3 to the best split, 1 + 5, in which each stage has a heavy block; the losses are those of 3 + 3."""
    even, moved = tmp_path / "even", tmp_path / "moved"
    assert pretrain(2, even, *PIPELINE, change=_heavy) == ["", ""]
    assert pretrain(2, moved, *PIPELINE, "--parallel.rebalance=true", change=_heavy) == ["", ""]
    assert split_of(even) == "[]"
    assert split_of(moved) == "[1, 5]"
    for one, other in zip(curve(moved), curve(even), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    seconds = [record["step_seconds"] for record in metrics(moved) if "loss" in record]
    assert sum(seconds[-4:]) < 0.9 * sum(seconds[3:7])  # measured: 0.7; two stages, four micro batches, in turn


def _alone(function: Any, *arguments: Any) -> Any:
    [result] = run(function, 1, *arguments)
    return result


def _fed(folder: Path, workers: int, waits: list[float]) -> list[int | None]:
    """data.workers after checkpoints 0.2 s apart, in which rank 1 waited so much; None: as they were."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    adapter = Adapter(folder, group, worth=0.05)
    config = Config(data=Data(workers=workers))
    adapter.begin(config, [], SimpleNamespace(pp=SimpleNamespace(size=lambda: 1)), CPU)
    answers, waited = [], 0.0
    for wait in waits:
        time.sleep(0.2)
        adapter.after_step(None)
        waited += wait * dist.get_rank()
        found = adapter.at_checkpoint(10, waited)
        if found is not None:
            assert found == replace(config, data=replace(config.data, workers=found.data.workers))
        answers.append(found and found.data.workers)
    return answers


def test_a_starved_rank_gets_a_worker_more(tmp_path: Path) -> None:
    assert run(_fed, 2, tmp_path, 1, [0.001, 0.1]) == [[None, 2]] * 2
    assert run(_fed, 2, tmp_path, 0, [0.1]) == [[1]] * 2
    assert run(_fed, 2, tmp_path, 1, [0.04]) == [[None]] * 2  # over 5 % of the time, but not worth it
    assert run(_fed, 2, tmp_path, MOST_WORKERS, [0.2]) == [[None]] * 2


def _clocks_apart(folder: Path) -> int | None:
    """Rank 1 waited 0.2 s of 2 s; rank 0's clock says that 0.2 s have passed: a tenth of that is not worth it."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    adapter = Adapter(folder, group, worth=0.05)
    adapter.begin(Config(), [], SimpleNamespace(pp=SimpleNamespace(size=lambda: 1)), CPU)
    adapter.after_step(None)
    adapter.begun -= 2.0 if dist.get_rank() else 0.2
    found = adapter.at_checkpoint(10, 0.2 * dist.get_rank())
    return found and found.data.workers


def test_ranks_decide_alike_whatever_their_clocks_say(tmp_path: Path) -> None:
    assert run(_clocks_apart, 2, tmp_path) == [2, 2]


def _left_out(folder: Path) -> str:
    group = dist.new_group(backend="gloo")
    assert group is not None
    adapter = Adapter(folder, group)
    adapter.begin(Config(), [], SimpleNamespace(pp=SimpleNamespace(size=lambda: 1)), CPU)
    for step, host in enumerate(("node-7", "node-7", "node-3"), 1):
        adapter.after_step(Profiled(step, {"forward": 1.0}, Slow(step, host, "forward", 1.0, 0.5)))
    assert adapter.at_checkpoint(3, 0.0) is None
    return (folder / SLOW_NODES).read_text()


def test_the_nodes_of_slow_ranks_are_written_for_slurm(tmp_path: Path) -> None:
    assert _alone(_left_out, tmp_path) == "node-7,node-3"


def test_a_starved_run_goes_on_with_more_workers(tmp_path: Path, trained: Path) -> None:
    """A whole run: rank 0's loader sleeps; the samples are the same."""
    assert pretrain(2, tmp_path, change=_hungry) == ["", ""]
    assert re.search(r"^workers = 1$", (tmp_path / "config.toml").read_text(), re.MULTILINE)
    assert curve(tmp_path) == curve(trained)


def _hungry(recipe: Any, rank: int) -> None:
    build_loader = recipe.build_loader

    def slow(*arguments: Any) -> Any:
        loader = build_loader(*arguments)
        next_step = loader.next_step
        loader.next_step = lambda: time.sleep(0.1) or next_step()
        return loader

    recipe.build_loader = slow
    recipe.Adapter = functools.partial(recipe.Adapter, worth=0.1)
