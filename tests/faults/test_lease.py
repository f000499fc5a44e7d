"""Two jobs in one run folder: started at once, after a kill, and after one was suspended and taken for dead."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launched import Started, launcher_of
from tests.tiny_run import DEBUG, ENDLESS, metrics

pytestmark = [
    pytest.mark.exhaustive,  # tests/tools/launch/test_lease.py and test_rank_start.py have the rest
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to see processes in"),
]

QUICK_LEASE = """
import runpy, sys
from torchllm.tools.launch import take_lease as module
from torchllm.tools.launch.lease import Timing

take_lease = module.take_lease
module.take_lease = lambda folder: take_lease(folder, Timing(beat=0.1, limit=3.0, look=0.1))
sys.argv = ["recipes/pretrain.py", *sys.argv[2:]]
runpy.run_path("recipes/pretrain.py", run_name="__main__")
"""
"""runs a recipe in place of run_train.sh, which believes after 3 s that an owner is dead"""


def steps_of(folder: Path) -> list[int]:
    """Return the logged steps in metrics.jsonl; profiled ones have a second record, without a loss."""
    try:
        return [int(record["step"]) for record in metrics(folder) if "loss" in record]
    except (OSError, ValueError):  # it does not exist yet, or a line is being written
        return []


def wait_for_training(run: Started) -> None:
    run.until(lambda: "/100000  loss" in run.out.read_text())


def wait_for_end_of_one(runs: list[Started]) -> tuple[Started, Started]:
    """Wait until one of two runs has ended; return the one that goes on, then the one that has ended."""
    while True:
        for ended, running in (runs, reversed(runs)):
            with suppress(subprocess.TimeoutExpired):
                ended.process.wait(0.1)
                return running, ended


def stop(run: Started, folder: Path) -> None:
    """Stop a run with a checkpoint, and check that its metrics have each step once."""
    (folder / "stop").touch()
    assert run.wait() == 0, run.err.read_text()
    steps = steps_of(folder)
    assert steps == list(range(1, len(steps) + 1))
    assert (folder / f"checkpoints/step-{len(steps):08d}/manifest.json").exists()


def test_of_two_starts_one_is_refused_and_a_start_after_a_kill_goes_on(
    start: Callable[..., Started], tmp_path: Path, trials: int
) -> None:
    for trial in range(trials):
        folder = tmp_path / str(trial)
        arguments = [DEBUG, *ENDLESS, f"--run.folder={folder}"]
        owner, refused = wait_for_end_of_one([start(*arguments), start(*arguments)])
        errors = refused.err.read_text()
        assert refused.process.returncode == 2, errors
        launcher = launcher_of(owner.process.pid)
        assert f"belongs to another job, which is running: process {launcher} on " in errors.splitlines()[-1]
        assert "Traceback" not in errors
        wait_for_training(owner)

        os.kill(launcher, signal.SIGKILL)
        successor = start(*arguments)  # at once
        wait_for_training(successor)
        assert owner.wait() != 0
        assert "a sign of life" not in successor.err.read_text()  # it knows that the process is gone
        stop(successor, folder)


def test_a_job_that_was_suspended_and_taken_for_dead_writes_nothing_more(
    start: Callable[..., Started], tmp_path: Path, trials: int
) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(QUICK_LEASE)
    for trial in range(trials):
        folder = tmp_path / str(trial)
        arguments = [DEBUG, *ENDLESS, f"--run.folder={folder}"]
        suspended = start(*arguments, prefix=[sys.executable, str(driver)], WORLD_SIZE="1")
        wait_for_training(suspended)
        suspended.process.send_signal(signal.SIGSTOP)
        steps = len(steps_of(folder))

        successor = start(*arguments, prefix=[sys.executable, str(driver)], WORLD_SIZE="1")
        successor.until(lambda folder=folder, steps=steps: len(steps_of(folder)) > steps + 10)
        suspended.process.send_signal(signal.SIGCONT)
        assert suspended.wait() == 1
        errors = suspended.err.read_text()
        assert f"belongs to another job by now (process {successor.process.pid} on " in errors
        stop(successor, folder)
