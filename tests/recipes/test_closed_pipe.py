"""What prints help or a list ends quietly when the reader of its output goes away, as `| head -1` does."""

import os
import signal
import subprocess
import sys

import pytest

from tests.runtime.test_run_train import clean
from tests.tiny_run import DEBUG, ROOT

SWEEP = "train_configs/sweeps/debug.toml"
COMMANDS = [
    ["recipes/pretrain.py", "--help"],
    ["recipes/plan.py", "rank", "--help"],
    ["recipes/benchmark", "--help"],
    ["recipes/sweep", SWEEP, "--dry-run"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_it_ends_quietly(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # before anything is written
    environment = clean({"PYTHONPATH": str(ROOT)})
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == ""
    assert done.returncode in (0, -signal.SIGPIPE)


def test_a_run_says_all_of_its_help_to_a_reader_that_stays() -> None:
    command = [sys.executable, "recipes/pretrain.py", DEBUG, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=clean({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].strip()
    assert "  generate.top_k = 50" in done.stdout
