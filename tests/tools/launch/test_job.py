"""What the variables of schedulers and launchers say about a job: understood, or refused with what to set."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launched import clean
from torchllm.config.errors import UserError
from torchllm.tools.launch.job import JobPlace, assignments, first_host, read_job

pytestmark = pytest.mark.quick

SLURM = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "MASTER_ADDR": "node1"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
SALLOC_SHELL = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2"}
RANK = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
RANK |= {"MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}
AZURE = {name: value for name, value in RANK.items() if name != "LOCAL_WORLD_SIZE"} | {"NODE_RANK": "1"}


def test_what_is_understood() -> None:
    for variables, job in [
        ({}, JobPlace()),
        ({"NNODES": "2-4"}, JobPlace(nodes="2-4")),
        ({"WORLD_SIZE": "1", "RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}, JobPlace()),
        ({"LOCAL_RANK": "1", "MASTER_ADDR": "elsewhere"}, JobPlace()),  # left over
        (SLURM, JobPlace("2", 1, 1, "node1", 0, "70123.0.0")),
        (
            SLURM | {"SLURM_RESTART_COUNT": "2", "MASTER_PORT": "12345"},
            JobPlace("2", 1, 1, "node1", 12345, "70123.0.2"),
        ),
        (SLURM | {"MASTER_ADDR": "[fd00::1]"}, JobPlace("2", 1, 1, "fd00::1", 0, "70123.0.0")),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "2"},
            JobPlace("2", 1, 2, "node1", 30123, "70123.0.0", "2", 0),
        ),
        ({"SLURM_JOB_ID": "1", "SLURM_NNODES": "1"}, JobPlace()),
        (SLURM | SALLOC_SHELL | {"SLURM_NNODES": "1"}, JobPlace()),
        ({"SLURM_STEP_ID": "", "WORLD_SIZE": "", "PET_NNODES": "", "SM_HOSTS": "", "PMI_SIZE": ""}, JobPlace()),
        (MPI, JobPlace("2", 1, 3, "node1", 29500, "", "2", 1)),
        (SLURM | MPI, JobPlace("2", 1, 3, "node1", 29500, "", "2", 1)),  # mpirun inside of a Slurm job
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, JobPlace("4", 3, 3, "node1")),
        (HYDRA, JobPlace("1", 0, 1, "127.0.0.1", 29500, "", "2", 1)),
        (RANK, JobPlace("2", 1, 3, "pod-0", 23456, "", "2", 1)),
        ({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}, JobPlace("2", 1, 1, "algo-1")),
        (RANK | {"SM_HOSTS": '["algo-1", "pod-0"]'}, JobPlace("2", 1, 3, "pod-0", 23456, "", "2", 1)),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, JobPlace()),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "[::1]", "PET_NPROC_PER_NODE": "4"} | RANK,
            JobPlace("2", 1, 1, "::1", 29500, "", "4"),
        ),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, JobPlace("1")),
        ({"VC_MASTER_NUM": "1", "VC_TASK_INDEX": "0", "LSB_MCPU_HOSTS": "n1 8", "NHOSTS": "1"}, JobPlace()),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, JobPlace()),
    ]:
        assert read_job(variables) == job, variables


def test_what_is_refused() -> None:
    for variables, part in [
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "pod-0", "MASTER_PORT": "1"}, "set PET_NNODES, PET_NODE_RANK"),
        ({"WORLD_SIZE": "2"}, "unset WORLD_SIZE"),
        (AZURE, "(Azure ML), set LOCAL_WORLD_SIZE too"),
        ({"VC_MASTER_NUM": "1", "VC_WORKER_NUM": "1", "VC_TASK_INDEX": "0"}, "VC_MASTER_NUM=1 VC_WORKER_NUM=1: a"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0: a launcher that run_train.sh does not know"),
        ({"SKYPILOT_NUM_NODES": "2"}, "unset SKYPILOT_NUM_NODES"),
        ({"LSB_MCPU_HOSTS": "n1 8 n2 8"}, "LSB_MCPU_HOSTS=n1 8 n2 8: a"),
        (SLURM | SALLOC_SHELL, "or the shell of salloc, which runs on only one of 2 nodes"),
        (RANK | {"LOCAL_WORLD_SIZE": "3"}, "each node must have the same number of ranks"),
        (MPI | {"MASTER_ADDR": ""}, "mpirun -x MASTER_ADDR=HOST"),
        (MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "mpirun --map-by slot"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE=2: a launcher that run_train.sh does not know"),
        ({"MV2_COMM_WORLD_SIZE": "8"}, "MV2_COMM_WORLD_SIZE=8"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1"}, "--ntasks-per-node"),
        ({"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}, "use srun ./run_train.sh"),
        ({"PET_NNODES": "1:4"}, "must be a fixed number of nodes"),
        ({"PET_NNODES": "2", "PET_MAX_RESTARTS": "3"}, "set run.restarts instead"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "first"}, "PET_NODE_RANK=first: must be a whole number"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, "PET_NODE_RANK=2: the ranks of 2 nodes are 0 and 1"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "-1"}, "PET_NODE_RANK=-1: the ranks of 2 nodes are 0 and 1"),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "node0"}, "PET_NNODES=2 without PET_NODE_RANK: set it to 0 on"),
        ({"PET_NNODES": "16", "PET_NODE_RANK": "16"}, "PET_NODE_RANK=16: the ranks of 16 nodes are 0 to 15"),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "1"}, "PET_NODE_RANK=1: the rank of 1 node is 0"),
        ({"PET_NNODES": "0"}, "PET_NNODES=0: must be a fixed number of nodes"),
        (RANK | {"RANK": "4", "LOCAL_RANK": "0"}, "RANK=4: the ranks of 4 processes are 0 to 3"),
        (MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4: the ranks of 4 processes are 0 to 3"),
        ({"PET_NNODES": "2", "PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT=70000: a port is a number from 1 to 65535"),
        ({"PET_NNODES": "2", "PET_MASTER_PORT": "0"}, "PET_MASTER_PORT=0: a port is"),
        (SLURM | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536: a port is a number from 1 to 65535"),
        (RANK | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536: a port is a number from 1 to 65535"),
    ]:
        with pytest.raises(UserError, match=re.escape(part)):
            read_job(variables)


def test_a_file_of_two_hosts_is_refused(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n1\nn1\n")
    assert read_job({"PBS_NODEFILE": str(hosts)}) == read_job({"PBS_NODEFILE": "/nowhere"}) == JobPlace()
    hosts.write_text("n1\nn2\n")
    with pytest.raises(UserError, match="unset PBS_NODEFILE"):
        read_job({"PBS_NODEFILE": str(hosts)})


def test_the_first_host_of_a_list_as_slurm_writes_it() -> None:
    for hosts, first in [
        ("n03", "n03"),
        ("node[03-05,9],login1", "node03"),
        ("login1,node[1-2]", "login1"),
        ("rack[2,4]n[08-10]", "rack2n08"),
        ("a[1-2]b,c", "a1b"),
        ("", ""),
    ]:
        assert first_host(hosts) == first, hosts


def test_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchllm.tools.launch.job.count_gpus", lambda: 8)
    assert assignments(JobPlace(), {})[:2] == ["NPROC_IS_DEFAULT=1", "NPROC=8"]
    assert assignments(JobPlace(), {"NPROC": "4"})[0] == "NPROC=4"
    assert assignments(JobPlace(ranks_per_node="3"), {"NPROC": "4"})[0] == "NPROC=3"
    monkeypatch.setattr("torchllm.tools.launch.job.count_gpus", lambda: 0)
    assert assignments(JobPlace(), {})[1] == "NPROC=2"


def test_a_temporary_folder_that_is_full_is_named() -> None:
    command = [sys.executable, "-P", "-m", "torchllm.tools.launch.job"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=clean({}))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"run_train.sh: nothing can be written in TMPDIR={tempfile.gettempdir()}: No space left on device\n"
    )
