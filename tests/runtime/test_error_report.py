"""Who prints an error that nothing has caught, how, and the exit status."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_run import ROOT, process_as_it_was
from torchllm.config.environment import RANK_NOTES
from torchllm.config.errors import RefusedStart, UserError
from torchllm.runtime import error_report
from torchllm.runtime.error_report import lost_connection, report_errors
from torchllm.tools.launch import launcher_notes


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(error_report, "_ending", error_report._Ending())
    with process_as_it_was():
        yield


def end_with(error: Exception, rank: int, local_rank: int) -> None:
    """Do what Python does at the end of a process with an uncaught error."""
    report_errors(rank, local_rank)
    sys.excepthook(type(error), error, None)


def test_errors_are_printed_once_and_bugs_name_their_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    end_with(UserError("no such file"), rank=0, local_rank=0)
    assert capsys.readouterr().err == "error: no such file\n"
    assert not slept
    # Rank 0 ends the job with the same error meanwhile; if it has none, the first rank of the node prints it.
    for rank, local_rank in ((8, 0), (9, 1)):
        end_with(UserError("no such file"), rank, local_rank)
        assert capsys.readouterr().err == f"rank {rank}: error: no such file\n"
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert 1 < slept[0] < slept[1] < 10
    end_with(RefusedStart("another learning rate"), rank=8, local_rank=0)  # its node may be the one that differs
    assert capsys.readouterr().err == "rank 8: error: another learning rate\n"
    assert len(slept) == 2
    end_with(ValueError("a bug"), rank=3, local_rank=3)
    assert capsys.readouterr().err == "rank 3: failed:\nValueError: a bug\n"


def test_the_launcher_hears_of_errors_that_would_come_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RANK_NOTES, str(tmp_path))
    error = UserError("the checkpoint cannot be read")
    error.__context__ = RuntimeError("Connection closed by peer")
    end_with(error, rank=0, local_rank=0)
    end_with(ValueError("a bug"), rank=0, local_rank=0)
    assert not launcher_notes.has_note("user_error")
    end_with(UserError("no such file"), rank=0, local_rank=0)
    assert launcher_notes.has_note("user_error")
    assert not launcher_notes.has_note("refused")
    end_with(RefusedStart("another learning rate"), rank=0, local_rank=0)
    assert launcher_notes.has_note("refused")


def test_only_rank_0_logs_information(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        report_errors(rank)
        logging.getLogger("torchllm").info("logged by %d", rank)
    assert capsys.readouterr().err == "logged by 0\n"


def after_another_error(text: str) -> ValueError:
    error = ValueError("while another error was handled")
    error.__context__ = RuntimeError(text)
    return error


def test_a_rank_that_has_lost_a_peer_lets_that_peer_speak_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for said in (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:43211",
        "[pair.cc:444] writev [127.0.0.1]:1234: Broken pipe",
        "NCCL error: remote process exited or there was a network error\nLast error:",
        "failed to recv, got 0 bytes",
    ):
        for rank in (0, 1):
            end_with(after_another_error(said), rank, local_rank=rank)
            (line,) = capsys.readouterr().err.splitlines()
            assert line.endswith(
                f"another rank, which had an error, or ended early without one: {said.splitlines()[0]}"
            )
    assert slept == [error_report.OTHERS_WAIT] * 8


def test_a_lost_worker_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for text, named in (
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that workers are", "Bus error"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "exited unexpectedly"),
    ):
        end_with(after_another_error(text), rank=0, local_rank=0)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: DataLoader worker (pid")
        assert f"{named}: most likely the machine has run out of memory: lower data.workers" in line


def test_an_error_of_the_system_is_one_line_once_per_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    full = OSError(28, "No space left on device", "run/config.toml")
    end_with(full, rank=0, local_rank=0)
    assert not slept
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'run/config.toml'; make room there\n"
    end_with(full, rank=1, local_rank=1)  # the launcher ends it meanwhile, if rank 0 has this error too
    assert slept == [error_report.OTHERS_WAIT]
    assert capsys.readouterr().err.startswith("rank 1: error: [Errno 28]")


def test_other_errors_are_no_lost_peers() -> None:
    assert not lost_connection(ConnectionResetError("Connection reset by peer"))  # of a download
    assert not lost_connection(RuntimeError("shape mismatch"))


ENDING = """
import threading
from torchllm.config.errors import RefusedStart
from torchllm.runtime.error_report import report_errors

class Aborts:
    def __del__(self):
        print("destructor")

def save():
    threading.main_thread().join()
    print("saved")

report_errors()
kept = Aborts()
threading.Thread(target=save).start()
raise RefusedStart("no")
"""


def test_a_process_with_an_error_ends_after_its_threads_without_destructors() -> None:
    """A save in the background is completed; torch's threads abort in their destructors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True)
    assert done.stdout == "saved\n"
    assert done.stderr == "error: no\n"
    assert done.returncode == 2
