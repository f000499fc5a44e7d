"""Recipes of commit d223729 that import from `torchllm.recipe` alone, unchanged (tests/forks): they train the same."""

from pathlib import Path

import pytest

from recipes import minimal
from tests.forks.d223729 import minimal as old_minimal
from tests.recipes.test_finetune import data
from tests.recipes.test_unapplied_keys import EVERYTHING, FEW
from tests.recipes.warm import alone, pretrain
from tests.tiny_run import curve

__all__ = ["data"]

OLD = "tests.forks.d223729"


def test_pretraining_is_the_same_on_two_ranks(trained: Path, tmp_path: Path) -> None:
    assert pretrain(2, tmp_path, recipe=f"{OLD}.pretrain") == ["", ""]
    assert curve(tmp_path) == curve(trained)


def test_fine_tuning_is_the_same(data: list[str], tmp_path: Path) -> None:
    run = [*data, "--model.layers=1", "--finetune.epochs=2", "--metrics.log_interval=1", "--checkpoint.interval=0"]
    for name in ("recipes", OLD):
        assert pretrain(1, tmp_path / name, *run, recipe=f"{name}.finetune") == [""]
    assert curve(tmp_path / OLD) == curve(tmp_path / "recipes")
    assert len(curve(tmp_path / OLD)) == 4


def test_the_recipe_for_reading_trains_the_same(trained: Path) -> None:
    assert old_minimal.main(alone(trained)) == minimal.main(alone(trained))


@pytest.mark.parametrize("name", ["pretrain", pytest.param("finetune", marks=pytest.mark.exhaustive)])
def test_every_key_is_applied(name: str, trained: Path, tmp_path: Path) -> None:
    upcycled = [f"--checkpoint.initial={trained}", "--model.upcycle=true", "--model.upcycle_noise=0.1"]
    by_recipe = ("--training.weights_dtype", "--optimizer.ema_offload")  # arguments of calls in newer ones
    of_then = [word for word in EVERYTHING if not word.startswith(by_recipe)]
    assert pretrain(1, tmp_path, *FEW, *of_then, *upcycled, recipe=f"{OLD}.{name}") == [""]
