"""Jobs whose launchers start all ranks again after one has died."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from tests import workers
from tests.launched import PATIENCE, Started, children, clean, ends, start_nodes
from tests.recipes.warm import pretrain
from tests.tiny_run import QUIET, ROOT, SMALL, assert_same_run, changed
from torchllm.tools.launch.restarts import PartEnding, newest_step
from torchllm.tools.watch.launches import account, read_launches

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to find ranks in")

QUICK = changed(SMALL, *QUIET, "--checkpoint.interval=2")


def kill_after_step_6(recipe: Any, rank: int) -> None:
    """Let a rank end as one that the kernel kills for its memory."""

    class KilledStep(recipe.TrainStep):
        def __call__(self, step: int, batches: Any) -> Any:
            result = super().__call__(step, batches)
            if step == 6 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

    recipe.TrainStep = KilledStep


def test_a_run_whose_rank_was_killed_is_the_same_run_when_it_goes_on(undisturbed: Path, tmp_path: Path) -> None:
    with pytest.raises(workers.WorkerFailed):
        pretrain(2, tmp_path, change=kill_after_step_6)
    for left_by_an_earlier_run in ("stopped.json", "stop"):
        (tmp_path / left_by_an_earlier_run).touch()
    assert pretrain(2, tmp_path) == ["", ""]
    assert_same_run(tmp_path, undisturbed)


def ranks_of(runs: list[Started]) -> list[int]:
    launchers = [child for run in runs for child in children(run.process.pid)]
    found = [rank for launcher in launchers for rank in children(launcher)]
    return [rank for rank in found if is_session_leader(rank)]


def is_session_leader(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def restarts_of(runs: list[Started]) -> list[str]:
    """Return the lines in which node 0 says that the job is started again."""
    return [line for line in runs[0].err.read_text().splitlines() if re.search(r"; restart \d+ of \d+ from ", line)]


def kill_a_rank(runs: list[Started], folder: Path, random: Random) -> bool:
    """Kill a rank at a random moment in the start-up or around a save; return False if the job is done before."""
    before = newest_step(folder)
    is_in_training = random.random() < 0.5
    while not ranks_of(runs) or (is_in_training and newest_step(folder) == before):
        if any(run.process.poll() is not None for run in runs):
            return False
        time.sleep(0.02)
    time.sleep(random.uniform(0, 0.5 if is_in_training else 6))
    ranks = ranks_of(runs)
    if not ranks:
        return False
    os.kill(random.choice(ranks), signal.SIGKILL)
    assert all(ends(rank, seconds=30) for rank in ranks)
    return True


@pytest.mark.exhaustive
def test_a_rank_killed_on_any_node_costs_only_time(
    start: Callable[..., Started], tmp_path: Path, trials: int, undisturbed: Path
) -> None:
    kills = 0
    while kills < trials:
        folder = tmp_path / f"run-{kills}"
        on_event = f"--run.on_event=sh -c 'echo $1 >>{folder}/events' on_event"
        runs = start_nodes(start, folder, *QUICK, "--run.restarts=1000", on_event)
        while kills < trials and kill_a_rank(runs, folder, Random(kills)):
            kills += 1
        assert [run.wait() for run in runs] == [0, 0], runs[0].err.read_text()
        lines = restarts_of(runs)
        killed = f" on {os.uname().nodename} was killed: SIGKILL; restart "
        assert all(killed in line for line in lines), lines
        assert_same_run(folder, undisturbed)
        if lines:
            assert (folder / "events").read_text().splitlines()[-2:] == ["restart", "end"]
        seconds, lost = account(read_launches(folder / "goodput.json"))
        assert 0 < sum(lost.values()) < seconds
    assert lines


FAULTY = f"""
import os, runpy, signal, sys, threading, time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

attempt, rank = int(os.environ.get("TORCHLLM_ATTEMPT", "1")), os.environ.get("RANK")
folder = [word.partition("=")[2] for word in sys.argv if word.startswith("--run.folder=")][-1]

def after_step_2(act):
    def wait():
        while not Path(folder, "checkpoints/step-00000002/manifest.json").exists():
            time.sleep(0.01)
        act()
    threading.Thread(target=wait, daemon=True).start()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def hang():
    os.kill(os.getpid(), signal.SIGSTOP)

if rank == "1":
    FAULT
