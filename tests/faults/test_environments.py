"""A run starts, and goes on, where little is set, as another user, and between nodes without IPv4."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launched import PATIENCE, SCRIPT, without_signs_of_life
from tests.namespaces import can_make_hosts, network
from tests.recipes.warm import pretrain
from tests.tiny_run import DEBUG, QUIET, ROOT, SMALL, changed, curve

pytestmark = pytest.mark.exhaustive

TINY = changed(SMALL, *QUIET, "--training.steps=4", "--evaluate.interval=0")
NOBODY = 65534
PROGRAMS = f"{os.path.dirname(shutil.which('python') or '')}:/usr/bin:/bin"
BARE = {"PATH": PROGRAMS} | {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
"""an environment that has nothing but programs; tests may run in a checkout that is not installed"""


def run(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run run_train.sh to its end, in the environment `env`."""
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=PATIENCE, **options)


def test_with_a_path_and_a_home_only_it_trains_and_goes_on_without_a_home_elsewhere(tmp_path: Path) -> None:
    """The working folder of the second start is another one, and its config has the paths of the first."""
    (tmp_path / "text").mkdir()
    for number in range(9):
        (tmp_path / f"text/{number}.txt").write_text(f"{number} is a number of many words, " * 99)
    data = ["--data.sources.0.kind=text", "--data.sources.0.path=text", "--data.cache=cache"]
    config = str(ROOT / DEBUG)
    environment = BARE | {"HOME": str(tmp_path / "home"), "NPROC": "1"}
    first = run(config, *TINY, *data, "--run.folder=run", cwd=tmp_path, env=environment)
    assert first.returncode == 0, first.stderr
    del environment["HOME"]
    config = str(tmp_path / "run/config.toml")
    second = run(config, "--training.steps=6", cwd="/", env=environment)
    assert second.returncode == 0, second.stderr
    assert f"resuming from {tmp_path}/run/checkpoints/step-00000004" in second.stderr
    assert "data.sources.0.path:" not in second.stderr  # it has not changed
    assert [step for step, *_ in curve(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert len(list((tmp_path / "cache").glob("text-*"))) == 1  # tokenized once


def test_in_a_container_of_a_slurm_job_without_its_commands_one_node_trains(tmp_path: Path) -> None:
    slurm = {"JOB_ID": "7", "JOB_NODELIST": "n[0-0]", "NNODES": "1", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    slurm |= {"NODEID": "0", "STEP_ID": "0", "STEP_NODELIST": "n0", "STEP_NUM_NODES": "1", "STEP_NUM_TASKS": "1"}
    slurm["TASKS_PER_NODE"] = "1"
    environment = BARE | {f"SLURM_{name}": value for name, value in slurm.items()} | {"NPROC": "1"}
    assert shutil.which("scontrol", path=PROGRAMS) is None
    done = run(DEBUG, *TINY, f"--run.folder={tmp_path}/run", cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(curve(tmp_path / "run")) == 4


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder of a user who is not the one of the tests, and whom nobody else lets read."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    try:
        subprocess.run([sys.executable, "-c", ""], user=NOBODY, check=True)
    except PermissionError:
        pytest.skip(f"another user may not run {sys.executable}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, NOBODY, NOBODY)
        folder.chmod(0o755)
        yield folder


def as_user(user: int, home: Path) -> dict[str, Any]:
    """Return options of `run` for a user whose new files only that user reads."""
    return {
        "user": user,
        "group": user,
        "extra_groups": [],
        "umask": 0o077,
        "cwd": "/",
        "env": BARE | {"HOME": str(home), "NPROC": "1"},
    }


def test_another_user_trains_and_goes_on_and_a_third_is_told_that_it_may_not_be_read(own_folder: Path) -> None:
    owner, third = as_user(NOBODY, own_folder), as_user(NOBODY - 1, Path("/nowhere"))
    run_folder = f"--run.folder={own_folder}/run"
    for steps in (4, 6):
        done = run(str(ROOT / DEBUG), *changed(TINY, f"--training.steps={steps}"), run_folder, **owner)
        assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert len(curve(own_folder / "run")) == 6
    config = f"{own_folder}/run/config.toml"
    python = shutil.which("python", path=PROGRAMS) or ""
    for command in (
        [python, f"{ROOT}/recipes/generate.py", config],
        [SCRIPT, config],
        [SCRIPT, str(ROOT / DEBUG), *TINY, run_folder],
    ):
        told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **third)
        assert told.returncode == 2, told.stderr
        [line] = without_signs_of_life(told.stderr).splitlines()
        assert str(own_folder / "run") in line


def test_two_nodes_without_ipv4_train_as_one_node_does(tmp_path: Path) -> None:
    if not can_make_hosts():
        pytest.skip("making namespaces needs root, unshare and ip")
    one, two = tmp_path / "one", tmp_path / "two"
    assert pretrain(2, one, "--training.steps=4", "--evaluate.interval=0") == ["", ""]
    with network(["first", "second"], tmp_path, version=6) as net:
        nodes = []
        for number, host in enumerate(net.hosts.values()):
            pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(number)}
            pod |= {"PET_MASTER_ADDR": net.hosts["first"].address, "PET_MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
            arguments = [SCRIPT, DEBUG, *TINY, f"--run.folder={two}"]
            with (tmp_path / host.name).open("wb") as output:
                nodes.append(host.start(*arguments, cwd=ROOT, env=BARE | pod, stdout=output, stderr=output))
        assert [node.wait(PATIENCE) for node in nodes] == [0, 0], (tmp_path / "first").read_text()
    assert curve(two) == curve(one)
