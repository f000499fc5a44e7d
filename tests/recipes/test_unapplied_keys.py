"""Recipes apply every key that is set, or refuse it before the first step: torchllm's own, and forks without a call."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import minimal
from tests.config.test_applied_keys import REFUSED, changed
from tests.recipes.warm import alone, pretrain
from tests.tiny_run import metrics
from torchllm.checkpoint.manifest import read_manifest
from torchllm.config import Config
from torchllm.config.applied_keys import CHANGE_NO_WEIGHT
from torchllm.config.errors import UserError
from torchllm.models.decoder import build_model
from torchllm.optim.average import WeightAverage
from torchllm.train.step import Health

EMA = ["--optimizer.ema_decay=0.9"]
FEW = ["--training.steps=2", "--schedule.warmup_steps=1", "--checkpoint.interval=1", "--evaluate.interval=1"]


def _replace_arguments(name: str, replaced: dict[str, Any], recipe: Any, rank: int) -> None:
    setattr(recipe, name, partial(_call, getattr(recipe, name), replaced))


def _call(function: Callable[..., Any], replaced: dict[str, Any], *given: Any, **named: Any) -> Any:
    return function(*given, **(named | replaced))


def _replace(name: str, value: Any, recipe: Any, rank: int) -> None:
    setattr(recipe, name, value)


def without(name: str, **replaced: Any) -> Callable[[Any, int], None]:
    """Return a change of a recipe: what it imports as `name` gets other arguments."""
    return partial(_replace_arguments, name, replaced)


def instead(name: str, value: Any) -> Callable[[Any, int], None]:
    """Return a change of a recipe: what it imports as `name` is something else."""
    return partial(_replace, name, value)


def _build_without_penalty(model: Any, loss_chunk: int, *_: Any) -> Any:
    return build_model(model, loss_chunk)


def _never(*_: int) -> bool:
    return False


def _own_evaluation(*_: Any) -> float:
    return 1.0


def _healthy(training: Any, step: int, *_: Any) -> Health:
    return Health(step, 0, None, is_lost=False, problem="")


class Unfollowed(WeightAverage):
    def follow(self, optimizer: Any) -> None:
        pass


class NotRestarted(WeightAverage):
    def restart(self, names: Any) -> None:
        pass


class NotSwapped(WeightAverage):
    def in_place_of_weights(self, wanted: bool) -> Any:
        return super().in_place_of_weights(False)


def _nothing(*_: Any) -> None:
    pass


def _trains_always(recipe: Any, rank: int) -> None:
    def main(config: Any) -> None:
        recipe.supervise(recipe.train, [config], recipe.start_runtime(config.run, [config]))

    recipe.main = main


FORKS = {  # what a fork of recipes/pretrain.py lacks, what the command line asks for, the key that is refused
    "initial weights": (without("Checkpointer", initial=None), [], "--checkpoint.initial: is "),
    "average, not updated": (instead("WeightAverage", Unfollowed), EMA, "--optimizer.ema_decay: is 0.9"),
    "average of random weights": (instead("WeightAverage", NotRestarted), EMA, "--optimizer.ema_decay: is 0.9"),
    "average, not saved": (without("Checkpointer", extra_state={}), EMA, "--optimizer.ema_decay: needs ema."),
    "penalty": (
        instead("build_model", _build_without_penalty),
        ["--training.z_loss=0.1"],
        "--training.z_loss: is 0.1",
    ),
    "shares": (
        without("Checkpointer", extra_state={}),
        ["--model.experts=4", "--model.balance_loss=global"],
        "--model.balance_loss: needs expert_shares.layers.",
    ),
    "low-rank updates": (
        instead("add_low_rank_updates", _nothing),
        ["--lora.rank=4"],
        "--lora.rank: is 4, but this recipe does not apply it: call add_low_rank_updates(model, config, dtype)",
    ),
    "dry run": (_trains_always, ["--run.dry_run=true", "--parallel.dp_shard=1"], "--run.dry_run: is true"),
}


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_that_lacks_a_call_ends_before_the_first_step(name: str, trained: Path, tmp_path: Path) -> None:
    change, asked, refused = FORKS[name]
    asked = asked or [f"--checkpoint.initial={trained}"]
    (error,) = pretrain(1, tmp_path, *asked, change=change)
    assert error.startswith(refused)
    assert not (tmp_path / "metrics.jsonl").exists()


def _evaluates_weights(recipe: Any, rank: int) -> None:
    recipe.WeightAverage, recipe.evaluate = NotSwapped, _own_evaluation


def test_a_fork_that_does_not_evaluate_as_it_should_ends_there(tmp_path: Path) -> None:
    (error,) = pretrain(1, tmp_path / "never", *FEW, change=instead("due", _never))
    assert "evaluate.interval: is 1, but this recipe has not evaluated step 1" in error
    (error,) = pretrain(1, tmp_path / "weights", *FEW, *EMA, "--evaluate.ema=true", change=_evaluates_weights)
    assert "--evaluate.ema: is true, but this recipe evaluates the weights" in error


def validation_losses(folder: Path) -> list[float]:
    return [record["validation_loss"] for record in metrics(folder) if "validation_loss" in record]


def test_the_average_is_evaluated_also_by_a_fork_that_does_not_put_it_in_place(tmp_path: Path) -> None:
    averaged = [*FEW, *EMA, "--evaluate.ema=true"]
    assert pretrain(1, tmp_path / "recipe", *averaged) == [""]
    assert pretrain(1, tmp_path / "fork", *averaged, change=instead("WeightAverage", NotSwapped)) == [""]
    assert validation_losses(tmp_path / "fork") == validation_losses(tmp_path / "recipe")
    assert pretrain(1, tmp_path / "weights", *FEW, *EMA) == [""]
    assert validation_losses(tmp_path / "weights") != validation_losses(tmp_path / "recipe")


def _sgd(stages: Any, _: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight for stage in stages for weight in stage.parameters()], lr=0.1)


@pytest.mark.parametrize("replaced", [[], ["optimizer.name"]])
def test_a_checkpoint_names_the_parts_that_a_fork_has_replaced(tmp_path: Path, replaced: list[str]) -> None:
    assert pretrain(1, tmp_path, *FEW, change=instead("build_optimizer", _sgd) if replaced else None) == [""]
    step = tmp_path / "checkpoints/step-00000002"
    assert read_manifest(step).record.get("replaced", []) == replaced


def test_a_lost_run_ends_also_in_a_fork_that_does_not_look(tmp_path: Path) -> None:
    asked = ["--training.on_nonfinite=stop", "--optimizer.learning_rate=1e30", "--training.steps=3"]
    (error,) = pretrain(1, tmp_path, *asked, change=instead("read_health", _healthy))
    assert "loss or gradient was not finite in 1 step(s) up to step 2" in error
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2]


EVERYTHING = [  # that one run can have
    *("--run.deterministic=true", "--training.loss_chunk=16", "--training.z_loss=1e-4", "--recompute.mode=every_k"),
    *("--training.on_nonfinite=skip", "--training.max_consecutive_nonfinite=5", "--recompute.k=2"),
    *("--checkpoint.keep=2", "--checkpoint.keep_every=2", "--checkpoint.asynchronous=true", "--checkpoint.resume=none"),
    *("--model.experts=4", "--model.router_bias=true", "--model.router_bias_rate=0.01", "--model.balance_loss=global"),
    *("--model.pattern=local,full", "--model.kinds.local.window=16", "--model.kinds.full.rope_theta=500"),
    *("--model.frozen=embed_tokens.*", "--model.base_width=16"),
    *(*EMA, "--optimizer.ema_offload=true", "--evaluate.ema=true", "--training.weights_dtype=bfloat16"),
]


NOT_TRIED = {
    "run.dry_run": "trains nothing",
    "model.from_hf": "in test_initial_weights.py",
    "model.mixer": "in tests/parallel/test_latent_attention.py; a pattern of kinds takes its place here",
    "model.mtp_depth": "in tests/parallel/test_multi_token.py; the weights that it begins from have no such blocks",
    "compile.norm": "needs a compiler",
    "compile.block": "needs a compiler",
    "compile.loss": "needs a compiler",
    "compile.graphs": "needs a GPU",
    "float8.recipe": "needs torchao",
    "finetune.epochs": "in test_finetune.py",
}


@pytest.mark.parametrize("recipe", ["recipes.pretrain", "recipes.finetune"])
def test_a_recipe_that_trains_applies_every_key(recipe: str, trained: Path, tmp_path: Path) -> None:
    upcycled = [f"--checkpoint.initial={trained}", "--model.upcycle=true", "--model.upcycle_noise=0.1"]
    lora = ["--lora.rank=2", "--lora.alpha=8", '--lora.targets=["q_proj"]', "--training.on_nonfinite=stop"]
    lora += ["--recompute.mode=full", "--recompute.offload=true"]
    for name, asked in (("all", [*EVERYTHING, *upcycled]), ("updates", lora)):
        remote = f"--checkpoint.remote=memory:/{tmp_path}/{name}"
        assert pretrain(1, tmp_path / name, *FEW, *asked, remote, recipe=recipe) == [""]
        assert [record["step"] for record in metrics(tmp_path / name) if "loss" in record] == [1, 2]
    words = (word[2:].partition("=")[0].split(".") for word in (*FEW, *EVERYTHING, *upcycled, *lora, remote))
    tried = {f"{section}.{name}" for section, name, *_ in words}  # of model.kinds.local.window the key is model.kinds
    assert set(REFUSED) - tried == NOT_TRIED.keys()


def merged(keys: list[str]) -> Config:
    """Return the defaults with another value of each of these keys."""
    config = Config()
    for key in keys:
        section, name = key.split(".")
        table = replace(getattr(config, section), **{name: getattr(getattr(changed(key), section), name)})
        tables: dict[str, Any] = {section: table}
        config = replace(config, **tables)
    return config


def test_the_recipe_for_reading_refuses_what_it_lacks_and_names_what_it_leaves_out(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    applied = [
        "training.loss_chunk",
        "training.z_loss",
        "training.weights_dtype",
        *(key for key in REFUSED if key.startswith(("lora", "model."))),
    ]
    applied = [key for key in applied if key not in ("model.from_hf", "model.upcycle", "model.upcycle_noise")]
    left_out = [key for key in REFUSED if key in CHANGE_NO_WEIGHT or key.partition(".")[0] in CHANGE_NO_WEIGHT]
    refused = [key for key in REFUSED if key not in (*applied, *left_out)]
    asked = merged(REFUSED)
    config = alone(trained, "--training.steps=1", "--schedule.warmup_steps=1")
    sections = {"checkpoint": asked.checkpoint, "recompute": asked.recompute, "compile": asked.compile}
    sections |= {"float8": asked.float8, "finetune": asked.finetune}  # type: ignore[dict-item]
    changes: Any = {
        **sections,
        "run": replace(config.run, deterministic=True, dry_run=True),
        "model": replace(config.model, from_hf="a", upcycle=True, upcycle_noise=0.1),
        "training": replace(config.training, on_nonfinite="stop", max_consecutive_nonfinite=3, z_loss=0.1),
        "optimizer": replace(config.optimizer, ema_decay=0.9, ema_offload=True),
    }
    with pytest.raises(UserError) as error:
        minimal.main(replace(config, **changes))
    lines = [line.partition(": is ")[0].split(" ")[-1] for line in str(error.value).splitlines()]
    assert lines == refused
    capsys.readouterr()
    kept: Any = {"checkpoint": replace(config.checkpoint, keep=2), "lora": replace(config.lora, rank=2)}
    assert len(minimal.main(replace(config, **kept))) == 1
    line = "left out by this recipe: checkpoint.interval, checkpoint.keep, evaluate.interval"
    assert capsys.readouterr().err.splitlines()[-1] == line
