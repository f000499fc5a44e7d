"""What a rank tells its launcher, and what that costs."""

import faulthandler
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from torchllm.runtime import heartbeat as module
from torchllm.runtime.heartbeat import (
    HEARTBEATS,
    START_TIMEOUT,
    Heartbeat,
    Timeout,
    Timeouts,
    beat,
    during,
    heartbeat,
)
from torchllm.tools.launch.rank_watch import read_beat

START, STEP, SAVE = Timeout(30.0, "run.start_timeout"), Timeout(10.0, "run.timeout"), Timeout(60.0, "run.save_timeout")


@pytest.fixture
def heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeat]:
    """The heartbeat of a rank that a launcher has started, in place of this process' own."""
    heart = Heartbeat()
    monkeypatch.setattr(module._Process, "heartbeat", heart)
    variables = {HEARTBEATS: str(tmp_path), "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    heart.open()
    heart.timeouts = Timeouts(START.seconds, STEP.seconds, SAVE.seconds)
    yield heart
    heart.close()


def test_a_launcher_reads_what_its_rank_does_and_how_long_it_may(heart: Heartbeat, tmp_path: Path) -> None:
    file = tmp_path / "rank-1"

    def doing() -> tuple[str, str, Timeout]:
        last = read_beat(file)
        assert last is not None
        assert (last.pid, last.rank, last.ranks_on_node) == (os.getpid(), 5, 4)
        return last.activity, last.part, last.timeout

    beat("data")
    assert doing() == ("start-up", "data", START)
    with during("evaluation"):
        assert doing() == ("evaluation", "", START)
    with during("save"):
        assert doing() == ("save", "", SAVE)
    heart.begin_steps()
    beat("optimizer")
    assert doing() == ("step", "optimizer", STEP)
    with during("evaluation"):
        beat("batch")
        assert doing() == ("evaluation", "batch", STEP)  # the first one has compiled
    with during("save"), during("save"):
        assert doing() == ("save", "", SAVE)
    assert doing() == ("step", "", STEP)
    heart.begin("start-up")  # with another model, which compiles again
    heart.begin_steps()
    with during("evaluation"):
        assert doing() == ("evaluation", "", START)
    heart.close()
    assert doing() == ("end", "", Timeout(math.inf, ""))


def test_before_the_config_is_read_the_limit_is_the_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEARTBEATS, str(tmp_path))
    monkeypatch.setenv(START_TIMEOUT, "7.5")
    heart = Heartbeat()
    heart.open()
    try:
        assert heart.timeout() == Timeout(7.5, "run.start_timeout")
        assert HEARTBEATS not in os.environ  # processes that it starts have no heart
    finally:
        heart.close()


def test_without_a_launcher_only_the_limits_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEATS, raising=False)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", None)
    heart = Heartbeat()
    heart.open()
    heart.timeouts = Timeouts(START.seconds, STEP.seconds, SAVE.seconds)
    heart.begin("step")
    assert heart.timeout() == STEP
    heart.close()


def test_a_beat_is_a_write_to_memory_whatever_their_number(
    heart: Heartbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No system call: time.monotonic is none on Linux. The timer is set anew once per second, not per beat."""
    timers = Counter[str]()
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: timers.update(["set"]))
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)
    beat("data")
    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            calls[argument.__name__] += 1
        elif event == "call":
            calls["python"] += 1

    beats = 1000
    sys.setprofile(count)
    for _ in range(beats):
        beat("data")
    sys.setprofile(None)
    calls.pop("setprofile", None)
    assert set(calls) <= {"python", "pack_into", "__new__"}
    assert calls.total() <= 12 * beats
    assert timers["set"] == 1
    stacks = tmp_path / "rank-1.stack"
    stacks.write_text("of a step that was only slow")
    monkeypatch.setattr(module.time, "monotonic", lambda: 102.0)
    beat("data")
    beat("optimizer")
    assert timers["set"] == 2
    assert stacks.read_text() == ""


def test_a_forked_process_does_not_beat_for_its_parent(heart: Heartbeat, tmp_path: Path) -> None:
    before = read_beat(tmp_path / "rank-1")
    child = os.fork()
    if child == 0:
        beat("worker")
        os._exit(int(heartbeat() is heart))
    assert os.waitpid(child, 0)[1] == 0
    assert read_beat(tmp_path / "rank-1") == before
    beat()
    assert read_beat(tmp_path / "rank-1") != before


def test_a_rank_without_a_beat_has_not_begun(tmp_path: Path) -> None:
    assert read_beat(tmp_path / "rank-0") is None
