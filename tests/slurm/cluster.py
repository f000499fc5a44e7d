"""A Slurm cluster on one machine: a controller and three nodes, each a host in namespaces (tests/namespaces.py).

Debian's and Ubuntu's packages slurm-wlm and munge are enough. Nodes claim more processors and GPUs than there are.
Slurm's patience with a node that does not answer is 20 s instead of 300, and it looks for what to start every 5 s.
Other times, KillWait of 30 s among them, are its own.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.launched import clean
from tests.namespaces import Host, Network, can_make_hosts, network
from tests.tiny_run import ROOT

CONTROLLER = "head"
NODES = ["node1", "node2", "node3"]
PROGRAMS = ["slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel"]
SECONDS_TO_MISS_A_NODE = 20
PATIENCE = 300.0
"""seconds that anything may take"""
DAEMONS = ("munged", "slurmd", "slurmctld", "slurmstepd", "slurmstepd:")

CONFIG = """
ClusterName=torchllm
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
# After a requeue, Slurm waits until what it has signed for the first start is no longer valid: 120 s by default.
AuthInfo=cred_expire=10
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# A node is taken for what this file says, not for what its machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
SlurmdTimeout={missed}
SchedulerParameters=sched_interval=5,bf_interval=5
# A node that did not answer returns by itself, one that was set down does not.
ReturnToService=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs=4 Gres=gpu:2
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
GPUS = "Name=gpu File=/dev/null,/dev/zero\n"
"""gres.conf: any two device files will do, since Slurm only counts them"""

CGROUPS = "CgroupPlugin=cgroup/v1\n"
"""cgroup.conf: nothing here uses control groups, but slurmd looks for what it can use unless it is told"""


class State(NamedTuple):
    name: str
    """RUNNING, say"""
    restarts: int
    nodes: str


class SlurmCluster:
    """Slurm's commands, run on the controller, and what runs on the nodes."""

    def __init__(self, network: Network, folder: Path) -> None:
        """Start Slurm on the hosts. folder: shared by them, and nobody else may write there."""
        self.network = network
        self.folder = folder
        self.controller = network.hosts[CONTROLLER]
        self.environment = clean({}) | {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "controller").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        words = {"controller": CONTROLLER, "folder": folder, "missed": SECONDS_TO_MISS_A_NODE}
        (folder / "slurm.conf").write_text(CONFIG.format(nodes=",".join(NODES), **words))
        (folder / "gres.conf").write_text(GPUS)
        (folder / "cgroup.conf").write_text(CGROUPS)
        self._start_munge(self.controller)
        self._start_daemon(self.controller, "slurmctld")
        for name in NODES:
            self.start_node(name)
        self.until(lambda: self.idle_nodes() == NODES)

    def start_node(self, name: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        self._start_munge(self.network.hosts[name])
        self._start_daemon(self.network.hosts[name], "slurmd")

    def replace(self, name: str) -> None:
        """Make a lost node anew, and wait for Slurm to see it."""
        self.network.replace(name)
        self.start_node(name)
        self.until(lambda: name in self.idle_nodes())

    def _start_munge(self, host: Host) -> None:
        """Start the daemon by which Slurm's commands and daemons know each other; each host needs one of its own."""
        host.run("mkdir", "--mode=755", "/run/munge")
        files = ["--key-file", f"{self.folder}/munge.key", "--log-file", f"{self.folder}/munged.{host.name}.log"]
        files += ["--seed-file", "/run/munge/seed", "--pid-file", "/run/munge/munged.pid"]
        host.run("munged", "--force", *files, "--socket=/run/munge/munge.socket.2", env=self.environment)

    def _start_daemon(self, host: Host, program: str) -> None:
        with (self.folder / f"{program}.{host.name}.out").open("wb") as output:
            host.start(program, "-D", env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def run(self, *command: str, **variables: str) -> str:
        """Run a command of Slurm in the repository's folder; return what it prints. Raises CalledProcessError."""
        options = {"env": self.environment | variables, "stdin": subprocess.DEVNULL}
        return self.controller.run("env", f"--chdir={ROOT}", *command, **options)

    def idle_nodes(self) -> list[str]:
        """Return the nodes that could take a job now."""
        try:
            options = ["--noheader", "--Node", "--responding", "--partition=normal", "--format=%N %t"]
            states = [line.split() for line in self.run("sinfo", *options).splitlines()]
            # Not "drain", which --states=idle takes for idle.
            return [name for name, state in states if state == "idle"]
        except subprocess.CalledProcessError:  # slurmctld is starting
            return []

    def state(self, job: int) -> State:
        text = self.run("scontrol", "show", "job", str(job))
        fields = dict(re.findall(r"(\w+)=(\S*)", text))
        return State(fields["JobState"], int(fields["Restarts"]), fields["NodeList"])

    def processes(self) -> dict[str, list[str]]:
        """Return the command lines of what runs on each node, without Slurm's and munge's daemons."""
        running = {}
        for name in NODES:
            commands = self.network.hosts[name].processes().values()
            if jobs := [command for command in commands if Path(command.split()[0]).name not in DAEMONS]:
                running[name] = jobs
        return running

    def until(self, happened: Callable[[], object], seconds: float = PATIENCE) -> float:
        """Wait for something to happen; return the seconds that it took."""
        began = time.monotonic()
        while not happened():
            assert time.monotonic() < began + seconds, self.describe()
            time.sleep(0.2)
        return time.monotonic() - began

    def describe(self) -> str:
        parts = [self.run("sinfo", "--Node", "--long"), self.run("squeue"), str(self.processes())]
        outputs = sorted(self.folder.glob("*.txt"), key=lambda file: file.stat().st_mtime)  # of jobs
        for file in [self.folder / "slurmctld.log", *outputs[-1:]]:
            parts += [f"--- {file.name}", *(line[:200] for line in file.read_text().splitlines()[-40:])]
        return "\n".join(parts)

    def reset(self) -> None:
        for job in self.run("squeue", "--noheader", "--format=%A").split():
            self.run("bash", "-c", f"scancel --full --signal=KILL {job}; scancel {job}; true")
        self.run("scontrol", "update", "partition=normal", "gracetime=0")
        for name in NODES:
            if self.network.hosts[name].is_alive():
                self.network.join(name)
            else:
                self.replace(name)
        self.until(lambda: not self.run("squeue", "--noheader"))
        for name in NODES:  # Slurm refuses this for one that is idle
            self.run("bash", "-c", f"scontrol update nodename={name} state=resume 2>/dev/null; true")
        self.until(lambda: self.idle_nodes() == NODES)


def missing() -> str:
    """Return what this machine lacks for a cluster; "" if nothing."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no {', '.join(absent)}: install slurm-wlm and munge"
    return "" if can_make_hosts() else "making namespaces needs root, unshare and ip"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    with network([CONTROLLER, *NODES], folder) as made:
        yield SlurmCluster(made, folder)
