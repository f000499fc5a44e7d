"""Signals to every process of a job, as `scancel` and Slurm's --signal send them, in each phase of a run."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from tests.launched import without_signs_of_life
from tests.patience import patience
from tests.recipes.warm import pretrain
from tests.tiny_run import DEBUG, ROOT, SMALL, curve, tensor_files

pytestmark = pytest.mark.exhaustive  # tests/recipes/test_pretrain.py has a signal on warm ranks

MARK = "TORCHLLM_TEST_JOB"
"""environment variable by which all processes of a job are found"""
STOPPED = 75
STEPS = 40
CHANGED = [f"--training.steps={STEPS}", "--checkpoint.interval=5", "--evaluate.interval=20"]
PATIENCE = patience(120)
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class Job:
    """run_train.sh in a session of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.identity = uuid4().hex
        self.output = folder.parent / f"{self.identity}.txt"
        self.earlier_checkpoints = set((folder / "checkpoints").glob("*"))
        changed = {word.partition("=")[0] for word in CHANGED}
        settings = [word for word in SMALL if word.partition("=")[0] not in changed] + CHANGED
        settings += ["--metrics.tensorboard=false", "--generate.after_training=false"]
        settings += [f"--run.folder={folder}", f"--run.stopped_exit_status={STOPPED}", *arguments]
        variables = {MARK: self.identity, "PYTHON": sys.executable, "NPROC": "2", "CUDA_VISIBLE_DEVICES": ""}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [str(ROOT / "run_train.sh"), DEBUG, *settings],
                env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text()

    def processes(self) -> dict[int, str]:
        """Return the command lines of its processes, by process id."""
        commands = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to somebody else
                if f"{MARK}={self.identity}".encode() in (process / "environ").read_bytes():
                    commands[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        return commands

    def count(self, word: str) -> int:
        """Return how many of its processes have a word in their command line."""
        return sum(word in command for command in self.processes().values())

    def until(self, happened: "Callable[[Job], object]") -> None:
        """Wait for something that happens while it runs."""
        deadline = time.monotonic() + PATIENCE
        while not happened(self):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def signal_all(self, *numbers: signal.Signals) -> None:
        pids = list(self.processes())
        for number in numbers:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def ended(self) -> int:
        """Return its exit status once all its processes have ended."""
        status = self.process.wait(PATIENCE)
        deadline = time.monotonic() + 30
        while alive := self.processes():
            assert time.monotonic() < deadline, alive
            time.sleep(0.1)
        return status


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs; whatever is left of them at the end of the test is killed."""
    jobs: list[Job] = []

    def start(*arguments: str) -> Job:
        jobs.append(Job(tmp_path / "run", *arguments))
        return jobs[-1]

    yield start
    for job in jobs:
        job.signal_all(signal.SIGKILL)
        job.process.wait()


def is_checked(job: Job) -> bool:
    """Whether the process that checks the config runs."""
    return job.count(" --check ") > 0


def is_importing(job: Job) -> bool:
    """Whether both ranks have been started; torchrun's command line names the recipe too."""
    return job.count("recipes/pretrain.py") == 3


def is_tokenizing(job: Job) -> bool:
    """Whether the corpus is being written."""
    return any((job.folder.parent / "cache").glob("*/*"))


def has_begun_to_save(job: Job) -> bool:
    """Whether it writes a checkpoint, or has just written one."""
    return not job.earlier_checkpoints.issuperset((job.folder / "checkpoints").glob("*"))


def has_taken_steps(job: Job) -> bool:
    """Whether it has logged three steps."""
    return job.text.count("gradient") >= 3


def test_in_the_check_a_signal_ends_it_there(start: Callable[..., Job], trials: int) -> None:
    for _, number in zip(range(trials), itertools.cycle(SIGNALS), strict=False):
        job = start()
        job.until(is_checked)
        job.signal_all(number, number)
        assert job.ended() == 128 + number
        assert without_signs_of_life(job.text) == f"run_train.sh: ended by {number.name} before anything was started\n"
        assert not job.folder.exists()


@pytest.mark.parametrize(("phase", "numbers"), [(is_importing, SIGNALS), (is_tokenizing, SIGNALS[::-1])])
def test_in_the_start_up_a_signal_ends_it_there(
    start: Callable[..., Job],
    tmp_path: Path,
    trials: int,
    phase: Callable[[Job], bool],
    numbers: tuple[signal.Signals, ...],
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "%s"}\n' % ("a line " * 40) * 300_000)  # seconds of work
    source = ("--data.sources.0.kind=jsonl", f"--data.sources.0.path={texts}", f"--data.cache={tmp_path / 'cache'}")
    for _, number in zip(range(trials), itertools.cycle(numbers), strict=False):
        job = start(*source)
        job.until(phase)
        job.signal_all(number, number)
        assert job.ended() == STOPPED, job.text
        assert "stopped early, before a step was taken; to continue, run the same command" in job.text
        assert (job.folder / "stopped.json").read_text() == '{"step": null}\n'
        assert "Traceback" not in job.text
        assert not any((job.folder / "checkpoints").glob("*"))
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    """The folder of the same run, without a fault."""
    assert pretrain(2, tmp_path / "undisturbed", *CHANGED) == ["", ""]
    return tmp_path / "undisturbed"


def test_in_training_and_saving_signals_save_and_the_resumed_run_is_the_same(
    start: Callable[..., Job], undisturbed: Path, tmp_path: Path, trials: int
) -> None:
    for _ in range(trials):
        for happened, numbers in ((has_taken_steps, (*SIGNALS, *SIGNALS)), (has_begun_to_save, SIGNALS[:2])):
            job = start()
            job.until(happened)
            job.signal_all(*numbers)
            assert job.ended() == STOPPED, job.text
            assert "stopped early, with a checkpoint" in job.text
            assert "Traceback" not in job.text
        job = start()
        assert job.ended() == 0, job.text
        assert curve(job.folder) == curve(undisturbed)  # bitwise, and no step twice
        assert tensor_files(job.folder, STEPS) == tensor_files(undisturbed, STEPS)
        job.folder.rename(tmp_path / job.identity)
