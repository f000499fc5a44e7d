"""What a run changes in its own config at a checkpoint; the losses stay the same."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.parity import tiny
from tests.recipes.warm import pretrain
from tests.tiny_run import curve
from torchllm.config import Checkpoint, Config, Data
from torchllm.metrics.observer import Change
from torchllm.tools.adapt import adapter
from torchllm.tools.adapt.adaptation import Adaptation
from torchllm.tools.adapt.adapter import MAX_WORKERS
from torchllm.tools.adapt.balance import Rebalancer
from torchllm.tools.watch.bottlenecks import Bottlenecks, DataWait
from torchllm.tools.watch.stage_times import ForwardTimes

PIPELINE = [
    "--parallel.pp=2",
    "--parallel.dp_shard=1",
    "--model.layers=6",
    "--training.micro_batch_size=4",
    "--training.steps=4",
    "--checkpoint.interval=2",
    "--evaluate.interval=0",
]


def _measured(recipe: Any, rank: int) -> None:
    """In place of what is measured: the first of two equal stages is slow, and a rank without workers waits."""
    supervise = recipe.supervise
    decide = adapter.change_config

    def decide_by_these(rebalancer: Rebalancer, config: Config, bottlenecks: Bottlenecks) -> Change | None:
        seconds = [1.0, 1.0] if config.parallel.split else [3.0, 1.0]
        wait = WAIT if config.data.workers == 0 else None
        return decide(rebalancer, config, Bottlenecks(wait, ForwardTimes(seconds, noise=0.0)))

    def supervise_by_these(*arguments: Any) -> None:
        always = Bottlenecks(WAIT, None)
        with (
            mock.patch.object(adapter, "change_config", decide_by_these),
            mock.patch.object(Adaptation, "_bottlenecks", return_value=always),
        ):
            supervise(*arguments)

    recipe.supervise = supervise_by_these


def setting(folder: Path, key: str) -> str:
    """Return what a run's config says of a key in the end."""
    match = re.search(rf"^{key} = ([\[\d].*)$", (folder / "config.toml").read_text(), re.MULTILINE)
    assert match
    return match[1]


def test_a_run_changes_its_split_and_workers_and_trains_the_same_model(tmp_path: Path) -> None:
    even, moved = tmp_path / "even", tmp_path / "moved"
    assert pretrain(2, even, *PIPELINE) == ["", ""]
    assert pretrain(2, moved, *PIPELINE, change=_measured) == ["", ""]
    assert (setting(even, "split"), setting(even, "workers")) == ("[]", "0")
    assert (setting(moved, "split"), setting(moved, "workers")) == ("[2, 4]", "1")
    for moved_step, even_step in zip(curve(moved), curve(even), strict=True):
        assert moved_step == pytest.approx(even_step, rel=1e-6)


WAIT = DataWait(rank=3, seconds=20.0, elapsed=100.0)


def adapted(config: Config, bottlenecks: Bottlenecks) -> Change | None:
    """What a run changes at its first checkpoint."""
    return adapter.change_config(Rebalancer(), config, bottlenecks)


def test_a_starved_rank_gets_one_more_worker_from_the_newest_checkpoint_on() -> None:
    old = Checkpoint(resume="other_run/checkpoints/step-00000004")
    config = replace(Config(), data=Data(workers=1), checkpoint=old)
    change = adapted(config, Bottlenecks(WAIT, None))
    assert change is not None
    expected = replace(config, data=replace(config.data, workers=2), checkpoint=replace(old, resume="auto"))
    assert change.config == expected
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
