"""A launcher's look at its ranks, which are small programs here: what is stalled is named, and ends."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launched import ends, is_running
from tests.patience import patience
from tests.tiny_run import ROOT
from torchllm.config.environment import START_TIMEOUT
from torchllm.runtime.heartbeat import HEARTBEATS
from torchllm.tools.launch import rank_watch
from torchllm.tools.launch.rank_watch import RankWatch, StalledRank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

LIMIT = 0.5
"""seconds that the ranks of the tests may go without a beat where they are stalled"""
RANK = """
import os, sys, threading, time
from torchllm.runtime import heartbeat
heartbeat.REARM_INTERVAL = 0.1
heart, beat, during = heartbeat.heartbeat(), heartbeat.beat, heartbeat.during
heart.open()
fifo = sys.argv[1]

def wait_beside():
    time.sleep(600)

threading.Thread(target=wait_beside, daemon=True).start()

def read_a_file_that_does_not_answer():
    open(fifo).read()

def wait_in_the_kernel():  # with the GIL held: the parent in a vfork, until its child has opened the file
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])

def be_stopped():
    os.kill(os.getpid(), 19)

"""
"""of a rank; what it does follows"""


class Node:
    """A launcher, which is this process, and its ranks."""

    def __init__(self, folder: Path) -> None:
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self.run_folder = folder / "run"
        self.ended = 0
        self.watch = RankWatch(run_folder=self.run_folder, end=self._end)
        self.ranks: list[subprocess.Popen[bytes]] = []

    def start(self, program: str, ranks_on_node: int = 1) -> "subprocess.Popen[bytes]":
        rank = len(self.ranks)
        variables = {"RANK": str(8 + rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks_on_node)}
        environment = os.environ | variables | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program, str(self.fifo)]
        self.ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return self.ranks[-1]

    def look_until(self, happened: Callable[[list[StalledRank]], object]) -> list[StalledRank]:
        """Look ten times per second until something has happened; return what is stalled."""
        deadline = time.monotonic() + patience(60)
        while not happened(stalled := self.watch.look(0.1)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return stalled

    def _end(self) -> None:
        self.ended += 1


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(rank_watch, "patience", lambda timeout: 0.3)
    monkeypatch.setenv(HEARTBEATS, "")
    node = Node(tmp_path)
    with node.watch.attempt(tmp_path / "heartbeats"):
        yield node
    for rank in node.ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)  # its stopped worker too
        rank.wait()
    os.close(os.open(node.fifo, os.O_RDWR))  # who waits for the other end goes on


def timeouts(start: float = 60.0, step: float = 60.0, save: float = 60.0) -> str:
    return f"heart.timeouts = heartbeat.Timeouts({start}, {step}, {save})\nheart.begin('start-up')\n"


@pytest.mark.parametrize(
    ("body", "waits", "key", "doing", "place", "state"),
    [
        (
            timeouts(step=LIMIT) + "heart.begin_steps()\nbeat('data')\nread_a_file_that_does_not_answer()",
            "S",
            "run.timeout",
            "step, last sign of life: data",
            "in read_a_file_that_does_not_answer",
            "",
        ),
        (
            timeouts(save=LIMIT) + "heart.begin_steps()\nwith during('save'): wait_in_the_kernel()",
            "D",
            "run.save_timeout",
            "save",
            "in wait_in_the_kernel",
            "rank 8 is in an uninterruptible call of the kernel, ",
        ),
        (
            timeouts(start=LIMIT) + "with during('load'): be_stopped()",
            "T",
            "run.start_timeout",
            "load",
            "",
            "rank 8 is stopped \\(SIGSTOP, or a debugger\\)",
        ),
    ],
    ids=["file", "kernel", "stopped"],
)
def test_a_stuck_rank_is_named_with_what_it_does_and_ends(
    node: Node, caplog: pytest.LogCaptureFixture, body: str, waits: str, key: str, doing: str, place: str, state: str
) -> None:
    """waits: letter of the state in which Linux has the rank, once it is where it is stalled."""
    rank = node.start(RANK + body)
    # Its own timer writes the stacks, a moment later on a busy machine.
    stalled = node.look_until(lambda stalled: stalled and state_of(rank.pid) == waits and place in stalled[0].stacks)
    assert [(one.beat.pid, one.beat.doing, one.beat.timeout) for one in stalled] == [(rank.pid, doing, (LIMIT, key))]
    assert stalled[0].idle > LIMIT + 0.3
    node.watch._end_ranks(stalled)
    assert rank.wait(patience(20)) == -signal.SIGKILL
    lines = "\n".join(caplog.messages).splitlines()
    host = os.uname().nodename
    assert lines[0] == f"hang: no progress for over 0.5 s ({key}); ending the ranks of {host}"
    assert lines[1].startswith(f"  rank 8 ({host}) has made no progress since ")
    assert lines[1].endswith(f": {doing}")
    found = [line for line in lines if place and line.startswith("  rank 8's main thread is at ")]
    assert [line.endswith(place) for line in found] == [True] * bool(place)
    assert any(re.match(f"  {state}", line) for line in lines if state) == bool(state)
    (report,) = node.run_folder.glob("hang/*/*.txt")
    assert lines[-1] == f"  all stacks: {report}"
    assert place in report.read_text()
    assert not node.ended


def state_of(pid: int) -> str:
    """Return the letter for a process's state: S for one that sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_that_gives_no_sign_of_life_at_all_is_ended_unless_it_computes(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be stalled while Python or torch is read from a file system that does not answer."""
    node.start(RANK + timeouts(start=600.0) + "time.sleep(60)", ranks_on_node=2)
    silent = node.start("import time\ntime.sleep(60)")
    ticks = [12]
    monkeypatch.setattr(rank_watch, "find_ranks", lambda: [rank.pid for rank in node.ranks])  # not pytest's others
    monkeypatch.setattr(rank_watch, "processor_ticks", lambda pid: ticks[0])
    node.look_until(lambda stalled: len(node.watch.watched) == 1)
    assert not node.watch.look(50.0)  # nobody has said how long that may take
    node.watch.start_timeout = 5.0
    for ticks[0] in (13, 14):
        assert not node.watch.look(6.0)
    stalled = node.watch.look(6.0)
    assert [(one.beat.pid, one.beat.doing) for one in stalled] == [(silent.pid, "start-up, before the config is read")]
    ticks[0] = 7  # of two
    with node.watch.attempt(tmp_path / "second"):
        assert not node.watch.look(1.0)  # though they have computed for as long as those before them
    node.watch._end_ranks(stalled)
    assert all(ends(rank.pid) for rank in node.ranks)
    assert f"process {silent.pid} ({os.uname().nodename}) has made no progress" in caplog.text


