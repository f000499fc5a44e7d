"""The account of a run's wall time."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from torchllm.config.environment import ATTEMPT, LAUNCHED
from torchllm.tools.watch import goodput
from torchllm.tools.watch.goodput import Goodput
from torchllm.tools.watch.launches import FILE, Launch, account, read_launches


def test_a_restart_costs_the_time_between_and_the_steps_done_again() -> None:
    killed = Launch(1000.0, 0, seen=1100.0, step=40, lost={"start-up": 20.0})  # 2 s per step
    resumed = Launch(1130.0, 30, seen=1200.0, step=60, lost={"start-up": 10.0}, is_restart=True)
    wall, lost = account([killed, resumed])
    assert wall == 200
    assert lost == {"start-up": 30.0, "restart": pytest.approx(30 + 10 * 2)}
    by_another_job = account([killed, replace(resumed, is_restart=False)])
    assert by_another_job == (200, {"start-up": 30.0, "restart": pytest.approx(20), "not running": 30.0})


def test_a_later_attempt_of_a_job_is_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTEMPT, raising=False)
    assert not Goodput(tmp_path).launch.is_restart
    monkeypatch.setenv(ATTEMPT, "2")
    assert Goodput(tmp_path).launch.is_restart


def test_the_time_after_a_finished_run_is_not_lost() -> None:
    finished = Launch(1000.0, 0, seen=1100.0, step=40, last=40)
    longer = Launch(9000.0, 40, seen=9100.0, step=80, last=80)
    assert account([finished, longer]) == (200.0, {"not running": 0.0, "restart": 0.0})
    killed = Launch(1000.0, 0, seen=1100.0, step=39, last=40)
    assert account([killed, longer])[1]["not running"] == pytest.approx(7900)


def test_steps_that_several_later_launches_undid_are_counted() -> None:
    """At 1 s per step: steps 51 ... 100 of the first launch and all ten of the second were done again."""
    launches = [
        Launch(1000.0, 0, seen=1100.0, step=100),
        Launch(1100.0, 100, seen=1110.0, step=110),
        Launch(1110.0, 50, seen=1180.0, step=120),
    ]
    wall, lost = account(launches)
    assert (wall, lost) == (180, {"not running": 0.0, "restart": 60.0})


def test_a_time_that_two_launches_share_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run_train.sh may know whole seconds only, and clocks of two nodes differ."""
    (tmp_path / FILE).write_text(json.dumps([asdict(Launch(1000.0, 0, seen=1100.75, step=50))]))
    monkeypatch.setattr(goodput, "time", SimpleNamespace(time=lambda: 1106.0, monotonic=lambda: 7.0))
    monkeypatch.setenv(LAUNCHED, "1100")
    resumed = Goodput(tmp_path)
    assert resumed.launch.started == 1100.75
    resumed.begin_steps(50)
    assert resumed.launch.lost == {"start-up": 5.25}


def test_a_line_that_a_power_cut_tore_loses_one_launch(tmp_path: Path) -> None:
    for first in (0, 10, 20):
        account_of_run = Goodput(tmp_path)
        account_of_run.begin_steps(first)
        account_of_run.write(first + 10)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-30])
    assert [launch.first for launch in read_launches(file)] == [0, 10]


def test_the_account_goes_on_over_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1008.0)
    monkeypatch.setattr(goodput, "time", SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now))
    monkeypatch.setenv(LAUNCHED, "1000")
    first = Goodput(tmp_path)
    first.begin_steps(0)
    clock.now = 1048.0
    first.spent("data", 4.0)
    first.write(10)
    assert first.launch.productive == 36
    clock.now = 1060.0  # another config from a checkpoint on
    first.begin_steps(10)
    clock.now = 1070.0
    first.write(15)
    assert first.launch.lost == {"start-up": 8.0, "data": 4.0, "rebuild": 12.0}
    assert first.summary() == "goodput 65.7% of 70 s; rebuild 17.1%, start-up 11.4%, data 5.7%"
    monkeypatch.setenv(LAUNCHED, "1090")
    clock.now = 1100.0
    second = Goodput(tmp_path)
    second.begin_steps(15)
    clock.now = 1170.0
    second.write(30)
    assert [launch.first for launch in read_launches(tmp_path / FILE)] == [0, 15]
    assert second.summary().startswith("goodput 68.2% of 170 s; not running 11.8%, start-up 10.6%")


def launches_at_random(seed: int) -> list[Launch]:
    """Some launches of one run, between which the clock may be set, and which go back to steps that they know."""
    random = Random(seed)
    launches: list[Launch] = []
    clock = 1000.0
    for _ in range(random.randint(1, 5)):
        saved = random.randint(0, launches[-1].step) if launches else 0
        seconds = random.choice([0.0, 1.0, 100.0]) * random.random()
        lost = {cause: seconds * random.random() / 2 for cause in ("start-up", "data")}
        step = saved + random.randint(0, 20)
        launches.append(Launch(clock, saved, seen=clock + seconds, step=step, lost=lost))
        clock += seconds + random.choice([-3600.0, 0.0, 50.0])
    return launches


def test_goodput_is_a_share() -> None:
    for seed in range(300):
        seconds, lost = account(launches_at_random(seed))
        assert min(lost.values()) >= 0
        assert 0 <= sum(lost.values()) <= seconds * (1 + 1e-9), seed


def test_a_clock_that_is_set_while_a_launch_runs_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=5.0)
    stand_in = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.monotonic)
    monkeypatch.setattr(goodput, "time", stand_in)
    monkeypatch.delenv(LAUNCHED, raising=False)
    account_of_run = Goodput(tmp_path)
    clock.now, clock.monotonic = 1000.0 - 3600, 15.0
    account_of_run.begin_steps(0)
    clock.now, clock.monotonic = 1000.0 + 36_000, 25.0
    account_of_run.write(10)
    assert account_of_run.summary() == "goodput 50.0% of 20 s; start-up 50.0%"


def test_a_damaged_file_stops_no_run(tmp_path: Path) -> None:
    for text in ("", "[", "7", '[{"started": 1}]', json.dumps([asdict(Launch(1.0, 0))])[:-9]):
        (tmp_path / FILE).write_text(text)
        assert read_launches(tmp_path / FILE) == []
    assert read_launches(tmp_path / "none") == []
