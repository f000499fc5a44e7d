"""Ranks that hang: started from the pool's fork server, for they end; and once by torchrun."""

import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.tiny_run import ROOT
from tests.workers import POOL
from torchllm.config import Run
from torchllm.runtime.hang_report import read_dump
from torchllm.runtime.process import Runtime, start_runtime

TIMEOUT = 2.0
Body = Callable[[Runtime], None]


class Job(NamedTuple):
    """How one ended."""

    statuses: list[int]
    said: str
    seconds: float
    """since the ranks had all started"""
    dumps: list[Path]


def run(folder: Path, ranks: int, body: Body) -> Job:
    """Ranks that do `body`, in a job with a time-out of `TIMEOUT` seconds."""
    folder = folder / body.__name__
    folder.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has it
    arguments = ranks, store.port, folder, body
    processes = [POOL.context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        left = {process.sentinel for process in processes}
        deadline = time.monotonic() + 30
        while left and time.monotonic() < deadline:
            left -= set(wait(left, timeout=deadline - time.monotonic()))
        ended = time.time()
        said = (folder / "said").read_text()
        assert not left, said
    finally:
        for process in processes:
            process.kill()
            process.join()
    statuses = [process.exitcode for process in processes]
    seconds = ended - max((folder / f"began-{rank}").stat().st_mtime for rank in range(ranks))
    return Job([status or 0 for status in statuses], said, seconds, sorted(folder.glob("hang/*/*")))


def _rank(rank: int, ranks: int, port: int, folder: Path, body: Body) -> None:
    with (folder / "said").open("a") as said:
        os.dup2(said.fileno(), 2)
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = True
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    runtime = start_runtime(Run(folder=str(folder), device="cpu", timeout=TIMEOUT))
    runtime.barrier()
    (folder / f"began-{rank}").touch()
    try:
        body(runtime)
        runtime.close()
    except BaseException:  # as Python ends a program; multiprocessing has a way of its own
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def reduce() -> None:
    dist.all_reduce(torch.ones(3))


def skips_one(runtime: Runtime) -> None:
    pair = dist.new_group([2, 3])
    reduce()
    if runtime.rank != 2:
        reduce()
    if runtime.rank >= 2:
        dist.all_reduce(torch.ones(3), group=pair)
    reduce()


def sleeps(runtime: Runtime) -> None:
    runtime.should_stop()
    if runtime.rank == 1:
        time.sleep(600)
    runtime.should_stop()
    runtime.should_stop()


def stopped(runtime: Runtime) -> None:
    if runtime.rank == 0:  # the lowest, that would speak
        os.kill(os.getpid(), signal.SIGSTOP)
    reduce()


def no_message(runtime: Runtime) -> None:
    reduce()
    if runtime.rank == 1:
        dist.recv(torch.ones(3), src=0)
    time.sleep(600)


def slow(runtime: Runtime) -> None:
    """Steps that take long, of one rank and of all, and long ones without any other rank."""
    for step in range(2):
        runtime.should_stop()
        time.sleep(TIMEOUT - 0.5 if runtime.rank == 1 or step == 1 else 0)
        reduce()
    time.sleep(TIMEOUT + 2)


def where(function: Callable[..., Any], text: str) -> str:
    """file:line of the first line of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    number = next(n for n, line in enumerate(lines) if text in line)
    return f"tests/runtime/test_hang_watch.py:{first + number}"


def test_a_rank_that_skips_a_collective_is_named_with_it(tmp_path: Path) -> None:
    job = run(tmp_path, 4, skips_one)
    assert job.statuses == [1] * 4
    assert TIMEOUT < job.seconds < TIMEOUT + 10
    lines = job.said.split("\n  ")
    assert lines[0] == "the job hangs: ranks have waited for others for 2 s (run.timeout), and it is ended"
    place = where(reduce, "dist.all_reduce")
    assert lines[1].startswith(f"rank 2 ({os.uname().nodename}) has not entered gloo:all_reduce number ")
    assert lines[1].rpartition(" have")[0].endswith(f" of ranks 0-3 ({place}); ranks 0-1, 3")
    pair = where(skips_one, "group=pair")
    assert lines[2] == f"rank 2's main thread is at {pair} in skips_one"
    assert lines[3] == f"rank 2 waits in gloo:all_reduce number 1 of ranks 2-3 ({pair}) meanwhile"
    assert lines[4:] == [f"every rank's stack and last operations: {job.dumps[0].parent}\n"]  # once, and no traceback
    assert [path.name for path in job.dumps] == [f"rank_{rank}.json" for rank in range(4)]
    dumps = [read_dump(path.read_text()) for path in job.dumps]
    assert [dump.in_wait for dump in dumps] == [True] * 4
    assert len(dumps[0].records) == len(dumps[3].records) > 5


def test_a_rank_that_is_busy_with_something_else_is_named_with_its_place(tmp_path: Path) -> None:
    job = run(tmp_path, 2, sleeps)
    assert job.statuses == [1, 1]
    assert f"rank 1 ({os.uname().nodename}) has not entered gloo:all_reduce number " in job.said
    assert f"rank 1's main thread is at {where(sleeps, 'time.sleep')} in sleeps\n" in job.said


def test_a_rank_whose_process_is_stopped_is_named_and_killed(tmp_path: Path) -> None:
    job = run(tmp_path, 3, stopped)
    assert job.statuses == [-signal.SIGKILL, 1, 1]
    assert TIMEOUT < job.seconds < TIMEOUT + 10
    assert job.said.startswith("rank 1: the job hangs")
    assert f"rank 0 ({os.uname().nodename}) has not entered gloo:all_reduce" in job.said
    assert "rank 0 says nothing: its process has ended, is stopped, or is stuck outside Python\n" in job.said
    assert job.said.count("the job hangs") == 1
    assert [path.name for path in job.dumps] == ["rank_1.json", "rank_2.json"]


def test_a_message_that_never_comes_ends_the_job_too(tmp_path: Path) -> None:
    job = run(tmp_path, 2, no_message)
    assert job.statuses == [1, 1]
    assert f"rank 0's main thread is at {where(no_message, 'time.sleep')} in no_message" in job.said
    assert f"rank 1 waited for a message at {where(no_message, 'dist.recv')} in no_message" in job.said


def test_no_alarm_where_ranks_are_slow_or_do_other_things(tmp_path: Path) -> None:
    job = run(tmp_path, 2, slow)
    assert (job.statuses, job.said, job.dumps) == ([0, 0], "", [])
    assert job.seconds > 3 * TIMEOUT - 1


JOB = """
import sys, torch, torch.distributed as dist
from torchllm.config import Run
from torchllm.runtime.process import start_runtime

runtime = start_runtime(Run(folder=sys.argv[1], device="cpu", timeout=2.0))
for step in range(3):
    if runtime.rank != 1 or step != 1:
        dist.all_reduce(torch.ones(3))
    (runtime.folder / "began").touch()
    runtime.should_stop()
runtime.close()
"""


def test_torchrun_ends_in_time_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "torchllm.runtime.launch", "--standalone", "--nproc-per-node=3"]
    command += [str(tmp_path / "job.py"), str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    ended = time.time()
    assert done.returncode == 1
    assert 2.0 < ended - (tmp_path / "run/began").stat().st_mtime < 12.0
    first, *lines, last = done.stderr.splitlines()
    assert first == "the job hangs: ranks have waited for others for 2 s (run.timeout), and it is ended"
    assert lines[0].startswith(f"  rank 1 ({os.uname().nodename}) has not entered gloo:all_reduce number ")
    folder = Path(last.rpartition(" ")[2])
    assert folder.parent == tmp_path / "run/hang"
    assert len(list(folder.iterdir())) == 3
