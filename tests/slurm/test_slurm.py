"""What Slurm and its users do to a job, and what must come of it: run by `.ci/slurm`, not by default.

Each trial ends with the run at its last step, and every step of it the same, bit by bit, as without a fault: loss,
gradient norm, learning rate, tokens, validation. It also ends with no process of the job on any node.
"""

import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.job import QUICK_STEPS, Job
from tests.tiny_run import ROOT, assert_same_losses, curve, metrics

pytestmark = pytest.mark.timeout(900)

Note = Callable[[str], None]
Undisturbed = Callable[..., Path]
PROMISED = 30.0
"""seconds in which all processes end after one was killed; also Slurm's KillWait, from SIGTERM to SIGKILL"""
TWO = ["--nodes=2", "--ntasks-per-node=1"]


def assert_same(job: Job, reference: Path) -> None:
    """Check that a run has trained to its end as if nothing had happened, and that no step is there twice."""
    assert curve(job.folder) == curve(reference)


def saved_step(job: Job) -> int:
    """Return the step of the newest checkpoint, which must be the last step that was taken."""
    taken = metrics(job.folder)[-1]["step"]
    assert job.checkpoint == taken > QUICK_STEPS, job.text
    assert "stopped early, with a checkpoint" in job.text
    return taken


def end_of(job: Job, state: str) -> float:
    """Return the seconds in which a job ends in the state that is expected; 30 are promised."""
    seconds = job.until_ended()
    assert job.state == state, job.text
    assert seconds < PROMISED
    return seconds


def resubmit(job: Job, undisturbed: Undisturbed, *options: str) -> None:
    """Submit an ended job again: it must go on from its newest checkpoint, to the same end."""
    newest = job.checkpoint
    job.submit(*(options or TWO))
    job.finish()
    assert job.resumed[-1] == newest, job.text
    assert_same(job, undisturbed(2))


def finish_requeued(job: Job, undisturbed: Undisturbed, newest: int) -> None:
    """Let a job that Slurm has started again train to its end: it must go on from its newest checkpoint."""
    job.finish()
    assert job.resumed == [newest], job.text
    assert job.cluster.state(job.number).restarts == 1
    assert_same(job, undisturbed(2))


# ---- without a fault


