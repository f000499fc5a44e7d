"""A node is lost: the job goes on with fewer nodes, and with all of them later, on the same batches.

Each node is a run_train.sh of its own on this host, with one rank. Losing it means that all its processes are killed.
"""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launched import Started, start_nodes
from tests.recipes.warm import pretrain
from tests.tiny_run import QUIET, SMALL, changed, curve

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to find processes in"),
]

STEPS = 30
CHANGED = [f"--training.steps={STEPS}", "--checkpoint.interval=5", "--evaluate.interval=15"]
CHANGED += ["--training.global_batch_size=12"]  # 6 microbatches: of 1, 2, 3 or 6 ranks
JOB = changed(SMALL, *QUIET, *CHANGED)
TOLERANCE = 1e-6
"""of losses, whose mean is summed in another order"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run on three ranks, without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pretrain(3, folder, *CHANGED) == ["", "", ""]
    return folder


def lose_node(nodes: list[Started], victim: int, folder: Path, checkpoint: int) -> None:
    """Kill everything of a node when a checkpoint is there; the job ends on all nodes."""
    nodes[0].until((folder / f"checkpoints/step-{checkpoint:08d}/manifest.json").exists)
    nodes[victim].kill_everything()
    expected = [1] * len(nodes)
    expected[victim] = -signal.SIGKILL
    assert [node.wait() for node in nodes] == expected, nodes[0].err.read_text()


def resumed_step(node: Started) -> int:
    """Return the step of the checkpoint from which a job went on."""
    match = re.search(r"resuming from \S+: step (\d+)", node.err.read_text())
    assert match is not None, node.err.read_text()
    return int(match[1])


def lose_one_of_three(start: Callable[..., Started], folder: Path, victim: int) -> None:
    """Lose a node of a job that has a fourth one, which waits: 12 sequences are not shared by four."""
    nodes = start_nodes(start, folder, *JOB, nodes=4)
    lose_node(nodes, victim, folder, checkpoint=5)
    assert "node 3 waits for the end of the job: 4 nodes do not divide the batch of 12" in nodes[3].err.read_text()


def go_on_with_two_and_lose_one(start: Callable[..., Started], folder: Path) -> float:
    """Return the seconds until the smaller job has taken a step."""
    began = time.monotonic()
    nodes = start_nodes(start, folder, *JOB, nodes=2)
    nodes[0].until(lambda: f"/{STEPS}  loss" in nodes[0].out.read_text())
    seconds = time.monotonic() - began
    assert 5 <= resumed_step(nodes[0]) <= 10
    lose_node(nodes, 1, folder, checkpoint=15)
    return seconds


def finish_with_three(start: Callable[..., Started], folder: Path, kill_spare: bool) -> None:
    """Train to the end on three of four nodes; the one that waits may be killed meanwhile, which costs nothing."""
    nodes = start_nodes(start, folder, *JOB, nodes=4)
    expected = [0, 0, 0, 0]
    if kill_spare:
        nodes[3].until(lambda: "node 3 waits" in nodes[3].err.read_text())
        nodes[3].kill_everything()
        expected[3] = -signal.SIGKILL
    assert [node.wait() for node in nodes] == expected, nodes[0].err.read_text()
    assert resumed_step(nodes[0]) >= 15


def worst_difference(folder: Path, undisturbed: Path) -> float:
    """Return the largest difference of a loss from that of the undisturbed run, at any step."""
    worst = 0.0
    for step, expected in zip(curve(folder), curve(undisturbed), strict=True):
        worst = max(worst, abs(step[1] - expected[1]), abs(step[5] - expected[5]))
        assert step[3:5] == expected[3:5]  # rate and tokens
    return worst


def test_a_lost_node_costs_the_steps_since_the_checkpoint_and_no_loss_differs(
    start: Callable[..., Started], undisturbed: Path, tmp_path: Path, trials: int
) -> None:
    for trial in range(trials):
        folder = tmp_path / str(trial)
        lose_one_of_three(start, folder, victim=trial % 3)
        seconds = go_on_with_two_and_lose_one(start, folder)
        finish_with_three(start, folder, kill_spare=trial % 2 == 1)
        worst = worst_difference(folder, undisturbed)
        print(f"{seconds:.1f} s from the loss of a node to the first step on two; losses differ by {worst:.2g}")
        assert worst < TOLERANCE