@pytest.mark.exhaustive
def test_a_rank_that_survives_sigkill_is_not_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One in an uninterruptible call: no program can make one, so SIGKILL does nothing here."""
    rank = node.start(RANK + timeouts(start=LIMIT) + "wait_in_the_kernel()")
    stalled = node.look_until(bool)
    monkeypatch.setattr(rank_watch, "SECONDS_TO_DIE", 0.2)
    monkeypatch.setattr(rank_watch.os, "kill", lambda pid, number: None)
    node.watch._end_ranks(stalled)
    monkeypatch.undo()
    assert node.ended == 1
    assert is_running(rank.pid)
    assert caplog.messages[-1].startswith(
        f"error: process {rank.pid} cannot be killed: is in an uninterruptible call of the kernel, "
    )


def test_ranks_that_report_a_hang_themselves_are_given_time(node: Node) -> None:
    """They know who waits for whom."""
    reporting = RANK + timeouts(start=LIMIT) + "heart.begin('hang report')\ntime.sleep(60)"
    node.start(RANK + timeouts(start=LIMIT) + "be_stopped()", ranks_on_node=2)
    node.start(reporting, ranks_on_node=2)

    def is_reporting(stalled: list[StalledRank]) -> bool:
        return {rank.value.activity for rank in node.watch.watched.values() if rank.value} == {
            "start-up",
            "hang report",
        }

    node.look_until(is_reporting)
    assert not node.watch.look(30.0)
    assert sorted(one.beat.name for one in node.watch.look(40.0)) == ["rank 8", "rank 9"]


def test_an_attempt_knows_nothing_of_the_ranks_before(node: Node, tmp_path: Path) -> None:
    node.start(RANK + timeouts(start=LIMIT) + "time.sleep(60)")
    node.look_until(bool)
    with node.watch.attempt(tmp_path / "second"):
        assert not node.watch.look(100.0)
        assert os.environ[HEARTBEATS] == str(tmp_path / "second")
    assert not node.watch.look(100.0)


def test_heartbeats_that_are_removed_end_no_watch(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.watch.folder is not None
    node.watch.folder.rmdir()
    assert node.watch.look(1.0) == node.watch.look(1.0) == []
    assert capsys.readouterr().err.count("hangs are no longer found here") == 1


def test_ranks_hear_of_the_limit_of_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_TIMEOUT, "")
    RankWatch(start_timeout=7.5)
    assert os.environ[START_TIMEOUT] == "7.5"


def test_heartbeats_are_in_memory_if_it_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "SHARED_MEMORY", tmp_path)
    assert rank_watch.memory_folder() == str(tmp_path)
    monkeypatch.setattr(rank_watch, "ROOM", 2**60)
    assert rank_watch.memory_folder() is None
    monkeypatch.setattr(rank_watch, "SHARED_MEMORY", tmp_path / "missing")
    assert rank_watch.memory_folder() is None


def test_heartbeats_are_elsewhere_where_the_memory_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(os, "statvfs", stale)
    assert rank_watch.memory_folder() is None
