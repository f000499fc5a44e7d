"""A node is lost: the job goes on with fewer nodes, and with all of them later, on the same batches.

Each node is a run_train.sh of its own on this host, with one rank. Losing it means that all its processes are killed.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launched import Started
from tests.recipes.warm import pretrain
from tests.tiny_run import DEBUG, SMALL, curve, free_port

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to find processes in")

STEPS = 30
CHANGED = [f"--training.steps={STEPS}", "--checkpoint.interval=5", "--evaluate.interval=15"]
CHANGED += ["--training.global_batch_size=12"]  # 6 microbatches: of 1, 2, 3 or 6 ranks
JOB = [word for word in SMALL if word.partition("=")[0] not in {word.partition("=")[0] for word in CHANGED}]
JOB += [*CHANGED, "--metrics.tensorboard=false", "--generate.after_training=false", "--data.workers=0"]
TOLERANCE = 1e-6
"""of losses, whose mean is summed in another order"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run on three ranks, without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pretrain(3, folder, *CHANGED) == ["", "", ""]
    return folder


def start_nodes(start: Callable[..., Started], nodes: int, folder: Path) -> list[Started]:
    """Start the job on that many nodes."""
    pod = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    pod |= {"PET_MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [start(DEBUG, *JOB, f"--run.folder={folder}", **pod, PET_NODE_RANK=str(node)) for node in range(nodes)]


def lose_node(nodes: list[Started], victim: int, folder: Path, checkpoint: int) -> None:
    """Kill everything of a node when a checkpoint is there; the job ends on all nodes."""
    nodes[0].until((folder / f"checkpoints/step-{checkpoint:08d}/manifest.json").exists)
    nodes[victim].kill_everything()
    statuses = [node.wait() for node in nodes]
    assert statuses == [-9 if node == victim else 1 for node in range(len(nodes))], nodes[0].err.read_text()


def seconds_until_a_step(node: Started) -> float:
    """Wait until a job has taken a step."""
    began = time.monotonic()
    node.until(lambda: f"/{STEPS}  loss" in node.out.read_text())
    return time.monotonic() - began


def resumed_step(node: Started) -> int:
    """Return the step of the checkpoint from which a job went on."""
    match = re.search(r"resuming from \S+: step (\d+)", node.err.read_text())
    assert match is not None, node.err.read_text()
    return int(match[1])


def test_a_lost_node_costs_the_steps_since_the_checkpoint_and_no_loss_differs(
    start: Callable[..., Started], undisturbed: Path, tmp_path: Path, trials: int
) -> None:
    """The first job has a fourth node, which waits, as 12 sequences are not shared by four."""
    for trial in range(trials):
        folder = tmp_path / str(trial)
        four = start_nodes(start, 4, folder)
        lose_node(four, trial % 3, folder, checkpoint=5)
        assert "node 3 waits for the end of the job: 4 nodes do not divide the batch of 12" in four[3].err.read_text()

        lost_at = time.monotonic()
        two = start_nodes(start, 2, folder)
        seconds_until_a_step(two[0])
        print(f"{time.monotonic() - lost_at:.1f} s from the loss of a node to the first step on two")
        assert 5 <= resumed_step(two[0]) <= 10
        lose_node(two, 1, folder, checkpoint=15)

        if trials == 1:  # without processes of its own
            assert pretrain(3, folder, *CHANGED) == ["", "", ""]
        else:
            four = start_nodes(start, 4, folder)
            if trial % 2:
                four[3].until(lambda spare=four[3]: "node 3 waits" in spare.err.read_text())
                four[3].kill_everything()  # costs nothing
            assert [node.wait() for node in four] == [0, 0, 0, -9 if trial % 2 else 0], four[0].err.read_text()
            assert resumed_step(four[0]) >= 15

        worst = 0.0
        for step, expected in zip(curve(folder), curve(undisturbed), strict=True):
            worst = max(worst, abs(step[1] - expected[1]), abs(step[5] - expected[5]))
            assert step[3:5] == expected[3:5]  # rate and tokens
        print(f"the worst difference of a loss is {worst:.2g}")
        assert worst < TOLERANCE
