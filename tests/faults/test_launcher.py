"""Who can reach a job of one node, and what outlives a killed process."""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launched import PATIENCE, Started, children, launcher_of, start_nodes
from tests.listening import listening_addresses
from tests.patience import patience
from tests.tiny_run import DEBUG, SMALL, curve, free_port
from torchllm.tools.launch.rendezvous import Rendezvous

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to find processes in"),
]

MARK = "TORCHLLM_FAULT_TEST"
"""environment variable that all processes of a run inherit"""
END_WITHIN = patience(30.0)
"""seconds in which all processes of a job are gone after one was killed"""
QUICK = ["--metrics.tensorboard=false", "--generate.after_training=false"]
CHANGED = ["--training.steps", "--evaluate.interval"]
ENDLESS = [word for word in SMALL if word.partition("=")[0] not in CHANGED]
ENDLESS += [*QUICK, "--training.steps=100000", "--evaluate.interval=0", "--data.workers=1"]
"""a run that is killed"""


class Family(NamedTuple):
    """Process ids of a run."""

    script: int
    launcher: int
    ranks: list[int]
    workers: list[int]
    """of the ranks' data loaders"""


def family_of(run: Started) -> Family:
    """Return the processes of a run whose ranks exist."""
    launcher = launcher_of(run.process.pid)
    ranks = children(launcher)
    workers = [worker for rank in ranks for worker in children(rank)]
    return Family(run.process.pid, launcher, ranks, workers)


def has_ranks(run: Started) -> bool:
    """Return whether the launcher has started both ranks."""
    return any(len(children(child)) == 2 for child in children(run.process.pid) if is_launcher(child))


