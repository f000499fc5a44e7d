"""Which nodes and ranks a job has, by the variables of the scheduler or launcher that has started it. No torch.

    python -P -m torchllm.tools.launch.job      prints lines NAME=value for run_train.sh; exit status 2 after an error

A launcher that starts one process per node leaves the ranks of the node to run_train.sh. A process that it has started
per rank is that rank. Where the variables do not say enough, the job is refused with the variables to set: started
anyway, each of its processes would train alone.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchllm.config.errors import UserError
from torchllm.runtime.host_limits import usable_cores
from torchllm.tools.launch.compiler import count_gpus

DEFAULT_PORT = 29500
LAST_PORT = 2**16 - 1
SLURM_PORTS = 20000
"""the port of a Slurm job with a task per rank: this number plus the last digits of the job's number"""
FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""from here on the numbers of Slurm's steps are not of srun: 0xfffffffa is the shell that salloc opens on a node"""
COUNTS = (
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"),  # process managers; LSF's jsrun
    *("SKYPILOT_NUM_NODES", "LWS_GROUP_SIZE"),  # SkyPilot, Kubernetes' LeaderWorkerSet
    "NHOSTS",  # the batch script of Grid Engine
)
"""numbers of processes or nodes of a job, by launchers that do not say where node 0 is"""
ON_A_CPU = 2
"""ranks of a node without a GPU, unless NPROC says otherwise"""
PET = "PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT"
"""torchrun's own variables, which are read first"""

Variables = Mapping[str, str]


@dataclass(frozen=True)
class JobPlace:
    """The nodes of a job, and the place of this process."""

    nodes: str = "1"
    """how many; with --check also a range, such as 2-4"""
    node: int = 0
    """number of this node"""
    process: int = 0
    """number of this process among those that the launcher has started; 0 speaks for all"""
    head: str = ""
    """host name or address of node 0; "" in a job of one node"""
    port: int = DEFAULT_PORT
    """where node 0 listens; 0: it takes a free port and writes it into the run folder"""
    name: str = ""
    """a unique name of the job; "" if there is none"""
    ranks_per_node: str = ""
    """"" if the launcher does not say"""
    local_rank: int | None = None
    """number of this rank on its node, if the launcher has started one process per rank"""


def read_job(variables: Variables) -> JobPlace:
    """Return the job that this process belongs to. Raises UserError that says which variables to set."""
    given = {name: value for name, value in variables.items() if value}
    # mpirun starts its processes through Slurm's srun where it can, so its variables come before Slurm's.
    for read in (read_torchrun, read_open_mpi, read_hydra, read_slurm, read_rank_variables, read_sagemaker):
        job = read(given)
        if job is not None:
            return job
    refuse_unknown_launchers(given)
    return JobPlace(nodes=given.get("NNODES", "1"))


def read_torchrun(variables: Variables) -> JobPlace | None:
    """Read the variables that Kubernetes operators and users set to configure torchrun on each node."""
    nodes = variables.get("PET_NNODES")
    if not nodes:
        return None
    if not re.fullmatch("[1-9][0-9]*", nodes):
        raise UserError(f"PET_NNODES={nodes}: must be a fixed number of nodes")
    restarts = variables.get("PET_MAX_RESTARTS", "0")
    if restarts != "0":
        raise UserError(f"PET_MAX_RESTARTS={restarts}: set run.restarts instead")
    ranks = variables.get("PET_NPROC_PER_NODE", "auto")
    if nodes != "1" and "PET_MASTER_ADDR" in variables and "PET_NODE_RANK" not in variables:
        raise UserError(f"PET_NNODES={nodes} without PET_NODE_RANK: set it to 0 on one node, 1 on the next")
    node = _rank(variables, "PET_NODE_RANK", int(nodes), "node")
    return JobPlace(
        nodes=nodes,
        node=node,
        process=node,
        head=_host(variables.get("PET_MASTER_ADDR", "")),
        port=read_port(variables, "PET_MASTER_PORT", DEFAULT_PORT),
        ranks_per_node="" if ranks in ("auto", "gpu", "cpu") else ranks,
    )


