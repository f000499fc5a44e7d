"""Whether a process has ended is known only of processes of this machine, and never guessed."""

import os
import subprocess
import sys
from dataclasses import replace

from torchllm.tools.launch.process_identity import is_gone, process_status, this_process


def test_a_process_that_its_parent_has_not_asked_about_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    status = process_status(child.pid)
    assert status is not None
    process = replace(this_process(), pid=child.pid, started=status.started)
    assert status.state == "Z"
    assert is_gone(process)
    child.wait()


def test_who_is_gone() -> None:
    process = this_process()
    assert process.boot
    assert process.namespace
    assert not is_gone(process)
    assert is_gone(replace(process, started=process.started + 1))  # its id was given to another process
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    ended = replace(process, pid=child.pid)
    assert is_gone(ended)
    assert not is_gone(replace(ended, boot="another boot"))
    assert not is_gone(replace(ended, namespace="pid:[1]"))  # another container of this machine
    if os.geteuid() != 0:
        status = process_status(1)  # of another user
        assert status is not None
        assert not is_gone(replace(process, pid=1, started=status.started))
