"""Damaged and wrong data: it is named and not trained on, and the run goes on from where it was once the data is whole.

A trial damages a file of a prepared corpus during a run, starts the run again with the file copied anew, and compares
with the undisturbed run: losses of all steps and tensors of the last checkpoint. Damage before a run, and in the cache:
tests/data/test_loader.py.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.recipes.warm import pretrain
from tests.tiny_run import STEPS, assert_same_run
from tests.tools.prepare.test_build import BYTES, plan_for
from torchllm.config import Source
from torchllm.data.shard import shard_path
from torchllm.runtime.process import STOP, STOPPED
from torchllm.tools.prepare.build import write_corpus

ONE_RANK = "--parallel.dp_shard=1"
Damage = Callable[[Path, Random], None]
"""what is done to a file"""


def flip_a_bit(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def write_an_unknown_id(path: Path, random: Random) -> None:
    with path.open("r+b") as file:
        file.seek(2 * random.randrange(1000))
        file.write(b"\xff\xff")


def truncate(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def remove(path: Path, random: Random) -> None:
    path.unlink()


def at_night(*values: Any) -> list[Any]:
    """Return the cases that are not of the default tier."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(100):
        (texts / f"{number}.txt").write_text(f"text {number} " * 60)
    source = Source(kind="text", path=f"{texts}/*.txt")
    write_corpus(plan_for(source, validation_fraction=0.1), BYTES, folder / "tokens")
    return folder / "tokens"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(folder / "run", corpus) == ""
    return folder / "run"


def train(folder: Path, corpus: Path, *settings: str, change: Any = None) -> str:
    """Train one rank on a corpus; returns its error, or ""."""
    source = ["--data.sources.0.kind=tokens", f"--data.sources.0.path={corpus}", f"--data.cache={folder.parent}/cache"]
    (error,) = pretrain(1, folder, ONE_RANK, *source, *settings, change=change)
    return error


class After:
    """A change of the recipe: after a step something happens. The run may look for changed files all the time."""

    def __init__(self, step: int, happen: Callable[[], None], waits_for_a_find: bool = False) -> None:
        self.step = step
        self.happen = happen
        self.waits_for_a_find = waits_for_a_find

    def __call__(self, recipe: Any, rank: int) -> None:
        build_loader = recipe.build_loader

        def build(*arguments: Any) -> Any:
            loader = build_loader(*arguments)
            if self.waits_for_a_find:
                loader._verification.seconds_between_checks = 0.01
            next_step = loader.next_step

            def happen_and_step() -> Any:
                if loader._steps == self.step:
                    self.happen()
                    end = time.monotonic() + 30 * self.waits_for_a_find
                    while loader._verification.problem is None and time.monotonic() < end:
                        time.sleep(0.01)
                return next_step()

            loader.next_step = happen_and_step
            return loader

        recipe.build_loader = build


def steps_of(paths: Iterable[Path]) -> list[int]:
    """The steps of step folders, or of files in them, ascending."""
    return sorted(int(re.findall(r"step-(\d+)", str(path))[0]) for path in paths)


@pytest.mark.parametrize("polls", [False, *at_night(True)])
@pytest.mark.parametrize("damage", [flip_a_bit, *at_night(write_an_unknown_id, truncate, remove)])
def test_damage_during_the_run_is_in_no_checkpoint(
    tmp_path: Path, corpus: Path, undisturbed: Path, damage: Damage, polls: bool, trials: int
) -> None:
    for trial in range(trials):
        copy = shutil.copytree(corpus, tmp_path / f"corpus-{trial}")
        shard = shard_path(copy, 0, "train")
        random = Random(trial)
        step = random.randrange(5, STEPS)
        run = tmp_path / str(trial) / "run"
        every_step = ["--checkpoint.interval=1", "--checkpoint.keep=0"]
        assert train(run, copy, *every_step, change=After(2, (run / STOP).touch)) == ""
        (run / STOPPED).unlink()
        saved = steps_of(run.glob("checkpoints/step-*"))
        assert saved[-1] == 4
        happen = partial(damage, shard, random)
        error = train(run, copy, *every_step, change=After(step, happen, waits_for_a_find=polls))
        assert error.startswith(f"{shard} ")
        assert steps_of(run.glob("checkpoints/step-*")) == [*saved, *range(5, step + 1)]
        assert not list(run.glob("checkpoints/*/suspect.json"))
        shutil.copyfile(shard_path(corpus, 0, "train"), shard)
        assert train(run, copy, *every_step) == ""
        assert_same_run(run, undisturbed)
