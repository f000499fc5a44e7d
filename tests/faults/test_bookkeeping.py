"""Bookkeeping never ends training: files that cannot be written, outputs without reader, sinks and commands that fail.

Each trial trains the debug run with one fault. Its losses and tensors are those of the undisturbed run, bitwise, and
what could not be written is written when it can be.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.faults.sampling import skip_unless_sampled
from tests.launched import PATIENCE, SCRIPT, clean
from tests.recipes.warm import pretrain
from tests.tiny_run import DEBUG, ROOT, SMALL, STEPS, curve, tensor_files
from torchllm.metrics.goodput import read_launches

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


class RepairedAt:
    """A change of the recipe: `file` cannot be written until a step."""

    def __init__(self, file: Path, step: int) -> None:
        self.file = file
        self.step = step

    def __call__(self, recipe: Any, rank: int) -> None:
        due = recipe.due
        is_repaired = False

        def repair_and_ask(step: int, interval: int, steps: int) -> bool:
            nonlocal is_repaired
            if step == self.step and not is_repaired:  # a recipe asks more than once per step
                is_repaired = True
                if self.file.is_dir():
                    self.file.rmdir()
                else:
                    self.file.unlink()
            return bool(due(step, interval, steps))

        recipe.due = repair_and_ask


def test_metrics_that_cannot_be_written_come_back(undisturbed: Path, tmp_path: Path, trials: int) -> None:
    for seed in range(trials):
        folder = tmp_path / str(seed)
        (folder / "metrics.jsonl").mkdir(parents=True)
        repair = RepairedAt(folder / "metrics.jsonl", Random(seed).randint(2, STEPS))
        assert pretrain(1, folder, ONE_RANK, change=repair) == [""]
        assert is_same_run(folder, undisturbed)


def test_tensorboard_that_cannot_be_written_comes_back(undisturbed: Path, tmp_path: Path, trials: int) -> None:
    for seed in range(trials):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "tensorboard").write_text("no folder")
        repair = RepairedAt(folder / "tensorboard", Random(seed).randint(2, STEPS))
        assert pretrain(1, folder, ONE_RANK, "--metrics.tensorboard=true", change=repair) == [""]
        assert is_same_run(folder, undisturbed)
        points = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("at_a_glance/1_loss")
        assert [point.step for point in points] == list(range(1, STEPS + 1))


def test_an_account_that_cannot_be_written_comes_back(undisturbed: Path, tmp_path: Path, trials: int) -> None:
    for seed in range(trials):
        folder = tmp_path / str(seed)
        (folder / "goodput.json").mkdir(parents=True)
        repair = RepairedAt(folder / "goodput.json", Random(seed).randint(2, STEPS))
        assert pretrain(1, folder, ONE_RANK, change=repair) == [""]
        assert is_same_run(folder, undisturbed)
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


@pytest.mark.parametrize("behaviour", COMMANDS)
def test_the_command_on_an_event_ends_nothing(undisturbed: Path, tmp_path: Path, behaviour: str) -> None:
    folder, notes, command = tmp_path / "run", tmp_path / "notes", tmp_path / "on event.sh"
    command.write_text("#!/bin/sh\n" + COMMANDS[behaviour].replace("NOTES", f"'{notes}'") + "\n")
    command.chmod(0o755)
    on_event = f"--run.on_event='{command}' --to me"
    assert pretrain(1, folder, ONE_RANK, on_event, change=_nan_at_step_3) == [""]
    assert is_same_run(folder, undisturbed)
    expected = [f"--to me nan {folder}"]  # once, not in each of six steps
    deadline = time.monotonic() + 10
    while not notes.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [line for line in notes.read_text().splitlines() if " nan " in line] == expected


def start(folder: Path, stdout: int, stderr: int) -> "subprocess.Popen[bytes]":
    """Start the run as a process of its own."""
    command = [sys.executable, "recipes/pretrain.py", DEBUG, *SMALL, *QUIET, f"--run.folder={folder}"]
    environment = clean({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr)


def full_device() -> int:
    """Open a file whose disk is full."""
    return os.open("/dev/full", os.O_WRONLY)


def pipe_without_reader() -> int:
    """Open a pipe whose reader has ended, as `| head` does."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("output", [full_device, pipe_without_reader])
def test_outputs_that_cannot_be_written_end_nothing(
    undisturbed: Path, tmp_path: Path, output: Callable[[], int]
) -> None:
    outputs = [output(), output()]
    process = start(tmp_path, *outputs)
    for descriptor in outputs:
        os.close(descriptor)
    assert process.wait(100) == 0
    assert is_same_run(tmp_path, undisturbed)


def test_a_job_whose_output_nobody_reads_trains_to_its_end_and_says_so(
    undisturbed: Path, tmp_path: Path, trials: int
) -> None:
    """As `./run_train.sh … 2>&1 | head`, with the sample at the end that debug.toml asks for."""
    skip_unless_sampled(trials)  # test_outputs_that_cannot_be_written_end_nothing has a rank of such a job
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
    log = tmp_path / "log"
    with open("/dev/full", "wb") as full, log.open("wb") as stderr:
        process = start(tmp_path / "run", full.fileno(), stderr.fileno())
        assert process.wait(100) == 0
    warnings = [line for line in log.read_text().splitlines() if "training goes on" in line]
    assert warnings == ["standard output (/dev/full): No space left on device; training goes on, and it is tried again"]
    assert is_same_run(tmp_path / "run", undisturbed)