def read_slurm(variables: Variables) -> JobPlace | None:
    """Read the variables of a Slurm step: the job may have more nodes than the step that runs here."""
    if int(variables.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP)) >= FIRST_SPECIAL_STEP:
        nodes = variables.get("SLURM_NNODES", "1")
        if nodes != "1":
            raise UserError(
                f"this is Slurm's batch script, or the shell of salloc, which runs on only one of {nodes} nodes: use "
                "srun ./run_train.sh"
            )
        return None
    job = variables["SLURM_JOB_ID"]
    nodes, tasks = variables["SLURM_STEP_NUM_NODES"], variables["SLURM_STEP_NUM_TASKS"]
    node = int(variables["SLURM_NODEID"])
    found = JobPlace(
        nodes=nodes,
        node=node,
        process=node,
        head=_host(variables.get("MASTER_ADDR") or first_host(variables["SLURM_STEP_NODELIST"])),
        port=read_port(variables, "MASTER_PORT", 0),
        name=f"{job}.{variables['SLURM_STEP_ID']}.{variables.get('SLURM_RESTART_COUNT') or 0}",
    )
    if int(tasks) <= int(nodes):
        return found
    tasks_of_nodes = variables["SLURM_STEP_TASKS_PER_NODE"]
    equal = re.fullmatch(r"([0-9]+)(\(x[0-9]+\))?", tasks_of_nodes)
    if not equal:
        raise UserError(
            f"{tasks} tasks on {nodes} nodes, {tasks_of_nodes}: use the same number on each node (--ntasks-per-node), "
            "or one task per node"
        )
    return _per_rank(
        found,
        process=int(variables["SLURM_PROCID"]),
        local_rank=int(variables["SLURM_LOCALID"]),
        ranks_per_node=equal[1],
        port=read_port(variables, "MASTER_PORT", SLURM_PORTS + int(job) % SLURM_PORTS),
    )


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: node[03-05,9],login1 begins with node03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


def read_open_mpi(variables: Variables) -> JobPlace | None:
    """Read the variables of Open MPI's mpirun."""
    return _read_mpi(
        variables,
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        hand_on="mpirun -x MASTER_ADDR=HOST",
    )


def read_hydra(variables: Variables) -> JobPlace | None:
    """Read the variables of the mpiexec of MPICH and Intel MPI."""
    return _read_mpi(
        variables,
        size="PMI_SIZE",
        rank="PMI_RANK",
        local_size="MPI_LOCALNRANKS",
        local_rank="MPI_LOCALRANKID",
        hand_on="mpiexec -genv MASTER_ADDR HOST",
    )


def _read_mpi(
    variables: Variables, *, size: str, rank: str, local_size: str, local_rank: str, hand_on: str
) -> JobPlace | None:
    """Read the variables of these names. hand_on: how the launcher is told the address of node 0."""
    if not {size, rank, local_size, local_rank} <= variables.keys() or variables[size] == "1":
        return None
    ranks, ranks_here = int(variables[size]), int(variables[local_size])
    process, local = _rank(variables, rank, ranks, "process"), int(variables[local_rank])
    nodes, rest = divmod(ranks, ranks_here)
    node = process // ranks_here
    if rest or process != node * ranks_here + local:
        raise UserError(
            f"{size}={ranks}, {local_size}={ranks_here}, {rank}={process}, {local_rank}={local}: start the same number "
            "of processes on each node, with consecutive numbers (mpirun --map-by slot)"
        )
    head = _host(variables.get("MASTER_ADDR", ""))
    if nodes > 1 and not head:
        raise UserError(f"{size}={ranks} on {nodes} nodes: say where node 0 is: {hand_on}, and MASTER_PORT")
    found = JobPlace(
        nodes=str(nodes),
        node=node,
        process=process,
        head=head,
        port=read_port(variables, "MASTER_PORT", DEFAULT_PORT),
    )
    if ranks_here == 1:  # one process per node
        return found
    return _per_rank(found, process=process, local_rank=local, ranks_per_node=str(ranks_here), port=found.port)


def read_sagemaker(variables: Variables) -> JobPlace | None:
    """Read the variables of an Amazon SageMaker training job, which starts one process per host."""
    hosts = json.loads(variables.get("SM_HOSTS") or "[]")
    if len(hosts) < 2:
        return None
    node = hosts.index(variables["SM_CURRENT_HOST"])
    return JobPlace(nodes=str(len(hosts)), node=node, process=node, head=hosts[0])