def is_launcher(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return b"torchllm.tools.launch.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def is_training(run: Started) -> bool:
    """Return whether a second step is done."""
    return "step      2/" in run.out.read_text()


def running_with(mark: str) -> dict[int, str]:
    """Return the command of each process that has inherited a mark and is no zombie, by process id."""
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return commands


def seconds_until_gone(mark: str) -> float:
    """Wait until no process with a mark is left; return how long it took. Fails after `END_WITHIN`."""
    began = time.monotonic()
    while commands := running_with(mark):
        assert time.monotonic() - began < END_WITHIN, commands
        time.sleep(0.1)
    return time.monotonic() - began


def own_address() -> str | None:
    """Return an address of this host that other hosts reach; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def with_name_elsewhere(folder: Path) -> list[str]:
    """Return a command prefix under which the host's name is not loopback's; empty where the system does not let us."""
    address = own_address()
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
    prefix = ["unshare", "--mount", "sh", "-c", f'mount --bind "{hosts}" /etc/hosts && exec "$@"', "sh"]
    if address is None or not shutil.which("unshare"):
        return []
    return prefix if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0 else []


def test_a_run_on_one_node_listens_to_its_own_host_only_and_ends_with_its_script(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    mark = str(uuid.uuid4())
    run = start(DEBUG, *ENDLESS, f"--run.folder={folder}", prefix=with_name_elsewhere(tmp_path), **{MARK: mark})
    listening = set()

    def look() -> bool:
        for pid in descendants(run.process.pid):
            listening.update(listening_addresses(pid))
        return is_training(run)

    run.until(look)
    family = family_of(run)
    assert len(family.workers) == 2
    assert not listening_addresses(family.launcher)
    assert all(listening_addresses(rank) for rank in family.ranks)  # gloo's
    strangers = {listener for listener in listening if listener.address not in ("127.0.0.1", "::1")}
    assert not strangers
    os.kill(run.process.pid, signal.SIGKILL)
    seconds_until_gone(mark)


def descendants(pid: int) -> list[int]:
    """Return all processes that a process has started, directly or not."""
    pids = [pid]
    for parent in pids:
        pids += children(parent)
    return pids[1:]


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("script", "start-up"),
        ("script", "training"),
        ("launcher", "start-up"),
        ("launcher", "training"),
        ("rank", "start-up"),
        ("rank", "training"),
    ],
)
def test_nothing_outlives_a_killed_process(
    start: Callable[..., Started], tmp_path: Path, trials: int, victim: str, moment: str
) -> None:
    for trial in range(trials):
        mark = str(uuid.uuid4())
        run = start(DEBUG, *ENDLESS, f"--run.folder={tmp_path / f'run-{trial}'}", **{MARK: mark})
        run.until(lambda run=run: has_ranks(run) if moment == "start-up" else is_training(run))
        time.sleep(random.uniform(0, 2) if trials > 1 else 0)
        family = family_of(run)
        if moment == "training":
            assert len(family.workers) == 2
        pid = {"script": family.script, "launcher": family.launcher, "rank": family.ranks[1]}[victim]
        os.kill(pid, signal.SIGKILL)
        run.process.wait(END_WITHIN)
        seconds_until_gone(mark)


STUCK = """
import signal, sys, time
from torchllm.tools.config.load import load_config
load_config(sys.argv[1:])
from torchllm.tools.launch.process_tree import end_with_parent
end_with_parent()
signal.signal(signal.SIGTERM, signal.HANDLER)
print("stuck", flush=True)
time.sleep(600)
"""
"""a recipe whose ranks notice nothing, like ranks in a collective of NCCL whose peer is gone"""


@pytest.mark.parametrize(
    ("victim", "handler", "line"),
    [(0, "SIG_IGN", "error: node 0 has ended: "), (1, "SIG_DFL", "error: the launcher of node 1 was killed")],
)
def test_the_launchers_of_all_nodes_end_when_one_is_killed_whatever_their_ranks_do(
    start: Callable[..., Started], tmp_path: Path, trials: int, victim: int, handler: str, line: str
) -> None:
    mark = str(uuid.uuid4())
    (tmp_path / "stuck.py").write_text(STUCK.replace("HANDLER", handler))
    options = {"RECIPE": str(tmp_path / "stuck.py"), MARK: mark}
    nodes = start_nodes(start, tmp_path / "run", **options)
    for node in nodes:
        node.until(lambda node=node: "stuck" in node.out.read_text())
    launcher = launcher_of(nodes[victim].process.pid)
    os.kill(launcher, signal.SIGKILL)
    seconds_until_gone(mark)
    assert [node.wait() for node in nodes][1 - victim] == 1
    assert nodes[1 - victim].err.read_text().splitlines()[-1].startswith(line), nodes[1 - victim].err.read_text()


def test_ranks_that_do_not_react_are_killed_when_one_has_failed(
    start: Callable[..., Started], tmp_path: Path, trials: int
) -> None:
    mark = str(uuid.uuid4())
    (tmp_path / "stuck.py").write_text(STUCK.replace("HANDLER", "SIG_IGN"))
    run = start(DEBUG, f"--run.folder={tmp_path / 'run'}", RECIPE=str(tmp_path / "stuck.py"), **{MARK: mark})
    run.until(lambda: run.out.read_text().count("stuck") == 2)
    os.kill(family_of(run).ranks[1], signal.SIGKILL)
    assert seconds_until_gone(mark) < 20
    assert run.wait() == 1
    assert run.err.read_text().splitlines()[-1] == "rank 1 was killed: SIGKILL"


def test_a_node_that_is_lost_before_it_has_joined_is_named(start: Callable[..., Started], tmp_path: Path) -> None:
    port = free_port()
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}
    pod |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    head = start(DEBUG, f"--run.folder={tmp_path / 'run'}", **pod)
    joining = Rendezvous(2, 1, f"127.0.0.1:{port}", "none", start_timeout=PATIENCE)
    assert joining.connection is not None
    joining.connection.socket.close()  # what the kernel does for a killed launcher
    assert head.process.wait(END_WITHIN) == 1
    assert head.err.read_text().endswith("error: the launcher of node 1 was killed, or its node was shut down\n")


def test_tasks_of_one_gpu_each_heed_no_request_to_stop_an_earlier_job(
    start: Callable[..., Started], tmp_path: Path, undisturbed: Path
) -> None:
    """Slurm signals the tasks of a job in which one was killed, so that it leaves such a request."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "stop").touch()
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "scontrol").chmod(0o755)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    step["MASTER_PORT"] = str(free_port())
    step |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_NODEID": "0", "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    tasks = []
    for number in ("0", "1"):
        place = {"SLURM_PROCID": number, "SLURM_LOCALID": number}
        tasks.append(start(DEBUG, *SMALL, *QUICK, f"--run.folder={folder}", **step, **place))
    assert [task.wait() for task in tasks] == [0, 0], tasks[0].err.read_text()
    assert curve(folder) == curve(undisturbed)
