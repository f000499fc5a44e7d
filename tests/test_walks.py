"""The walks of docs/code_map.md: the files that a reader opens to follow a call through the library."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import workers
from tests.launched import clean
from tests.parity import Settings, build, tiny
from tests.recipes.warm import pretrain
from tests.tiny_run import DEBUG, ROOT
from tests.walks import files_entered, walk_of_the_map

Walks = dict[str, list[str]]


def traced(walks: Walks, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds the files of its first call to `walks`."""

    def call_and_note(*arguments: Any, **keywords: Any) -> Any:
        if name in walks:
            return call(*arguments, **keywords)
        results = []
        walks[name] = files_entered(lambda: results.append(call(*arguments, **keywords)))
        return results[0]

    return call_and_note


def trace_a_run(folder: Path, recipe: Any, rank: int) -> None:
    """Trace calls of recipes/pretrain.py, and write their files into the file walks when it saves."""
    walks: Walks = {}

    class Checkpointer(recipe.Checkpointer):  # type: ignore[misc]  # a module's
        def save(self, *arguments: Any) -> None:
            traced(walks, "save", super().save)(*arguments)
            (folder / "walks").write_text(json.dumps(walks))

    class TrainStep(recipe.TrainStep):  # type: ignore[misc]  # as above
        def __call__(self, *arguments: Any) -> Any:
            return traced(walks, "step", super().__call__)(*arguments)

    build = traced(walks, "build_loader", recipe.build_loader)

    def build_loader(*arguments: Any) -> Any:
        data = build(*arguments)
        data.next_step = traced(walks, "next_step", data.next_step)
        return data

    recipe.Checkpointer, recipe.TrainStep, recipe.build_loader = Checkpointer, TrainStep, build_loader


def walks_of_a_run(folder: Path) -> Walks:
    """Return the files that each call enters in a run of one rank on a text that it tokenizes."""
    (folder / "text.txt").write_text("There is no end of bees. " * 1000)
    config = folder / "text.toml"
    config.write_text(f'base = "{ROOT / DEBUG}"\n[[data.sources]]\nkind = "text"\npath = "{folder}/text.txt"\n')
    settings = ["--training.steps=1", "--schedule.warmup_steps=1", "--evaluate.interval=0"]
    settings.append(f"--data.cache={folder}/cache")
    assert pretrain(1, folder / "run", *settings, change=partial(trace_a_run, folder), config=config) == [""]
    walks: Walks = json.loads((folder / "walks").read_text())
    return walks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Walks:
    return walks_of_a_run(tmp_path_factory.mktemp("walks"))


@pytest.fixture(scope="module")
def checked() -> list[str]:
    """The files of the check of a run of two ranks, in a new process: this one may have read a config already."""
    command = [sys.executable, "-m", "tests.walks", DEBUG, "--parallel.tp=2"]
    done = subprocess.run(command, cwd=ROOT, env=clean({"NPROC": "2"}), capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.quick
def test_the_check_of_a_run_enters_18_files(checked: list[str]) -> None:
    assert len(checked) <= 18, checked


def test_a_key_is_followed_to_its_matrix_products_in_10_files(checked: list[str]) -> None:
    listed = walk_of_the_map("a key")
    assert len([*listed, "recipes/pretrain.py"]) <= 10
    assert set(listed) - {*checked, *workers.run(files_of_a_layout, 2, {"parallel.tp": 2})[0]} == set()


def files_of_a_layout(settings: Settings) -> list[str]:
    return files_entered(lambda: build(tiny(settings)))


def test_a_save_enters_12_files(run: Walks) -> None:
    listed = walk_of_the_map("a save")
    assert sorted(run["save"]) == sorted(listed)
    assert len(listed) <= 12


def test_a_step_and_a_document_pass_the_files_of_the_map(run: Walks) -> None:
    assert set(walk_of_the_map("a step")) - set(run["step"]) == set()
    assert set(walk_of_the_map("a document")) - {*run["build_loader"], *run["next_step"]} == set()
