"""What prints help or a list ends quietly when the reader of its output goes away, as `| head -1` does.

That a reader who stays has all of it: tests/test_docs.py, by docs/settings.md.
"""

import os
import signal
import subprocess
import sys

import pytest

from tests.runtime.test_run_train import clean
from tests.tiny_run import ROOT

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
