"""What a run changes in its own config at a checkpoint; the losses stay the same."""

import functools
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parity import tiny
from tests.recipes.warm import pretrain, trained
from tests.tiny_run import curve, metrics
from torchllm.adapt.adapter import MAX_WORKERS, Adapter
from torchllm.config import Checkpoint, Config, Data
from torchllm.metrics.bottlenecks import DataWait, ForwardTimes
from torchllm.metrics.monitor import Bottlenecks, Change

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
    match = re.search(r"^split = (\[.*)$", (folder / "config.toml").read_text(), re.MULTILINE)
    assert match
    return match[1]


def test_blocks_leave_a_heavy_stage_until_it_is_the_best_split(tmp_path: Path) -> None:
    """3 + 3 to the best split, 1 + 5, in which each stage has a heavy block; the losses are those of 3 + 3."""
    even, moved = tmp_path / "even", tmp_path / "moved"
    assert pretrain(2, even, *PIPELINE, change=_heavy) == ["", ""]
    assert pretrain(2, moved, *PIPELINE, "--parallel.rebalance=true", change=_heavy) == ["", ""]
    assert split_of(even) == "[]"
    assert split_of(moved) == "[1, 5]"
    for moved_step, even_step in zip(curve(moved), curve(even), strict=True):
        assert moved_step == pytest.approx(even_step, rel=1e-6)
    seconds = [record["step_seconds"] for record in metrics(moved) if "loss" in record]
    assert sum(seconds[-4:]) < 0.9 * sum(seconds[3:7])  # measured: 0.7; two stages, four micro batches, in turn


WAIT = DataWait(rank=3, seconds=20.0, elapsed=100.0)


def adapted(config: Config, bottlenecks: Bottlenecks) -> Change | None:
    """What a run changes at its first checkpoint."""
    return Adapter().change(config, bottlenecks)


def test_a_starved_rank_gets_one_more_worker() -> None:
    config = replace(Config(), data=Data(workers=1))
    change = adapted(config, Bottlenecks(WAIT, None))
    assert change is not None
    assert change.config == replace(config, data=replace(config.data, workers=2))
    assert change.reason == "rank 3 waits 20% of its time for data, so data.workers = 2"
    assert adapted(replace(config, data=Data(workers=MAX_WORKERS)), Bottlenecks(WAIT, None)) is None


def test_uneven_stages_get_another_split() -> None:
    config = tiny({"parallel.pp": 2, "model.layers": 6})
    assert adapted(config, Bottlenecks(None, ForwardTimes([1.0, 1.0], noise=0.0))) is None
    change = adapted(config, Bottlenecks(WAIT, ForwardTimes([3.0, 1.0], noise=0.0)))
    assert change is not None
    assert change.config.parallel.split == (2, 4)
    assert change.config.data.workers == config.data.workers + 1
    assert change.reason.endswith(", stages of 2+4 blocks instead of 3+3")


def test_a_sparse_block_moves_with_its_own_share_of_a_stages_time() -> None:
    """Which is 4.7 times that of a dense one here: 6.4 seconds and 1.4."""
    experts = {"model.experts": 4, "model.top_k": 4, "model.expert_ffn": 192, "model.dense_layers": 3}
    config = tiny({"parallel.pp": 2, "model.layers": 6, "parallel.split": (5, 1), **experts})
    change = adapted(config, Bottlenecks(None, ForwardTimes([17.0, 5.0], noise=0.0)))
    assert change is not None
    assert change.config.parallel.split == (4, 2)  # 10.6, 11.3; of equal blocks 3 + 3 would be best


def test_a_changed_run_goes_on_from_the_newest_checkpoint() -> None:
    config = replace(Config(), checkpoint=Checkpoint(resume="other_run/checkpoints/step-00000004"))
    change = adapted(config, Bottlenecks(WAIT, None))
    assert change is not None
    assert change.config.checkpoint.resume == "auto"


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
    recipe.supervise = functools.partial(recipe.supervise, starved_seconds=0.1)
