"""Bookkeeping never ends training: files that cannot be written, outputs without reader, sinks and commands that fail.

Each trial trains the debug run with one fault. Its losses and tensors are those of the undisturbed run, bitwise, and
what could not be written is written when it can be.
"""

import os
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launched import PATIENCE, SCRIPT, clean
from tests.recipes.warm import pretrain
from tests.tiny_run import DEBUG, QUIET, ROOT, SMALL, STEPS, assert_same_run, changed
from torchllm.tools.watch.launches import read_launches

ONE_RANK = "--parallel.dp_shard=1"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pretrain(1, folder, ONE_RANK) == [""]
    return folder


class Repair:
    """A change of the recipe: files that cannot be written are removed before a step."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.step = step

    def __call__(self, recipe: Any, rank: int) -> None:
        class RepairingStep(recipe.TrainStep):
            def __call__(step_, step: int, batches: Any) -> Any:
                if step == self.step:
                    (self.folder / "metrics.jsonl").rmdir()
                    (self.folder / "goodput.json").rmdir()
                    (self.folder / "tensorboard").unlink()
                return super().__call__(step, batches)

        recipe.TrainStep = RepairingStep


def test_records_that_cannot_be_written_come_back(undisturbed: Path, tmp_path: Path, trials: int) -> None:
    for trial in range(trials):
        folder = tmp_path / str(trial)
        (folder / "metrics.jsonl").mkdir(parents=True)
        (folder / "goodput.json").mkdir()
        (folder / "tensorboard").write_text("no folder")
        repair = Repair(folder, Random(trial).randint(2, STEPS))
        assert pretrain(1, folder, ONE_RANK, "--metrics.tensorboard=true", change=repair) == [""]
        assert_same_run(folder, undisturbed)
        points = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("at_a_glance/1_loss")
        assert [point.step for point in points] == list(range(1, STEPS + 1))
        [launch] = read_launches(folder / "goodput.json")
        assert launch.step == STEPS


@pytest.mark.exhaustive
def test_a_job_whose_output_nobody_reads_trains_to_its_end_and_says_so(undisturbed: Path, tmp_path: Path) -> None:
    """With the sample at the end that debug.toml asks for."""
    folder, notes = tmp_path / "run", tmp_path / "notes"
    settings = changed(SMALL, *QUIET, ONE_RANK, "--generate.after_training=true")
    command = [SCRIPT, DEBUG, *settings, f"--run.folder={folder}"]
    command.append(f"--run.on_event=sh -c 'echo $1 $2 >>{notes}' on_event")
    reading, output = os.pipe()
    os.close(reading)  # as `| head` does
    environment = clean({"NPROC": "1", "OMP_NUM_THREADS": "1"})
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    os.close(output)
    assert process.wait(PATIENCE) == 0
    assert_same_run(folder, undisturbed)
    assert notes.read_text() == f"end {folder}\n"
