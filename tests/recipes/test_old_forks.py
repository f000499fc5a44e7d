"""The recipes of commit 8ca45ed, unchanged (tests/forks): they do the same, and apply or refuse every key."""

from importlib import import_module
from pathlib import Path

import pytest

from recipes import evaluate, generate, minimal
from tests.recipes.test_finetune import data
from tests.recipes.test_unapplied_keys import EVERYTHING, FEW
from tests.recipes.warm import alone, pretrain
from tests.tiny_run import DEBUG, SMALL, curve
from torchllm.config.errors import UserError
from torchllm.recipe import load_run
from torchllm.tools.config.load import load_config

__all__ = ["data"]

OLD = "tests.forks.8ca45ed"
SHORT = ["--generate.tokens=8", "--generate.temperature=0.8"]
pytestmark = pytest.mark.filterwarnings("ignore:torchllm:FutureWarning")


def test_pretraining_is_the_same_on_two_ranks(trained: Path, tmp_path: Path) -> None:
    assert pretrain(2, tmp_path, recipe=f"{OLD}.pretrain") == ["", ""]
    assert curve(tmp_path) == curve(trained)


def test_fine_tuning_is_the_same(data: list[str], tmp_path: Path) -> None:
    run = [*data, "--model.layers=1", "--finetune.epochs=2", "--metrics.log_interval=1", "--checkpoint.interval=0"]
    for name in ("recipes", OLD):
        assert pretrain(1, tmp_path / name, *run, recipe=f"{name}.finetune") == [""]
    assert curve(tmp_path / OLD) == curve(tmp_path / "recipes")
    assert len(curve(tmp_path / OLD)) == 4
    config = load_run([str(tmp_path / OLD / "config.toml"), "--generate.prompt=Who?", *SHORT], one_device=True)
    assert config.generate.chat
    assert import_module(f"{OLD}.generate").main(config) == generate.main(config)


def test_a_checkpoint_is_continued_and_evaluated_the_same(trained: Path) -> None:
    config = load_run([str(trained / "config.toml"), *SHORT], one_device=True)
    assert import_module(f"{OLD}.generate").main(config) == generate.main(config)
    assert import_module(f"{OLD}.evaluate").main(config) == evaluate.main(config)


def test_the_recipe_for_reading_trains_the_same(trained: Path) -> None:
    assert import_module(f"{OLD}.minimal").main(alone(trained)) == minimal.main(alone(trained))


@pytest.mark.parametrize("name", ["pretrain", "finetune"])
def test_every_key_is_applied(name: str, trained: Path, tmp_path: Path) -> None:
    upcycled = [f"--checkpoint.initial={trained}", "--model.upcycle=true", "--model.upcycle_noise=0.1"]
    assert pretrain(1, tmp_path, *FEW, *EVERYTHING, *upcycled, recipe=f"{OLD}.{name}") == [""]


UNAPPLIED = {  # by the recipe for reading, which did not refuse keys itself
    "run.deterministic": "true",
    "run.dry_run": "true",
    "training.max_consecutive_nonfinite": "3",
    "optimizer.ema_decay": "0.9",
    "checkpoint.resume": "none",
    "finetune.epochs": "2",
}


def test_the_recipe_for_reading_refuses_keys_before_the_first_update(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"--{key}={value}" for key, value in UNAPPLIED.items()]
    config = load_config([DEBUG, *SMALL, "--data.workers=0", *keys], one_device=True)
    with pytest.raises(UserError) as error:
        import_module(f"{OLD}.minimal").main(config)
    refused = [line.partition(": is ")[0] for line in str(error.value).splitlines()]
    assert sorted(refused) == sorted(f"--{key}" for key in UNAPPLIED)
    assert "step 1" not in capsys.readouterr().out
