import os
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.patience import patience, text_with
from tests.tiny_run import ROOT
from torchllm.config import Config, Run
from torchllm.tools.config.checks import problems
from torchllm.tools.launch import on_event
from torchllm.tools.launch.on_event import OUTPUT, call_at_end, call_on_event


def script(folder: Path, text: str) -> str:
    file = folder / "command.sh"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_it_gets_the_event_and_the_run_folder(tmp_path: Path) -> None:
    call_on_event(script(tmp_path, 'echo "$# $1 $2 $3"; echo oops >&2') + " 'to me'", "hang", tmp_path)
    assert text_with(tmp_path / OUTPUT, "oops") == f"3 to me hang {tmp_path}\noops\n"


def test_nobody_waits_for_it_and_it_outlives_its_caller(tmp_path: Path) -> None:
    command = script(tmp_path, f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo late")
    program = "import os, sys, pathlib; from torchllm.tools.launch.on_event import call_on_event\n"
    program += "call_on_event(sys.argv[1], 'hang', pathlib.Path(sys.argv[2])); os._exit(0)"
    caller = [sys.executable, "-c", program, command, str(tmp_path)]
    subprocess.run(caller, cwd=ROOT, check=True, start_new_session=True)
    assert not (tmp_path / OUTPUT).read_text()
    (tmp_path / "go").touch()
    assert text_with(tmp_path / OUTPUT, "late")


@pytest.mark.parametrize(("wait", "command", "said"), [(patience(20), "echo $1", "end\n"), (0.1, "sleep 600", "")])
def test_the_end_of_a_job_waits_for_it_for_a_moment(tmp_path: Path, wait: float, command: str, said: str) -> None:
    """A container ends with its job, and all that runs in it."""
    with mock.patch.object(on_event, "LAST_WAIT", wait):
        call_at_end(script(tmp_path, command), tmp_path)
    assert (tmp_path / OUTPUT).read_text() == said
    on_event._running.pop().terminate()


def test_it_is_ended_when_it_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_event, "LIMIT", 1)
    call_on_event(script(tmp_path, "echo began; sleep 60 & wait"), "nan", tmp_path)
    [process] = on_event._running
    assert process.wait(patience(20)) == 124  # as `timeout` says it


def test_those_that_have_ended_are_no_zombies(tmp_path: Path) -> None:
    command = script(tmp_path, "true")
    for _ in range(5):
        call_on_event(command, "nan", tmp_path)
        on_event._running[-1].wait(patience(20))
    assert len(on_event._running) == 1


def test_one_that_cannot_be_started_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = script(tmp_path, "true")
    os.chmod(command, 0o600)
    call_on_event("", "nan", tmp_path)  # none is set
    assert not caplog.messages
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))  # no `timeout` either
        call_on_event(command, "nan", tmp_path)
    [message] = caplog.messages
    assert message.startswith(f"run.on_event = {command!r}, called with nan: Permission denied; training goes on")


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_call(tmp_path: Path) -> None:
    note = tmp_path / "note"
    call_on_event(script(tmp_path, f"echo called >{note}"), "end", tmp_path / "missing")
    assert text_with(note, "called")


def test_a_command_that_cannot_work_is_found_before_the_start() -> None:
    for command, problem in [
        ("mail 'me", 'No closing quotation in "mail \'me"'),
        ("no-such-program --now", "'no-such-program' is no command here: give the path of an executable file"),
        ("sh -c 'true'", None),
        ("", None),
    ]:
        found = [
            problem.message for problem in problems(Config(run=Run(on_event=command)), 1) if "on_event" in problem.key
        ]
        assert found == ([] if problem is None else [problem]), command
