"""An error of the system is one line with its cure."""

import errno
import os

import pytest

from torchllm.config.errors import UserError
from torchllm.config.files import read_regular
from torchllm.config.system_errors import describe_place, describe_system_error
from torchllm.tools.config.environment import system_errors_on_one_line

pytestmark = pytest.mark.quick


def test_an_error_of_the_system_has_a_cure_and_a_bug_has_none() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
    assert describe_system_error(full) == "[Errno 28] No space left on device: 'a file'; make room there"
    assert describe_system_error(FileNotFoundError("a file")) == "a file"
    assert "ulimit -v" in describe_system_error(MemoryError())
    assert "ulimit -u" in describe_system_error(RuntimeError("can't start new thread"))
    gloo = RuntimeError("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: lo")
    assert (
        describe_system_error(gloo) == "Unable to find address for: lo; start the loopback interface, ip link set lo up"
    )
    for bug in (ValueError("a bug"), RuntimeError("shapes differ"), UserError("no such key")):
        assert describe_system_error(bug) == ""


def test_such_an_error_in_a_start_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, system_errors_on_one_line():
        read_regular("/missing")
    assert ended.value.code == 1
    line = capsys.readouterr().err
    assert line.startswith("error: [Errno 2] No such file or directory: '/missing' (in open_regular, files.py:")
    assert line.count("\n") == 1
    with pytest.raises(ValueError, match="a bug"), system_errors_on_one_line():
        raise ValueError("a bug")
    assert describe_place(ValueError("of no line of torchllm")) == ""