def read_rank_variables(variables: Variables) -> JobPlace | None:
    """Read RANK and WORLD_SIZE: of ranks (torchrun, Azure ML), or of pods (PyTorchJob)."""
    ranks = variables.get("WORLD_SIZE") or "1"
    if ranks == "1":
        return None
    given = " ".join(f"{name}={variables[name]}" for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR") if name in variables)
    needed = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in variables]:
        raise UserError(
            f"{given}: these do not say whether they count nodes or ranks. If they count nodes (PyTorchJob, Volcano), "
            f"set {PET}; if ranks, one per process (Azure ML), set {', '.join(missing)} too; to train on this node "
            "alone, unset WORLD_SIZE"
        )
    ranks_here, process = int(variables["LOCAL_WORLD_SIZE"]), _rank(variables, "RANK", int(ranks), "process")
    local = int(variables["LOCAL_RANK"])
    nodes, rest = divmod(int(ranks), ranks_here)
    if rest or process % ranks_here != local:
        raise UserError(
            f"{given} LOCAL_RANK={local} LOCAL_WORLD_SIZE={ranks_here}: each node must have the same number of ranks, "
            "with consecutive numbers"
        )
    found = JobPlace(nodes=str(nodes), node=process // ranks_here, head=_host(variables["MASTER_ADDR"]))
    port = read_port(variables, "MASTER_PORT", DEFAULT_PORT)
    return _per_rank(found, process=process, local_rank=local, ranks_per_node=str(ranks_here), port=port)


def refuse_unknown_launchers(variables: Variables) -> None:
    """Raise UserError if another launcher says that there are several processes or nodes, but not where they are."""
    several = {name: variables[name] for name in COUNTS if variables.get(name, "0") not in ("0", "1")}
    roles = {name: value for name, value in variables.items() if re.fullmatch("VC_.+_NUM", name)}  # Volcano's pods
    if sum(map(int, roles.values())) > 1:
        several |= roles
    if "PMIX_RANK" in variables and not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & variables.keys():
        several["PMIX_RANK"] = variables["PMIX_RANK"]  # how many there are is asked of a server
    hosts_of_lsf = variables.get("LSB_MCPU_HOSTS", "").split()[::2]  # each with its number of slots
    for name, hosts in (("LSB_MCPU_HOSTS", hosts_of_lsf), ("PBS_NODEFILE", _hosts_of_pbs(variables))):
        if len(set(hosts)) > 1:
            several[name] = variables[name]
    if several:
        given = " ".join(f"{name}={value}" for name, value in several.items())
        raise UserError(
            f"{given}: a launcher that run_train.sh does not know has started this process. Set {PET}, and start one "
            f"process per node; to train on this node alone, unset {', '.join(several)}"
        )


def _hosts_of_pbs(variables: Variables) -> list[str]:
    """Return the hosts of a job of PBS or Torque, from its file with a line per slot."""
    with suppress(OSError):
        return Path(variables.get("PBS_NODEFILE", os.devnull)).read_text().split()
    return []


def _per_rank(job: JobPlace, *, process: int, local_rank: int, ranks_per_node: str, port: int) -> JobPlace:
    """Return a job whose launcher has started one process per rank."""
    # Nothing on one node listens to other hosts.
    head = "127.0.0.1" if job.nodes == "1" else job.head
    return JobPlace(job.nodes, job.node, process, head, port, job.name, ranks_per_node, local_rank)


def _host(text: str) -> str:
    """Return a host without the brackets that an IPv6 address has in front of a port."""
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def _number(variables: Variables, name: str, default: int) -> int:
    """Return a variable that must be a number, or the default if it is not set. Raises UserError."""
    text = variables.get(name) or str(default)
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise UserError(f"{name}={text}: must be a whole number")
    return int(text)


def _rank(variables: Variables, name: str, count: int, unit: Literal["node", "process"]) -> int:
    """Return a variable that numbers one of `count` nodes or processes, from 0 on. Raises UserError."""
    rank = _number(variables, name, 0)
    if not 0 <= rank < count:
        ranks = "0 and 1" if count == 2 else f"0 to {count - 1}"
        several = "nodes" if unit == "node" else "processes"
        allowed = f"the rank of 1 {unit} is 0" if count == 1 else f"the ranks of {count} {several} are {ranks}"
        raise UserError(f"{name}={rank}: {allowed}")
    return rank


def read_port(variables: Variables, name: str, default: int) -> int:
    """Return a variable that must be a port, or the default if it is not set. Raises UserError."""
    port = _number(variables, name, default)
    if variables.get(name) and not 0 < port <= LAST_PORT:
        raise UserError(f"{name}={port}: a port is a number from 1 to {LAST_PORT}")
    return port


def assignments(job: JobPlace, variables: Variables) -> list[str]:
    """Return the settings for run_train.sh, a line NAME=value each."""
    ranks = job.ranks_per_node or variables.get("NPROC", "")
    lines = [] if ranks else ["NPROC_IS_DEFAULT=1"]
    return [
        *lines,
        f"NPROC={ranks or count_gpus() or ON_A_CPU}",
        f"NNODES={job.nodes}",
        f"NODE={job.node}",
        f"PROCESS={job.process}",
        f"HEAD={job.head}",
        f"PORT={job.port}",
        f"JOB={job.name}",
        f"LOCAL_RANK={'' if job.local_rank is None else job.local_rank}",
        f"CORES={usable_cores()}",
    ]


def main() -> None:
    """Print the job of this process, or end with exit status 2."""
    try:
        job = read_job(os.environ)
        os.write(sys.stdout.fileno(), os.fsencode("\n".join(assignments(job, os.environ)) + "\n"))
    except UserError as error:
        reason = str(error)
    except KeyError as error:
        reason = f"the scheduler's variable {error.args[0]} is not set, others of it are"
    except ValueError as error:
        reason = f"the scheduler's variables are not as expected: {error}"
    except OSError as error:  # run_train.sh reads a file
        reason = f"nothing can be written in TMPDIR={os.environ.get('TMPDIR', '/tmp')}: {error.strerror}"
    else:
        return
    print(f"run_train.sh: {reason}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
