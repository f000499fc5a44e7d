"""Hangs that no rank sees, for all are stuck alike or there is only one; and long saves, which are no hangs."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.launched import Started, children, launcher_of, start_nodes
from tests.patience import patience
from tests.tiny_run import DEBUG, ENDLESS, QUIET, ROOT, SMALL, assert_same_run, changed, curve

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(sys.platform != "linux", reason="a launcher looks into /proc"),
]

TIMEOUT = 2.0
END_WITHIN = patience(20.0)
"""seconds from the last step to the end of the job; on a busy machine the time-outs are the smallest part"""
RECIPE = """
import ctypes, os, sys, time
from pathlib import Path
from torchllm.tools.front.start import load_configs

if __name__ == "__main__":
    CONFIGS = load_configs(sys.argv[1:])

import torchllm.train.evaluate
from recipes import pretrain
from torchllm.checkpoint import checkpointer
from torchllm.train.step import TrainStep

def before(owner, name, number, deed):
    \"\"\"Do something before the call of this number of a function.\"\"\"
    function, calls = getattr(owner, name), []

    def changed(*arguments, **keywords):
        calls.append(name)
        if len(calls) == number:
            deed()
        return function(*arguments, **keywords)

    setattr(owner, name, changed)

def read_a_file_that_does_not_answer():
    open(FIFO).read()

def hold_the_gil():
    ctypes.PyDLL(None).sleep(600)

def sleep():
    time.sleep(600)

FAULT

if __name__ == "__main__":
    pretrain.main(*CONFIGS)
"""
"""the reference recipe with a fault"""


def with_fault(folder: Path, fault: str) -> dict[str, str]:
    """Return the environment of a run whose recipe does `fault` before it trains."""
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    recipe = folder / "recipe.py"
    recipe.write_text(RECIPE.replace("FAULT", fault).replace("FIFO", repr(str(fifo))))
    return {"RECIPE": str(recipe), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def limits(start: float = 90.0, step: float = TIMEOUT, save: float = 90.0) -> list[str]:
    return [f"--run.start_timeout={start}", f"--run.timeout={step}", f"--run.save_timeout={save}"]


def report_of(run: Started) -> list[str]:
    """Return the lines of the report with which a run has ended, which must be its last ones."""
    assert run.wait() == 1
    text = run.err.read_text()
    assert text.count("hang: ") == 1, text
    assert "Traceback" not in text
    return text[text.index("hang: ") :].splitlines()


def test_a_save_over_run_timeout_is_none_but_ranks_stuck_in_the_same_call_are(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    """The file that both ranks read does not answer, as on a network file system whose server is gone."""
    fault = f"""
