"""Processes that end with the one that started them. None of them imports torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launched import ends, is_running
from tests.patience import text_with
from torchllm.tools.launch.process_tree import PARENT, PARENT_PIPE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")

CHILD = """
import os, sys, time
from pathlib import Path
from torchllm.tools.launch.process_tree import end_with_parent
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.01)
end_with_parent()
Path(sys.argv[1], "ready").write_text(f"{sorted(name for name in os.environ if 'PARENT' in name)} {os.read(0, 1)}")
time.sleep(60)
"""
"""ties itself to its parent when there is a file in argv[1], and leaves one there when it has"""
PARENT_PROGRAM = """
import subprocess, sys, time
from torchllm.tools.launch.process_tree import tie_children
tie_children()
child = subprocess.Popen([*sys.argv[1:]])
print(child.pid, flush=True)
time.sleep(60)
"""
"""starts the command in argv, prints its process id, and waits"""
WRAPPER = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:])
print(process.pid, flush=True)
process.wait()
"""
"""runs a command and waits for it, as a profiler does"""


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Process ids, of which none is left after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def start_parent(command: list[str], started: list[int], lines: int = 1) -> "subprocess.Popen[str]":
    """Start a parent of `command`; note its process id and those that it and a wrapper print."""
    parent = subprocess.Popen(python(PARENT_PROGRAM, *command), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    started += [parent.pid, *(int(parent.stdout.readline()) for _ in range(lines))]
    return parent


def kill(parent: "subprocess.Popen[str]") -> None:
    parent.kill()
    parent.wait()
    assert parent.stdout is not None
    parent.stdout.close()


def test_a_process_ends_with_the_one_that_started_it_even_if_it_is_stuck(tmp_path: Path, started: list[int]) -> None:
    """And it passes nothing on to processes that it starts itself."""
    (tmp_path / "go").touch()
    parent = start_parent(python(CHILD, str(tmp_path)), started)
    assert text_with(tmp_path / "ready") == "[] b''"
    os.kill(started[-1], signal.SIGSTOP)  # its own program can do nothing now
    assert is_running(started[-1])
    kill(parent)
    assert ends(started[-1])


def test_a_process_whose_parent_has_ended_already_ends_at_once(tmp_path: Path, started: list[int]) -> None:
    parent = start_parent(python(CHILD, str(tmp_path)), started)
    kill(parent)
    (tmp_path / "go").touch()
    assert ends(started[-1])
    assert not (tmp_path / "ready").exists()


def test_a_process_behind_a_wrapper_lives_and_ends_with_the_launcher(tmp_path: Path, started: list[int]) -> None:
    """The kernel's signal is the wrapper's then; the pipe is the launcher's."""
    (tmp_path / "go").touch()
    parent = start_parent(python(WRAPPER, *python(CHILD, str(tmp_path))), started, lines=2)
    *_, child = started
    text_with(tmp_path / "ready")
    assert not ends(child, 0.2)
    kill(parent)
    assert ends(child)


def test_without_a_parent_that_says_so_nothing_changes(tmp_path: Path, started: list[int]) -> None:
    (tmp_path / "go").touch()
    environment = {name: value for name, value in os.environ.items() if name not in (PARENT, PARENT_PIPE)}
    command = ["sh", "-c", '"$@" >/dev/null & echo $!', "sh", *python(CHILD, str(tmp_path))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    started.append(int(done.stdout))
    text_with(tmp_path / "ready")
    assert not ends(started[-1], 0.3)
