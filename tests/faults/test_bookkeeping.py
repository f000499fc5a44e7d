"""Bookkeeping never ends training: files that cannot be written, outputs without reader, sinks and commands that fail.

Each trial trains the debug run with one fault. Its losses and tensors are those of the undisturbed run, bitwise, and
what could not be written is written when it can be.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launched import PATIENCE, SCRIPT, clean
from tests.patience import patience
from tests.recipes.warm import pretrain
from tests.tiny_run import DEBUG, ROOT, SMALL, STEPS, curve, tensor_files
from torchllm.tools.watch.goodput import read_launches

ONE_RANK = "--parallel.dp_shard=1"
QUIET = [ONE_RANK, "--data.workers=0", "--metrics.tensorboard=false"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pretrain(1, folder, ONE_RANK) == [""]
    return folder


def is_same_run(folder: Path, undisturbed: Path) -> bool:
    """Whether the losses of all steps and the tensors of the last checkpoint are the same."""
    same_tensors = tensor_files(folder, STEPS) == tensor_files(undisturbed, STEPS)
    return same_tensors and curve(folder) == curve(undisturbed)


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
        assert is_same_run(folder, undisturbed)
        points = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("at_a_glance/1_loss")
        assert [point.step for point in points] == list(range(1, STEPS + 1))
        [launch] = read_launches(folder / "goodput.json")
        assert launch.step == STEPS


class BrokenSink:
    """A fork's sink whose server never answers."""

    def write(self, step: int, record: dict[str, float | None]) -> None:
        raise ConnectionError("no server")

    def close(self) -> None:
        raise RuntimeError("never connected")


def _add_broken_sink(recipe: Any, rank: int) -> None:
    train = recipe.train

    def train_with_sink(config: Any, runtime: Any, monitor: Any) -> None:
        begin = monitor.begin

        def begin_and_add(*arguments: Any) -> None:
            begin(*arguments)
            monitor.add_sink(BrokenSink())

        monitor.begin = begin_and_add
        train(config, runtime, monitor)

    recipe.train = train_with_sink


def test_a_sink_that_raises_ends_nothing(undisturbed: Path, tmp_path: Path) -> None:
    assert pretrain(1, tmp_path, ONE_RANK, change=_add_broken_sink) == [""]
    assert is_same_run(tmp_path, undisturbed)


def _nan_at_step_3(recipe: Any, rank: int) -> None:
    class Step(recipe.TrainStep):
        def __call__(self, step: int, batches: Any) -> Any:
            result = super().__call__(step, batches)
            return result._replace(skipped=result.skipped + (step >= 3))

    recipe.TrainStep = Step


COMMANDS = {
    "notes": 'echo "$@" >>NOTES; echo said',
    "fails": 'echo "$@" >>NOTES; exit 1',
    "hangs": 'echo "$@" >>NOTES; sleep 100',
    "is gone": 'echo "$@" >>NOTES; rm "$0"',
}


@pytest.mark.parametrize(
    "behavior",
    ["hangs", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("notes", "fails", "is gone"))],
)
def test_the_command_on_an_event_ends_nothing(undisturbed: Path, tmp_path: Path, behavior: str) -> None:
    folder, notes, command = tmp_path / "run", tmp_path / "notes", tmp_path / "on event.sh"
    command.write_text("#!/bin/sh\n" + COMMANDS[behavior].replace("NOTES", f"'{notes}'") + "\n")
    command.chmod(0o755)
    on_event = f"--run.on_event='{command}' --to me"
    assert pretrain(1, folder, ONE_RANK, on_event, change=_nan_at_step_3) == [""]
    assert is_same_run(folder, undisturbed)
    expected = [f"--to me nan {folder}"]  # once, not in each of six steps
    deadline = time.monotonic() + patience(10)
    while not notes.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [line for line in notes.read_text().splitlines() if " nan " in line] == expected


def pipe_without_reader() -> int:
    """Open a pipe whose reader has ended, as `| head` does."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.exhaustive
def test_a_job_whose_output_nobody_reads_trains_to_its_end_and_says_so(undisturbed: Path, tmp_path: Path) -> None:
    """As `./run_train.sh … 2>&1 | head`, with the sample at the end that debug.toml asks for."""
    folder, notes = tmp_path / "run", tmp_path / "notes"
    command = [SCRIPT, DEBUG, *SMALL, *QUIET, f"--run.folder={folder}"]
    command.append(f"--run.on_event=sh -c 'echo $1 $2 >>{notes}' on_event")
    output = pipe_without_reader()
    environment = clean({"NPROC": "1", "OMP_NUM_THREADS": "1"})
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    os.close(output)
    assert process.wait(PATIENCE) == 0
    assert is_same_run(folder, undisturbed)
    assert notes.read_text() == f"end {folder}\n"


def test_standard_output_that_is_full_is_named_once(undisturbed: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "recipes/pretrain.py", DEBUG, *SMALL, *QUIET, f"--run.folder={folder}"]
    environment = clean({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    with open("/dev/full", "wb") as full, log.open("wb") as stderr:
        process = subprocess.run(command, cwd=ROOT, env=environment, stdout=full, stderr=stderr, timeout=PATIENCE)
    assert process.returncode == 0
    warnings = [line for line in log.read_text().splitlines() if "training goes on" in line]
    assert warnings == ["standard output (/dev/full): No space left on device; training goes on, and it is tried again"]
    assert is_same_run(folder, undisturbed)
