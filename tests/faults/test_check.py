"""What is wrong before the first step is found before processes start, or on all nodes alike."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.launched import PATIENCE, SCRIPT, clean, without_signs_of_life
from tests.tiny_run import DEBUG, ROOT, SMALL, free_port

QUICK = ["--metrics.tensorboard=false", "--generate.after_training=false", "--data.workers=0"]


def test_what_a_run_lacks_ends_it_before_a_process_is_started(tmp_path: Path) -> None:
    """Each lack has a case in tests/tools/front/test_preflight.py."""
    (tmp_path / "file").touch()
    arguments = ["--checkpoint.resume=/nowhere/step-00000004", f"--run.folder={tmp_path / 'file/run'}"]
    command = [SCRIPT, DEBUG, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=clean({}), capture_output=True, text=True)
    assert done.returncode == 2
    lines = without_signs_of_life(done.stderr).splitlines()
    assert "--checkpoint.resume: /nowhere/step-00000004: there is no such checkpoint folder" in lines
    assert any(line.startswith("--run.folder: ") for line in lines)
    assert len(lines) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.exhaustive
def test_nodes_with_different_configs_end_with_status_2_before_they_train(tmp_path: Path, trials: int) -> None:
    """Two nodes of one process, as Kubernetes starts them; the second has other keys."""
    for trial in range(trials):
        folder = tmp_path / str(trial)
        pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
        pod |= {"PET_MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        arguments = [*SMALL, *QUICK, f"--run.folder={folder}"]
        nodes = []
        for rank, own in enumerate([[], ["--optimizer.learning_rate=0.01", "--schedule.final_fraction=0.5"]]):
            command = [SCRIPT, DEBUG, *arguments, *own]
            environment = clean(pod | {"PET_NODE_RANK": str(rank)})
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True))
        said = [node.communicate(timeout=PATIENCE) for node in nodes]
        assert [node.returncode for node in nodes] == [2, 2], said
        lines = said[0][1].splitlines()
        assert lines[-3:] == [
            "error: the ranks did not start the same job: start every node with the same config, code and torch",
            "  optimizer.learning_rate: 0.003 on rank 0, 0.01 on rank 1",
            "  schedule.final_fraction: 0.0 on rank 0, 0.5 on rank 1",
        ]
        assert f"rank 1: {lines[-3]}" in said[1][1].splitlines()  # each node says why it ends
        assert not [line for _, err in said for line in err.splitlines() if "Traceback" in line or "terminate" in line]
        assert not os.path.exists(folder / "metrics.jsonl")
        assert not os.path.exists(folder / "config.toml")