before(checkpointer.manifests, "publish", 1, lambda: time.sleep({TIMEOUT + 1.5}))
before(pretrain, "read_health", 5, read_a_file_that_does_not_answer)
"""
    folder = tmp_path / "run"
    command = tmp_path / "note"
    command.write_text('#!/bin/sh\necho "$1" >>"$2/events"\n')
    command.chmod(0o755)
    options = [*QUIET, *limits(), f"--run.on_event={command}", f"--run.folder={folder}"]
    run = start(DEBUG, *SMALL, *options, NPROC="2", **with_fault(tmp_path, fault))
    lines = report_of(run)
    assert (folder / "checkpoints/step-00000004/manifest.json").exists()
    assert len(curve(folder)) == 5
    host = os.uname().nodename
    assert lines[0] == f"hang: no progress for over {TIMEOUT:g} s (run.timeout); ending the ranks of {host}"
    for rank in range(2):
        (since,) = (line for line in lines if line.startswith(f"  rank {rank} ({host}) has made no progress since "))
        assert since.endswith(": step, last sign of life: vote on stopping")
        place = f"  rank {rank}'s main thread is at {tmp_path}/recipe.py:"
        assert any(re.match(f"{place}[0-9]+ in read_a_file_that_does_not_answer$", line) for line in lines)
    (report,) = folder.glob("hang/*/*.txt")
    assert lines[-1] == f"  all stacks: {report}"
    assert sorted((folder / "events").read_text().split()) == ["end", "hang"]


def test_ranks_stuck_in_the_same_call_on_two_nodes_end_both(
    start: Callable[..., Started], tmp_path: Path, trials: int
) -> None:
    fault = with_fault(tmp_path, 'before(pretrain, "read_health", 5, read_a_file_that_does_not_answer)')
    nodes = start_nodes(start, tmp_path / "run", *SMALL, *QUIET, *limits(), "--run.restarts=0", **fault)
    assert [node.wait() for node in nodes] == [1, 1]
    texts = [node.err.read_text() for node in nodes]
    assert any("hang: no progress for over 2 s (run.timeout)" in text for text in texts)
    for node, text in enumerate(texts):
        told = f"rank {node}'s main thread is at {tmp_path}/recipe.py" in text
        assert told or f"error: node {1 - node} has ended the job; its output says why" in text


@pytest.mark.parametrize("victim", ["worker", "rank"])
def test_a_stopped_process_of_a_job_of_one_rank_ends_it(
    start: Callable[..., Started], tmp_path: Path, trials: int, victim: str
) -> None:
    for trial in range(trials):
        folder = tmp_path / f"run-{trial}"
        endless = changed(ENDLESS, "--checkpoint.interval=0", "--data.workers=1", *limits())
        run = start(DEBUG, *endless, f"--run.folder={folder}", NPROC="1")
        run.until(lambda run=run: "step      3/" in run.out.read_text())
        time.sleep(Random(trial).uniform(0, 1) if trials > 1 else 0)
        launcher = launcher_of(run.process.pid)
        (rank,) = children(launcher)
        (worker,) = children(rank)
        os.kill(worker if victim == "worker" else rank, signal.SIGSTOP)
        began = time.monotonic()
        text = "\n".join(report_of(run))
        assert time.monotonic() - began < END_WITHIN
        is_stopped = "is stopped (SIGSTOP, or a debugger)"
        if victim == "worker":
            assert ": step, last sign of life: data\n" in text
            assert re.search(r"rank 0's main thread is at torchllm/data/loader\.py:\d+ in ", text)
            assert f"process {worker}, started by rank 0, {is_stopped}" in text
        else:
            assert f"rank 0 {is_stopped}" in text


@pytest.mark.parametrize(
    ("fault", "ranks", "key", "place"),
    [
        ('before(pretrain, "read_health", 5, hold_the_gil)', 1, "run.timeout", "hold_the_gil"),
        ('before(checkpointer.manifests, "publish", 1, sleep)', 1, "run.save_timeout", "in sleep"),
        ('before(checkpointer.manifests, "publish", 1, sleep)', 2, "run.save_timeout", "in sleep"),
        ('before(torchllm.train.evaluate, "_evaluate", 2, sleep)', 1, "run.timeout", "in sleep"),
        ('before(TrainStep, "__call__", 1, sleep)', 1, "run.start_timeout", "in sleep"),
        ('before(pretrain, "build_loader", 1, sleep)', 2, "run.start_timeout", "in sleep"),
    ],
    ids=["gil", "save-1", "save-2", "evaluation", "first-step", "start-up"],
)
def test_a_hang_in_each_phase_ends_by_the_limit_of_that_phase(
    start: Callable[..., Started], tmp_path: Path, trials: int, fault: str, ranks: int, key: str, place: str
) -> None:
    tried = {
        "run.timeout": limits(),
        "run.save_timeout": limits(step=90.0, save=TIMEOUT),
        "run.start_timeout": limits(start=patience(8.0)),
    }
    options = [*QUIET, f"--run.folder={tmp_path / 'run'}", *tried[key]]
    run = start(DEBUG, *SMALL, *options, NPROC=str(ranks), **with_fault(tmp_path, fault))
    text = "\n".join(report_of(run))
    assert f"({key})" in text
    assert place in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_in_the_background_may_take_longer_than_run_timeout(
    start: Callable[..., Started], tmp_path: Path, trials: int, request: pytest.FixtureRequest, ranks: int
) -> None:
    fault = f'before(checkpointer.manifests, "publish", 1, lambda: time.sleep({2 * TIMEOUT + 5}))'
    folder = tmp_path / "run"
    options = [*QUIET, *limits(), "--checkpoint.asynchronous=true", f"--run.folder={folder}"]
    run = start(DEBUG, *SMALL, *options, NPROC=str(ranks), **with_fault(tmp_path, fault))
    assert run.wait() == 0, run.err.read_text()
    if ranks == 2:
        assert_same_run(folder, request.getfixturevalue("undisturbed"))
