"""The account of a run's wall time."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from torchllm.metrics import goodput
from torchllm.metrics.goodput import FILE, LAUNCHED, Goodput, Launch, account, read


def test_of_one_launch() -> None:
    launch = Launch(1000.0, 0, seen=1100.0, step=50, lost={"start-up": 10.0, "data": 5.0, "checkpoint": 5.0})
    assert launch.productive == 80
    assert account([launch]) == (100.0, {"start-up": 10.0, "data": 5.0, "checkpoint": 5.0})


def test_a_restart_costs_the_time_between_and_the_steps_done_again() -> None:
    killed = Launch(1000.0, 0, seen=1100.0, step=40, lost={"start-up": 20.0})  # 2 s a step
    resumed = Launch(1130.0, 30, seen=1200.0, step=60, lost={"start-up": 10.0})
    wall, lost = account([killed, resumed])
    assert wall == 200
    assert lost == {"start-up": 30.0, "restart": pytest.approx(30 + 10 * 2)}


def test_it_is_kept_over_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHED, str(time.time() - 8.0))
    first = Goodput(tmp_path, 0)
    first.write(10, {})
    assert first.launch.lost["start-up"] == pytest.approx(8, abs=0.5)
    monkeypatch.setattr(goodput.time, "time", lambda: first.launch.seen + 100)
    monkeypatch.setenv(LAUNCHED, str(first.launch.seen + 90))
    second = Goodput(tmp_path, 10)
    second.write(None, {})
    assert [launch.first for launch in read(tmp_path / FILE)] == [0, 10]
    assert second.launch.step == 10
    # 8 s of start-up and, at once, ten steps; 90 s of nothing; 10 s of start-up
    assert second.summary() == "goodput 0.0% of 108 s; restart 83.3%, start-up 16.7%"


def test_what_is_damaged_stops_no_run(tmp_path: Path) -> None:
    for text in ("", "[", "7", '[{"started": 1}]', json.dumps([asdict(Launch(1.0, 0))])[:-9]):
        (tmp_path / FILE).write_text(text)
        assert read(tmp_path / FILE) == []
    assert read(tmp_path / "none") == []
