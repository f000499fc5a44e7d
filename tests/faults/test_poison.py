"""Weights that go bad: what is saved, what is kept, what a run that starts again loads, and what it says."""

import logging
import re
import shutil
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.recipes.warm import pretrain
from tests.tiny_run import assert_same_run
from torchllm.checkpoint.manifest import step_folders, step_of


def spoil_a_weight(recipe: Any, rank: int, *, spoiled: int) -> None:
    """Let rank 1 make an element of its last weight NaN after a step, as a broken device would."""

    class SpoiledStep(recipe.TrainStep):
        def __call__(self, step: int, batches: Any) -> Any:
            result = super().__call__(step, batches)
            if step == spoiled and rank == 1:
                *_, weight = self.stages[-1].parameters()
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                with torch.no_grad():
                    local.view(-1)[0] = float("nan")
            return result

    recipe.TrainStep = SpoiledStep


def saved(folder: Path) -> list[int]:
    return [step_of(path) for path in step_folders(folder / "checkpoints")]


@pytest.mark.parametrize("asynchronous", ["false", pytest.param("true", marks=pytest.mark.exhaustive)])
def test_nan_in_one_ranks_weights_is_not_saved_and_costs_no_checkpoint(
    undisturbed: Path, tmp_path: Path, asynchronous: str, trials: int
) -> None:
    settings = [f"--checkpoint.asynchronous={asynchronous}", "--checkpoint.interval=2", "--checkpoint.keep=1"]
    for trial in range(trials):
        folder = tmp_path / f"trial-{trial}"
        spoiled = Random(trial).choice([4, 5])
        first, second = pretrain(2, folder, *settings, change=partial(spoil_a_weight, spoiled=spoiled))
        unsaved = 4 if spoiled == 4 else 6
        assert first == second
        assert re.search(rf"step {unsaved} is not saved: values are not finite in rank 1: model\.", first)
        assert saved(folder)[0] == unsaved - 2
        assert all(path.name.startswith("step-") for path in (folder / "checkpoints").iterdir())  # nothing half written
        assert pretrain(2, folder, *settings) == ["", ""]
        assert_same_run(folder, undisturbed)


def log_to_file(recipe: Any, rank: int, *, file: Path) -> None:
    supervise = recipe.supervise

    def logged(*arguments: Any) -> None:
        handler = logging.FileHandler(file)
        logger = logging.getLogger("torchllm")
        logger.addHandler(handler)
        try:
            supervise(*arguments)
        finally:
            logger.removeHandler(handler)
            handler.close()

    recipe.supervise = logged


def test_a_run_that_goes_on_says_in_what_its_config_is_not_the_checkpoints(undisturbed: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(undisturbed / "checkpoints/step-00000004", folder / "checkpoints/step-00000004")
    changed = ["--optimizer.learning_rate=1e-3", "--model.rope_theta=5e5"]
    assert pretrain(2, folder, *changed, change=partial(log_to_file, file=log)) == ["", ""]
    text = log.read_text()
    assert "optimizer.learning_rate: 0.003 in the checkpoint, 0.001 now" in text
    assert "model.rope_theta: 10000.0 in the checkpoint, 500000.0 now" in text
    assert "model.rope_theta changes the function of the model" in text
    assert f'run.folder: "{undisturbed}" in the checkpoint, "{folder}" now' in text
    assert text.count(" in the checkpoint, ") == 3


def touch_save(recipe: Any, rank: int, *, file: Path, at_step: int) -> None:
    class TouchingStep(recipe.TrainStep):
        def __call__(self, step: int, batches: Any) -> Any:
            if step == at_step:
                file.touch()
            return super().__call__(step, batches)

    recipe.TrainStep = TouchingStep


def test_a_file_asks_for_a_checkpoint_now(tmp_path: Path) -> None:
    settings = ["--checkpoint.interval=0", "--parallel.dp_shard=1", "--evaluate.interval=0"]
    assert pretrain(1, tmp_path, *settings, change=partial(touch_save, file=tmp_path / "save", at_step=3)) == [""]
    assert saved(tmp_path) == [8, 4]
    assert not (tmp_path / "save").exists()
