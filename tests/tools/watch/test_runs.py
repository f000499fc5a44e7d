"""The list of runs, and the state of each: of jobs that live, that have ended, and that were killed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_run import ROOT
from torchllm.config.schema import Config, Training
from torchllm.config.write import dump_toml
from torchllm.runtime.stop import write_marker
from torchllm.tools.launch.lease import DONE, Timing, release_leases
from torchllm.tools.launch.take_lease import take_lease
from torchllm.tools.watch.runs import TAIL, main, state_of_run

pytestmark = pytest.mark.quick

TAKER = """
import os, sys
from pathlib import Path
from torchllm.tools.launch.take_lease import take_lease

take_lease(Path(sys.argv[1]))
os._exit(0)  # as if it was killed: nothing is given back
"""


@pytest.fixture(autouse=True)
def _give_back() -> Iterator[None]:
    yield
    release_leases()


def write_run(folder: Path, step: int | None, loss: float | None = None, steps: int = 10) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_toml(Config(training=Training(steps=steps))))
    record = "" if step is None else json.dumps({"step": step, "loss": loss}) + "\n"
    (folder / "metrics.jsonl").write_text(record)
    return folder


def test_a_job_that_lives_is_running_until_it_is_silent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    take_lease(run)
    assert state_of_run(run) == "running"
    (file,) = (run / "lease").iterdir()
    silent = file.stat().st_mtime - Timing().limit - 1
    os.utime(file, (silent, silent))  # of a machine that was started anew, whose processes nobody can see
    assert state_of_run(run) == "failed"


def test_a_job_that_has_ended_is_finished_or_was_stopped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    take_lease(run).release(DONE)
    assert state_of_run(run) == "finished"
    write_marker(run, 3)
    assert state_of_run(run) == "stopped"
    take_lease(run)  # the run goes on
    assert state_of_run(run) == "running"


def test_a_job_that_gave_up_or_was_killed_has_failed(tmp_path: Path) -> None:
    gave_up, killed = write_run(tmp_path / "gave_up", 3), write_run(tmp_path / "killed", 10)
    take_lease(gave_up).release()
    assert state_of_run(gave_up) == "failed"
    subprocess.run([sys.executable, "-c", TAKER, str(killed)], cwd=ROOT, check=True)
    assert state_of_run(killed) == "failed"


def test_a_copy_without_a_lease_is_finished_after_its_last_step(tmp_path: Path) -> None:
    assert state_of_run(write_run(tmp_path / "whole", 10)) == "finished"
    assert state_of_run(write_run(tmp_path / "part", 9)) == "stopped"
    assert state_of_run(write_run(tmp_path / "new", None)) == "stopped"


def test_runs_are_found_at_any_depth_with_step_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "b", 1200, 2.5, steps=2000)
    write_run(tmp_path / "b" / "inside", 1)  # of a run, not a run
    write_run(tmp_path / "a" / "deep", 10, None)
    (tmp_path / "new" / "lease").mkdir(parents=True)  # a run that starts
    long = write_run(tmp_path / "long", 3) / "metrics.jsonl"
    long.write_text(json.dumps({"step": 1, "loss": 1.0, "more": "x" * TAIL}) + '\n{"step": 4, "loss": 1.5}\n{"step": 5')
    main([str(tmp_path)])
    lines = [line.removeprefix(f"{tmp_path}/").split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["run", "state", "step", "loss"],
        ["a/deep", "finished", "10", "of", "10", "–"],
        ["b", "stopped", "1,200", "of", "2,000", "2.5000"],
        ["long", "stopped", "4", "of", "10", "1.5000"],
        ["new", "stopped", "–", "–"],
    ]


@pytest.mark.parametrize(("name", "words"), [("", "no run folder in it"), ("absent", "no such folder")])
def test_a_folder_without_runs_is_refused(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main([str(tmp_path / name)])
    assert exit.value.code == 2
    assert words in capsys.readouterr().err
