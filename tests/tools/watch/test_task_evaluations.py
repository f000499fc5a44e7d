"""Evaluations that a run starts beside itself."""

import json
import logging
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.patience import patience
from torchllm.tools.watch import task_processes
from torchllm.tools.watch.task_processes import TaskProcesses

RECIPE = """\
import json, os, sys
step = sys.argv[2][-8:]
if "fail" in os.environ:
    sys.exit("no such task")
with open(os.path.join(os.path.dirname(sys.argv[1]), "evaluations", step + ".seen"), "w") as file:
    json.dump([sys.argv[2:], os.environ["CUDA_VISIBLE_DEVICES"], "RANK" in os.environ, os.nice(0)], file)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "evaluate.py").write_text(RECIPE)
    monkeypatch.setattr(task_processes, "resource", lambda name: tmp_path / "evaluate.py")
    monkeypatch.setenv("RANK", "0")
    folder = tmp_path / "a run"
    for step in (4, 8):
        publish(folder, step)
    return folder


def publish(folder: Path, step: int) -> None:
    (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    (folder / f"checkpoints/step-{step:08d}/manifest.json").touch()


def processes_of(folder: Path, start: int) -> TaskProcesses:
    """Return the processes of a run that evaluates every fourth step, and goes on from `start`."""
    processes = TaskProcesses(folder, 4)
    processes.begin(SimpleNamespace(start=start))  # type: ignore[arg-type]  # it reads no more
    return processes


def end_step(processes: TaskProcesses, step: int) -> None:
    with processes.step(step):
        pass


def finish(processes: TaskProcesses) -> None:
    assert processes.process is not None
    processes.process.wait(patience(60))


def test_a_checkpoint_that_is_due_is_evaluated_once(run: Path) -> None:
    processes = processes_of(run, 0)
    end_step(processes, 3)
    assert processes.process is None
    end_step(processes, 4)
    first = processes.process
    finish(processes)
    for step in (5, 6, 7):
        end_step(processes, step)
    assert processes.process is None
    (seen,) = (run / "evaluations").glob("*.seen")
    arguments = [f"--checkpoint.resume={run}/checkpoints/step-00000004", "--run.device=cpu"]
    assert json.loads(seen.read_text()) == [arguments, "", False, 19]
    assert first is not None
    end_step(processes, 8)
    finish(processes)
    assert len(list((run / "evaluations").glob("*.seen"))) == 2


def test_one_that_is_not_published_yet_is_waited_for(run: Path) -> None:
    processes = processes_of(run, 8)
    end_step(processes, 12)
    assert processes.process is None
    publish(run, 12)
    end_step(processes, 13)
    assert processes.process_step == 12
    finish(processes)


def test_one_is_skipped_while_another_runs_and_a_failure_ends_nothing(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("fail", "1")
    processes = processes_of(run, 0)
    with caplog.at_level(logging.INFO):
        end_step(processes, 4)
        running, processes.process = processes.process, None
        assert running is not None
        running.wait(patience(60))
        monkeypatch.setattr(running, "returncode", None)
        monkeypatch.setattr(running, "poll", lambda: running.returncode)
        processes.process = running
        end_step(processes, 8)
        words = [f"{run}/config.toml", f"--checkpoint.resume={run}/checkpoints/step-00000008"]
        command = f"python recipes/evaluate.py {shlex.join(words)}"
        assert f"evaluate.tasks: step 8 is skipped: step 4 is not done yet; later: {command}" in caplog.messages
        running.returncode = 1
        end_step(processes, 9)
    log_file = run / "evaluations/step-00000004.log"
    assert f"evaluate.tasks: step 4 failed: see {log_file}" in caplog.messages
    assert log_file.read_text() == "no such task\n"
    assert processes.process is None
