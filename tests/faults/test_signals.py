"""Signals to every process of a job, as `scancel` and Slurm's --signal send them, in each phase of a run."""

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launched import Started, without_signs_of_life
from tests.recipes.warm import pretrain
from tests.tiny_run import DEBUG, QUIET, SMALL, assert_same_run, changed

pytestmark = pytest.mark.exhaustive  # tests/recipes/test_pretrain.py has a signal on warm ranks

STOPPED = 75
STEPS = 40
CHANGED = [f"--training.steps={STEPS}", "--checkpoint.interval=5", "--evaluate.interval=20"]
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


@pytest.fixture
def job(start: Callable[..., Started], tmp_path: Path) -> Callable[..., Started]:
    settings = changed(SMALL, *QUIET, *CHANGED, "--data.workers=1", f"--run.stopped_exit_status={STOPPED}")
    settings.append(f"--run.folder={tmp_path / 'run'}")
    return lambda *arguments: start(DEBUG, *settings, *arguments, NPROC="2", OMP_NUM_THREADS="1")


def signal_all(run: Started, *numbers: signal.Signals) -> None:
    pids = list(run.processes())
    for number in numbers:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def ended(run: Started) -> int:
    """Return its exit status once all its processes have ended."""
    status = run.wait()
    run.until_gone()
    return status


def count(run: Started, word: str) -> int:
    """Return how many of its processes have a word in their command line."""
    return sum(word in command for command in run.processes().values())


def test_in_the_check_a_signal_ends_it_there(job: Callable[..., Started], tmp_path: Path, trials: int) -> None:
    for _, number in zip(range(trials), itertools.cycle(SIGNALS), strict=False):
        run = job()
        run.until(lambda run=run: count(run, " --check ") > 0)
        signal_all(run, number, number)
        assert ended(run) == 128 + number
        line = f"run_train.sh: ended by {number.name} before anything was started\n"
        assert without_signs_of_life(run.err.read_text()) == line
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("phase", "numbers"), [("import", SIGNALS), ("tokenization", SIGNALS[::-1])])
def test_in_the_start_up_a_signal_ends_it_there(
    job: Callable[..., Started], tmp_path: Path, trials: int, phase: str, numbers: tuple[signal.Signals, ...]
) -> None:
    texts, cache, folder = tmp_path / "texts.jsonl", tmp_path / "cache", tmp_path / "run"
    texts.write_text('{"text": "%s"}\n' % ("a line " * 40) * 300_000)  # seconds of work
    source = ["--data.sources.0.kind=jsonl", f"--data.sources.0.path={texts}", f"--data.cache={cache}"]

    def is_in_phase(run: Started) -> bool:
        # The launcher's command line names the recipe too.
        return count(run, "recipes/pretrain.py") == 3 if phase == "import" else any(cache.glob("*/*"))

    for _, number in zip(range(trials), itertools.cycle(numbers), strict=False):
        run = job(*source)
        run.until(lambda run=run: is_in_phase(run))
        signal_all(run, number, number)
        assert ended(run) == STOPPED, run.err.read_text()
        assert "stopped early, with no checkpoint: the next start begins at step 1; to continue" in run.out.read_text()
        assert (folder / "stopped.json").read_text() == '{"step": null}\n'
        assert "Traceback" not in run.err.read_text()
        assert not any((folder / "checkpoints").glob("*"))
        shutil.rmtree(cache, ignore_errors=True)


def test_in_training_and_saving_signals_save_and_the_resumed_run_is_the_same(
    job: Callable[..., Started], tmp_path: Path, trials: int
) -> None:
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "run"
    assert pretrain(2, undisturbed, *CHANGED) == ["", ""]
    for trial in range(trials):
        run = job()
        run.until(lambda run=run: run.out.read_text().count("gradient") >= 3)
        stop_with_a_checkpoint(run, *SIGNALS, *SIGNALS)
        earlier = set(folder.glob("checkpoints/*"))
        run = job()
        run.until(lambda earlier=earlier: not earlier.issuperset(folder.glob("checkpoints/*")))
        stop_with_a_checkpoint(run, *SIGNALS[:2])
        run = job()
        assert ended(run) == 0, run.err.read_text()
        assert_same_run(folder, undisturbed, STEPS)  # and no step twice
        folder.rename(tmp_path / str(trial))


def stop_with_a_checkpoint(run: Started, *numbers: signal.Signals) -> None:
    signal_all(run, *numbers)
    assert ended(run) == STOPPED, run.err.read_text()
    assert "stopped early, with a checkpoint" in run.out.read_text()
    assert "Traceback" not in run.err.read_text()
