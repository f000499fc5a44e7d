"""A spare node waits for the end of the job that trains without it."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_run import ROOT
from tests.tools.launch.test_lease import Clock, owner
from torchllm.tools.launch.lease import DONE, RELEASED, Owner
from torchllm.tools.launch.process_identity import this_process
from torchllm.tools.launch.spare_node import ASKED, COMPLETE, FAILED, wait_for_job

START_TIMEOUT = 900.0

OWNER = owner(**{**vars(this_process()), "boot": "another host's"}, job="7", count="0000000000")


class Waiting(Clock):
    """A spare node, and what happens while it waits."""

    def __init__(self, folder: Path) -> None:
        super().__init__(now=0.0)
        self.folder = folder
        self.request = folder / "request"
        (folder / "lease").mkdir()

    def own(self, count: str, number: int = 1, owner: Owner = OWNER) -> None:
        (self.folder / f"lease/{number:06d}").write_text(replace(owner, count=count).text())

    def at(self, moment: float, happens: Callable[[], object]) -> None:
        self.events[moment] = happens

    def status(self) -> int:
        """Return the exit status of the spare node; `now` is when it ended."""
        return wait_for_job(self.folder, self.request, START_TIMEOUT, self.timing())


@pytest.fixture
def waiting(tmp_path: Path) -> Waiting:
    return Waiting(tmp_path)


@pytest.mark.parametrize(("end", "status"), [(DONE, COMPLETE), (RELEASED, FAILED)])
def test_it_ends_as_the_job_does(waiting: Waiting, end: str, status: int) -> None:
    waiting.own(RELEASED)  # of an earlier job
    waiting.at(100, lambda: waiting.own("0000000000", 2))
    for beat in range(1, 100):
        waiting.at(100 + 10 * beat, lambda beat=beat: waiting.own(f"{beat:010d}", 2))
    waiting.at(1095, lambda: waiting.own(end, 2))
    assert waiting.status() == status
    assert waiting.now == 1095


def test_it_ends_as_a_job_that_was_asked_to_stop(waiting: Waiting) -> None:
    waiting.at(1, lambda: waiting.own("0000000001"))
    waiting.at(5, (waiting.folder / "stopped.json").touch)
    waiting.at(6, lambda: waiting.own(DONE))
    assert waiting.status() == ASKED


def test_a_job_that_is_started_again_at_once_goes_on(waiting: Waiting) -> None:
    waiting.own("0000000004")
    waiting.at(5, lambda: (waiting.own(RELEASED), waiting.own("0000000000", 2)))
    waiting.at(50, lambda: waiting.own(DONE, 2))
    assert waiting.status() == COMPLETE
    assert waiting.now == 50


def test_a_job_whose_node_is_lost_has_failed(waiting: Waiting, capsys: pytest.CaptureFixture[str]) -> None:
    waiting.own("0000000004")
    waiting.at(3, lambda: waiting.own("0000000005"))
    assert waiting.status() == FAILED
    assert waiting.now == 93
    assert "spare node: the job has given no sign of life for 90 s: job 7, process " in capsys.readouterr().err


def test_a_job_that_is_lost_before_its_first_sign_of_life_has_failed(waiting: Waiting) -> None:
    waiting.own("0000000000")  # unless it is an earlier job that was lost, whose folder is taken after 90 s
    assert waiting.status() == FAILED
    assert waiting.now == 180


def test_a_job_on_this_host_that_is_killed_has_failed_at_once(waiting: Waiting) -> None:
    process = subprocess.Popen(["sleep", "100"])
    started = int(Path(f"/proc/{process.pid}/stat").read_text().split()[21])
    waiting.own("0000000000", owner=replace(OWNER, boot=this_process().boot, pid=process.pid, started=started))
    waiting.at(3, lambda: (process.kill(), process.wait()))
    assert waiting.status() == FAILED
    assert waiting.now == 3


def test_a_job_that_does_not_begin_is_waited_for_as_long_as_its_launchers_wait(
    waiting: Waiting, capsys: pytest.CaptureFixture[str]
) -> None:
    assert waiting.status() == FAILED
    assert waiting.now == START_TIMEOUT
    assert f"spare node: no job has begun in {waiting.folder} for 900 s" in capsys.readouterr().err


def test_a_node_that_comes_after_the_end_is_done(waiting: Waiting) -> None:
    waiting.own(DONE)
    assert waiting.status() == COMPLETE
    (waiting.folder / "stopped.json").touch()
    assert waiting.status() == FAILED  # that job was to go on


def test_a_node_that_alone_is_asked_to_end_does(waiting: Waiting, capsys: pytest.CaptureFixture[str]) -> None:
    waiting.at(20, waiting.request.touch)
    assert waiting.status() == ASKED
    assert 30 <= waiting.now <= 31
    assert capsys.readouterr().err == "spare node: this node was asked to end; the job goes on without it\n"


def test_a_node_that_is_asked_to_end_before_a_job_has_begun_does(
    waiting: Waiting, capsys: pytest.CaptureFixture[str]
) -> None:
    (waiting.folder / "stop").touch()  # of other nodes that wait as well
    waiting.at(20, waiting.request.touch)
    assert waiting.status() == ASKED
    assert 30 <= waiting.now <= 31
    assert capsys.readouterr().err == "spare node: this node was asked to end; no job has begun\n"


def test_a_node_of_a_job_that_is_asked_to_stop_waits_for_its_end(waiting: Waiting) -> None:
    waiting.own("0000000004")
    waiting.at(20, waiting.request.touch)
    waiting.at(22, (waiting.folder / "stop").touch)
    for beat in range(3, 30):
        waiting.at(10 * beat, lambda beat=beat: waiting.own(f"{beat:010d}"))
    waiting.at(299, lambda: (waiting.own(DONE), (waiting.folder / "stopped.json").touch()))
    assert waiting.status() == ASKED
    assert waiting.now == 299


def test_the_exit_status_is_what_run_train_reads(waiting: Waiting) -> None:
    """And a scheduler, which starts again all that has not ended with 0."""
    command = [sys.executable, "-m", "torchllm.tools.launch.spare_node", str(waiting.folder), str(waiting.request), "0"]
    for end, status in ((DONE, 0), (RELEASED, 1)):
        waiting.own(end)
        assert subprocess.run(command, cwd=ROOT, env=os.environ).returncode == status
    assert ASKED == 3
    assert '[ "$status" != 3 ] || status=$stopped_exit_status' in (ROOT / "run_train.sh").read_text()
