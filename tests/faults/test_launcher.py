"""Who can reach a job of one node, and what outlives a killed process."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from tests.launched import END_WITHIN, Started, children, launcher_of, start_nodes
from tests.listening import listening_addresses
from tests.tiny_run import DEBUG, ENDLESS, changed

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to find processes in"),
]

WITH_WORKERS = changed(ENDLESS, "--data.workers=1")


class Family(NamedTuple):
    script: int
    launcher: int
    ranks: list[int]
    workers: list[int]
    """of the ranks' data loaders"""


def family_of(run: Started) -> Family:
    launcher = launcher_of(run.process.pid)
    ranks = children(launcher)
    workers = [worker for rank in ranks for worker in children(rank)]
    return Family(run.process.pid, launcher, ranks, workers)


def has_ranks(run: Started) -> bool:
    return any(len(children(child)) == 2 for child in children(run.process.pid) if is_launcher(child))


def is_launcher(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return b"torchllm.tools.launch.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def is_training(run: Started) -> bool:
    return "step      2/" in run.out.read_text()


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
    run = start(DEBUG, *WITH_WORKERS, f"--run.folder={tmp_path / 'run'}", prefix=with_name_elsewhere(tmp_path))
    listening = set()

    def look() -> bool:
        for pid in run.processes():
            listening.update(listening_addresses(pid))
        return is_training(run)

    run.until(look)
    family = family_of(run)
    assert len(family.workers) == 2
    assert not listening_addresses(family.launcher)
    assert all(listening_addresses(rank) for rank in family.ranks)  # gloo's
    strangers = {listener for listener in listening if listener.address not in ("127.0.0.1", "::1")}
    assert not strangers
    run.process.kill()
    run.until_gone()


@pytest.mark.parametrize("moment", ["start-up", "training"])
@pytest.mark.parametrize("victim", ["script", "launcher", "rank"])
def test_nothing_outlives_a_killed_process(
    start: Callable[..., Started], tmp_path: Path, trials: int, victim: str, moment: str
) -> None:
    for trial in range(trials):
        run = start(DEBUG, *WITH_WORKERS, f"--run.folder={tmp_path / f'run-{trial}'}")
        run.until(lambda run=run: has_ranks(run) if moment == "start-up" else is_training(run))
        time.sleep(Random(trial).uniform(0, 2) if trials > 1 else 0)
        family = family_of(run)
        if moment == "training":
            assert len(family.workers) == 2
        pid = {"script": family.script, "launcher": family.launcher, "rank": family.ranks[1]}[victim]
        os.kill(pid, signal.SIGKILL)
        run.process.wait(END_WITHIN)
        output = run.err.read_text()
        assert not re.search(r"run_train\.sh: line \d", output)  # bash's own word on a killed process
        assert ("was killed, and all that it had started: SIGKILL" in output) == (victim == "launcher")
        run.until_gone()


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
    (tmp_path / "stuck.py").write_text(STUCK.replace("HANDLER", handler))
    nodes = start_nodes(start, tmp_path / "run", RECIPE=str(tmp_path / "stuck.py"))
    for node in nodes:
        node.until(lambda node=node: "stuck" in node.out.read_text())
    launcher = launcher_of(nodes[victim].process.pid)
    os.kill(launcher, signal.SIGKILL)
    for node in nodes:
        node.until_gone()
    assert [node.wait() for node in nodes][1 - victim] == 1
    assert nodes[1 - victim].err.read_text().splitlines()[-1].startswith(line), nodes[1 - victim].err.read_text()