sys.argv[0] = {str(ROOT / "recipes/pretrain.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""recipes/pretrain.py, in which something happens to rank 1"""


def run_with_fault(start: Callable[..., Started], folder: Path, fault: str, restarts: int) -> list[Started]:
    """Start a job of two nodes in which something happens to rank 1, on node 1."""
    recipe = folder.with_suffix(".py")
    recipe.write_text(FAULTY.replace("FAULT", fault))
    limits = ["--run.timeout=10", "--run.save_timeout=10"]  # step 2 is saved: rank 1 may still be in that save
    return start_nodes(start, folder, *QUICK, f"--run.restarts={restarts}", *limits, RECIPE=str(recipe))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "restarts"),
    [
        ("attempt == 1 and after_step_2(die) or attempt == 2 and time.sleep(3)", 1),
        ("attempt == 1 and after_step_2(die) or attempt == 2 and die()", 2),
        ("attempt == 1 and after_step_2(hang)", 1),
    ],
    ids=["rank-late-after-restart", "death-during-restart", "hang"],
)
def test_a_restart_in_which_something_happens_is_the_same_run(
    start: Callable[..., Started], tmp_path: Path, trials: int, undisturbed: Path, fault: str, restarts: int
) -> None:
    for trial in range(trials):
        folder = tmp_path / f"run-{trial}"
        runs = run_with_fault(start, folder, fault, 2)
        assert [run.wait() for run in runs] == [0, 0], runs[0].err.read_text()
        assert len(restarts_of(runs)) == restarts
        events = re.findall(
            r"^node 1 is .*: all 2 nodes have (joined|started again, attempt \d)", runs[1].err.read_text(), re.M
        )
        assert events == ["joined", *(f"started again, attempt {2 + number}" for number in range(restarts))]
        assert_same_run(folder, undisturbed)


SHORT = """
import os, sys, time
from torchllm.config.errors import RefusedStart, UserError
from torchllm.tools.launch import launcher_notes
from torchllm.runtime.error_report import report_errors
from torchllm.tools.launch.process_tree import end_with_parent
end_with_parent()
rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHLLM_ATTEMPT", "1"))
report_errors(rank, rank)
launcher_notes.join(rank)
if rank == 1:
    FAULT
time.sleep(60 if attempt < 4 else 0)
launcher_notes.leave(rank)
"""
"""ranks that do nothing for a minute, except for rank 1; the fourth attempt is done at once"""


class Outcome(NamedTuple):
    status: int
    lines: list[str]
    """of standard error"""


def outcome_of(folder: Path, fault: str, restarts: int) -> Outcome:
    recipe = folder / "short.py"
    recipe.write_text(SHORT.replace("FAULT", fault))
    command = [sys.executable, "-m", "torchllm.tools.launch.launch", f"--restarts={restarts}", f"--run-folder={folder}"]
    command += ["--nproc-per-node=2", str(recipe)]
    environment = clean({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    return Outcome(done.returncode, done.stderr.splitlines())


LEFT = PartEnding("left", 1).describe()
KILLED = "rank 1 was killed: SIGKILL"
IN_VAIN = "not restarted: 1 of 1 restarts (run.restarts) have made no progress"
SHORT_JOBS = {
    "restarted in vain": (
        "os._exit(0) if attempt == 1 else os.kill(os.getpid(), 9)",
        1,
        Outcome(1, [f"{LEFT}; restart 1 of 1 from the beginning", IN_VAIN, KILLED]),
    ),
    "restarted": (
        "os.kill(os.getpid(), 9) if attempt < 4 else None",
        3,
        Outcome(0, [f"{KILLED}; restart {number} of 3 from the beginning" for number in (1, 2, 3)]),
    ),
    "left": ("os._exit(0)", 0, Outcome(1, [LEFT])),
    "user error": ("raise UserError('of the user')", 3, Outcome(1, ["rank 1: error: of the user"])),
    "refused": ("raise RefusedStart('of the start')", 3, Outcome(2, ["rank 1: error: of the start"])),
    "status 2": ("sys.exit(2)", 3, Outcome(2, [])),
}
"""what happens to rank 1, the restarts that may be without progress, and what comes of it"""


@pytest.mark.parametrize(
    "name",
    ["restarted in vain", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(SHORT_JOBS)[1:])],
)
def test_only_what_may_pass_is_tried_again(tmp_path: Path, name: str) -> None:
    """An attempt that ends without an error is not taken for a run that is done."""
    fault, restarts, expected = SHORT_JOBS[name]
    assert outcome_of(tmp_path, fault, restarts) == expected
