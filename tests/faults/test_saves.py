"""Saves that a dying process leaves unfinished: every checkpoint is whole or not at all, whenever it dies."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.manifest import read_suspects
from torchllm.checkpoint.tensors import verify_in_parallel
from torchllm.train.step import Health

SAVES = 5
KEEP = 2
KILLED = 9
"""exit status of a process that has died at its operation"""
POINTS = 10
"""operations at which the saves die in the default tier; at night, at every operation"""
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")
"""audit events of operations that change files"""


class Death:
    """Ends the process at its n-th operation on files of a folder; what is not forced to disk by then is cut."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder = str(folder)
        self.at = at
        self.operations = 0
        self.fsync = os.fsync

    def begin(self) -> None:
        """Count from here on. A hook cannot be removed again: call it in a process of its own."""
        sys.addaudithook(self.hear)
        os.fsync = self.force

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            # Deleting a folder names its files relative to it.
            path = str(arguments[0])
            if path.startswith(self.folder) or not path.startswith("/"):
                self.count()

    def force(self, descriptor: int) -> None:
        self.count(descriptor)
        self.fsync(descriptor)

    def count(self, unforced: int | None = None) -> None:
        self.operations += 1
        if self.operations != self.at:
            return
        if unforced is not None and os.path.isfile(f"/proc/self/fd/{unforced}"):
            os.ftruncate(unforced, os.fstat(unforced).st_size // 2)
        os._exit(KILLED)


def open_run(folder: Path, asynchronous: bool) -> Checkpointer:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    settings = config.Checkpoint(keep=KEEP, asynchronous=asynchronous)
    return Checkpointer(settings, folder, [model], optimizer, evaluates=True)


def save_five_times(folder: Path, asynchronous: bool, death: Death, returned: Callable[[int], None]) -> None:
    """Save with an evaluation after each save, the fourth of which is not finite. `returned` is told what is saved."""
    saving = open_run(folder, asynchronous)
    saving.resume()
    death.begin()
    for step in range(1, SAVES + 1):
        saving.save(step, {"sequences": step})
        if not asynchronous:
            returned(step)
        loss = float("nan") if step == 4 else 1.0
        saving.judge(Health(step, skipped=0, validation_loss=loss, is_lost=False, problem=""))
    saving.close()
    returned(SAVES)


class Trial(NamedTuple):
    is_complete: bool
    """it has come to its end before its turn to die"""
    returned: int
    """the step whose save has returned last; 0: none"""
    operations: int
    """if it is complete"""


def die_at(operation: int, folder: Path, asynchronous: bool) -> Trial:
    """Save five times in a forked process that dies at an operation."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            death = Death(folder, operation)
            save_five_times(folder, asynchronous, death, lambda step: tell(writing, [step, death.operations]))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading) as pipe:
        lines = [json.loads(line) for line in pipe]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, KILLED)
    step, operations = lines[-1] if lines else (0, 0)
    return Trial(status == 0, step, operations)


def tell(pipe: int, message: list[int]) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")


def check_what_is_left(folder: Path, returned: int, asynchronous: bool) -> None:
    """Check the folder of a process that has died, and that the next one goes on from there."""
    folders = manifests.step_folders(folder / "checkpoints")
    for step_folder in folders:
        verify_in_parallel(None, step_folder)  # whole, or not there at all
    steps = [manifests.step_of(step_folder) for step_folder in folders]
    assert steps[:1] >= [returned] or returned == 0
    assert len(steps) >= min(returned, KEEP)  # deleting old ones cost none that counts
    suspects = read_suspects(folders)
    usable = [step for step, step_folder in zip(steps, folders, strict=True) if step_folder not in suspects]
    saving = open_run(folder, asynchronous)
    manifest = saving.resume()
    assert (manifest.step if manifest else None) == (usable[0] if usable else None)
    saving.save(SAVES + 1, {"sequences": SAVES + 1})
    saving.close()
    assert manifests.step_of(manifests.step_folders(folder / "checkpoints")[0]) == SAVES + 1
    assert manifests.hidden_folders(folder / "checkpoints") == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("points", [POINTS, pytest.param(None, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_dies_is_whole_or_not_there(tmp_path: Path, asynchronous: bool, points: int | None) -> None:
    whole = die_at(-1, tmp_path / "whole", asynchronous)
    assert whole.is_complete
    assert whole.returned == SAVES
    assert whole.operations > 50
    every = 1 if points is None else whole.operations // points
    for operation in range(1, whole.operations + 1, every):
        folder = tmp_path / str(operation)
        trial = die_at(operation, folder, asynchronous)
        assert not trial.is_complete
        check_what_is_left(folder, trial.returned, asynchronous)
        shutil.rmtree(folder)
