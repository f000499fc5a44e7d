"""recipes/pretrain.py under the real torchrun: a signal to it saves. docs/clusters.md says which need its flag."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import clean
from tests.tiny_run import DEBUG, ENDLESS, ROOT, free_port

FLAG = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1"
"""without it torchrun dies of SIGUSR1, and its ranks with it"""


@pytest.mark.exhaustive  # by default run_train.sh is sent signals: tests/runtime/test_run_train.py
@pytest.mark.parametrize(
    ("number", "flags"),
    [(signal.SIGHUP, []), (signal.SIGUSR1, [FLAG]), (signal.SIGTERM, []), (signal.SIGINT, [])],
    ids=["SIGHUP", "SIGUSR1", "SIGTERM", "SIGINT"],
)
def test_a_signal_to_torchrun_saves(tmp_path: Path, number: signal.Signals, flags: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command += [*flags, "recipes/pretrain.py", DEBUG, *ENDLESS, f"--run.folder={tmp_path / 'run'}"]
    environment = clean({"OMP_NUM_THREADS": "1"})
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **output) as torchrun:
        assert torchrun.stdout is not None
        lines = []
        for line in torchrun.stdout:
            lines.append(line)
            if re.match(r"step +2/", line):
                torchrun.send_signal(number)
    said = "".join(lines)
    assert f"{number.name}: saving at the next step boundary" in said
    assert "with nothing to save" not in said
    checkpoint = max((tmp_path / "run/checkpoints").iterdir())  # a slow machine has saved before
    assert (checkpoint / "manifest.json").exists()
    assert (tmp_path / "run/stopped.json").exists()


def test_the_page_names_the_flag() -> None:
    assert FLAG in (ROOT / "docs/clusters.md").read_text()
