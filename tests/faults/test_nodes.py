"""A node is lost: the job goes on with fewer nodes, and with all of them later, on the same batches.

Each node is a run_train.sh of its own on this host, with one rank. Losing it means that all its processes are killed.
"""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launched import Started, start_nodes
from tests.recipes.warm import pretrain
from tests.tiny_run import QUIET, SMALL, assert_same_losses, changed

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to find processes in"),
]

STEPS = 30
CHANGED = [f"--training.steps={STEPS}", "--checkpoint.interval=5", "--evaluate.interval=15"]
CHANGED += ["--training.global_batch_size=12"]  # 6 microbatches: of 1, 2, 3 or 6 ranks
JOB = changed(SMALL, *QUIET, *CHANGED)


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
    match = re.search(r"resuming from \S+: step (\d+)", node.err.read_text())
    assert match is not None, node.err.read_text()
    return int(match[1])


def test_a_lost_node_costs_the_steps_since_the_checkpoint_and_no_loss_differs(
    start: Callable[..., Started], undisturbed: Path, tmp_path: Path, trials: int
) -> None:
    for trial in range(trials):
        folder = tmp_path / str(trial)
        nodes = start_nodes(start, folder, *JOB, nodes=3)
        lose_node(nodes, trial % 3, folder, checkpoint=5)

        nodes = start_nodes(start, folder, *JOB, nodes=2)
        nodes[0].until(lambda nodes=nodes: f"/{STEPS}  loss" in nodes[0].out.read_text())
        assert 5 <= resumed_step(nodes[0]) <= 10
        lose_node(nodes, 1, folder, checkpoint=15)

        nodes = start_nodes(start, folder, *JOB, nodes=3)
        assert [node.wait() for node in nodes] == [0, 0, 0], nodes[0].err.read_text()
        assert resumed_step(nodes[0]) >= 15
        assert_same_losses(folder, undisturbed)