def readme_line() -> list[str]:
    match = re.search(r"^(sbatch .*?)\n```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert match
    return shlex.split(match[1].replace("\\\n", " "))


def test_readmes_line_trains(job: Job, undisturbed: Undisturbed, note: Note) -> None:
    """On three nodes with a GPU each instead of eight with eight, and with another config."""
    sbatch, nodes, tasks, gpus, wrap, command = readme_line()
    assert [sbatch, nodes, tasks] == ["sbatch", "--nodes=8", "--ntasks-per-node=1"]
    assert [gpus, wrap] == ["--gpus-per-node=8", "--wrap"]
    srun = re.sub(r" ./run_train.sh \S+\s+--run.folder=\S+$", "", command)
    job.submit("--nodes=3", tasks, "--gpus-per-node=1", srun=srun)
    job.finish()
    note("trained to its end")
    assert_same(job, undisturbed(3))


FOUR_RANKS = ["--training.micro_batch_size=1"]


@pytest.mark.parametrize("tasks", [1, 2], ids=["task per node", "task per GPU"])
def test_two_ranks_per_node_train(job: Job, undisturbed: Undisturbed, note: Note, tasks: int) -> None:
    options = ["--nodes=2", f"--ntasks-per-node={tasks}", "--gpus-per-node=2"]
    job.submit(*options, settings=FOUR_RANKS, NPROC="2")
    job.finish()
    note("trained to its end")
    assert_same(job, undisturbed(4, *FOUR_RANKS))


# ---- what asks a job to stop: it saves at the next step boundary


SIGNALED = (" --signal=TERM", " --signal=USR1", " --full --signal=USR1")


@pytest.mark.parametrize("command", [f"scancel{words}" for words in ("", *SIGNALED)])
def test_scancel_saves(job: Job, undisturbed: Undisturbed, note: Note, command: str) -> None:
    job.begin(*TWO, srun="exec srun" if "--full" in command else "srun")
    job.cluster.run(*command.split(), str(job.number))
    seconds = job.until_ended()
    assert seconds < PROMISED
    assert job.state == ("CANCELLED" if command == "scancel" else "COMPLETED"), job.text
    note(f"saved step {saved_step(job)}, {job.state} after {seconds:.0f} s")
    resubmit(job, undisturbed)


@pytest.mark.parametrize(
    "form", ["", "TERM@60", "USR1@60", "B:USR1@60"], ids=lambda form: f"--signal={form}" if form else "no --signal"
)
def test_the_time_limit_saves(job: Job, undisturbed: Undisturbed, note: Note, form: str) -> None:
    """form: of --signal. For B:, which signals the batch script alone, srun must take that script's place."""
    option = [f"--signal={form}"] if form else []
    job.begin(*TWO, "--time=5", *option, srun="exec srun" if form.startswith("B:") else "srun")
    job.cluster.run("scontrol", "update", f"jobid={job.number}", "timelimit=1")
    seconds = job.until_ended()
    assert job.state == ("COMPLETED" if form else "TIMEOUT"), job.text
    note(f"saved step {saved_step(job)}, {job.state} after {seconds:.0f} s")
    resubmit(job, undisturbed)


# ---- what starts a job again


AGAIN = "; [ $? != 75 ] || scontrol requeue $SLURM_JOB_ID"
"""ends the batch script of a job that takes itself into the queue again where it was asked to stop"""


def test_a_job_whose_time_is_over_queues_itself(job: Job, undisturbed: Undisturbed, note: Note) -> None:
    job.begin(*TWO, "--time=5", "--signal=USR1@60", settings=["--run.stopped_exit_status=75"], ending=AGAIN)
    job.cluster.run("scontrol", "update", f"jobid={job.number}", "timelimit=1")
    job.cluster.until(lambda: "stopped early" in job.text)
    job.cluster.run("scontrol", "update", f"jobid={job.number}", "timelimit=5")
    step = saved_step(job)
    note(f"saved step {step}, trained again {job.until_resumed():.0f} s later")
    finish_requeued(job, undisturbed, step)


def test_a_requeued_job_goes_on(job: Job, undisturbed: Undisturbed, note: Note) -> None:
    job.begin(*TWO, "--requeue")
    job.cluster.run("scontrol", "requeue", str(job.number))
    ended = job.cluster.until(lambda: not job.cluster.processes())
    assert ended < PROMISED
    step = saved_step(job)
    note(f"saved step {step} and ended after {ended:.0f} s, trained again {job.until_resumed():.0f} s later")
    finish_requeued(job, undisturbed, step)


@pytest.mark.parametrize("grace", ["0", "60"], ids="GraceTime={}".format)
def test_a_preempted_job_goes_on(job: Job, undisturbed: Undisturbed, note: Note, grace: str) -> None:
    """grace: the partition's GraceTime in seconds. A job that ends in that time is done for Slurm."""
    job.cluster.run("scontrol", "update", "partition=normal", f"gracetime={grace}")
    job.begin(*TWO, "--requeue", settings=["--run.stopped_exit_status=75"], ending=AGAIN if grace != "0" else "")
    job.cluster.run(
        "sbatch", "--nodes=3", "--exclusive", "--partition=urgent", "--output=/dev/null", "--wrap=srun sleep 1"
    )
    ended = job.cluster.until(lambda: not job.text.endswith("x") and "stopped early" in job.text)
    step = saved_step(job)
    note(f"saved step {step} and ended after {ended:.0f} s, trained again {job.until_resumed():.0f} s later")
    finish_requeued(job, undisturbed, step)


def test_a_node_that_is_set_down_is_replaced(job: Job, undisturbed: Undisturbed, note: Note) -> None:
    job.begin(*TWO, "--requeue")
    job.cluster.run("scontrol", "update", "nodename=node2", "state=down", "reason=trial")
    ended = job.cluster.until(lambda: not job.cluster.processes())
    assert ended < PROMISED
    step = job.checkpoint
    note(f"saved step {step} and ended after {ended:.0f} s, trained again {job.until_resumed():.0f} s later")
    assert job.cluster.state(job.number).nodes == "node[1,3]"
    finish_requeued(job, undisturbed, step)


@pytest.mark.parametrize("lost", ["node1", "node2"])
def test_a_node_that_is_lost_is_replaced(job: Job, undisturbed: Undisturbed, note: Note, lost: str) -> None:
    """node1 has rank 0 and the batch script."""
    job.begin(*TWO, "--requeue")
    job.cluster.network.lose(lost)
    ended = job.cluster.until(lambda: not job.cluster.processes())
    step = job.checkpoint
    note(f"the other node's processes ended after {ended:.0f} s, trained again {job.until_resumed():.0f} s later")
    finish_requeued(job, undisturbed, step)


@pytest.mark.parametrize("cut", ["node1", "node2"])
def test_a_node_whose_link_is_cut_is_replaced(job: Job, undisturbed: Undisturbed, note: Note, cut: str) -> None:
    """The node goes on, and the shared file system with it, until its rank has waited for run.timeout = 60 s.

    Its launcher holds no GPU then, and ends when the link is back, or when TCP gives up, after a quarter of an hour.
    """
    job.begin(*TWO, "--requeue", settings=["--run.timeout=60"])
    reachable = {"node1": "node2", "node2": "node1"}[cut]
    job.cluster.network.cut(cut)
    step = job.checkpoint
    ended = job.cluster.until(lambda: not job.trains_on(reachable))
    note(f"the other node's ranks ended after {ended:.0f} s")
    ended += job.cluster.until(lambda: not job.trains_on(cut))
    note(f"its own after {ended:.0f} s")
    note(f"trained again {job.until_resumed():.0f} s later")
    job.cluster.network.join(cut)
    finish_requeued(job, undisturbed, step)


# ---- what a job does not notice, or what ends it


def test_a_node_that_is_drained_stays_until_the_end(job: Job, undisturbed: Undisturbed, note: Note) -> None:
    job.begin(*TWO)
    job.cluster.run("scontrol", "update", "nodename=node2", "state=drain", "reason=trial")
    step = job.step
    job.cluster.until(lambda: job.step > step + 3)
    job.finish()
    assert_same(job, undisturbed(2))
    assert job.cluster.idle_nodes() == ["node1", "node3"]
    note("trained to its end")


@pytest.mark.parametrize("node", ["node1", "node2"])
@pytest.mark.parametrize("victim", ["run_train.sh", "launcher"])
def test_a_job_ends_with_a_killed_process(
    job: Job, undisturbed: Undisturbed, note: Note, victim: str, node: str
) -> None:
    job.begin(*TWO)
    os.kill(job.find(node, victim), signal.SIGKILL)
    note(f"all processes ended after {end_of(job, 'FAILED'):.0f} s")
    resubmit(job, undisturbed)


@pytest.mark.parametrize("srun", ["srun", "srun --kill-on-bad-exit=1"])
def test_a_job_with_a_task_per_gpu_ends_with_a_killed_rank(
    job: Job, undisturbed: Undisturbed, note: Note, srun: str
) -> None:
    options = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2"]
    job.begin(*options, srun=srun)
    os.kill(job.find("node1", "rank"), signal.SIGKILL)
    note(f"all processes ended after {end_of(job, 'FAILED'):.0f} s")
    resubmit(job, undisturbed, *options)


def test_a_killed_rank_is_started_again_in_the_job(job: Job, undisturbed: Undisturbed, note: Note) -> None:
    job.begin(*TWO)
    newest = job.checkpoint
    os.kill(job.find("node2", "rank"), signal.SIGKILL)
    note(f"trained again {job.until_resumed():.0f} s later, in the same job")
    job.finish()
    assert job.resumed == [newest]
    assert "rank 1 on node2 was killed: SIGKILL; restart 1 of 3 from the checkpoint of step" in job.text
    assert_same(job, undisturbed(2))


# ---- fewer nodes


ONE_TASK_PER_NODE = "srun --ntasks-per-node=1"
"""not of sbatch, which gives a job only as many nodes as its tasks need at least: two of two to three"""


def test_a_job_goes_on_with_fewer_nodes_and_with_all_again(job: Job, undisturbed: Undisturbed, note: Note) -> None:
    """sbatch --nodes=2-3: the means of a loss are summed in another order then."""
    job.begin("--nodes=2-3", "--requeue", srun=ONE_TASK_PER_NODE)
    job.cluster.network.lose("node3")
    note(f"of three nodes one was lost, two trained {job.until_resumed():.0f} s later")
    assert job.cluster.state(job.number).nodes == "node[1-2]"
    job.until_training()
    job.cluster.replace("node3")
    job.cluster.run("scontrol", "requeue", str(job.number))
    note(f"back on three {job.until_resumed(2):.0f} s after a requeue")
    assert job.cluster.state(job.number).nodes == "node[1-3]"
    job.finish()
    assert_same_losses(job.folder, undisturbed(3))
