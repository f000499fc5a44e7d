"""Ranks that hang. They end, so the fork server of the pool starts new ones for each test."""

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from tests.workers import POOL
from torchllm.checkpoint.background import SAVES_IN_BACKGROUND
from torchllm.config import Run
from torchllm.runtime.heartbeat import during, heartbeat
from torchllm.runtime.process import Runtime
from torchllm.tools.launch import hang_watch
from torchllm.tools.launch.hang_report import read_dump
from torchllm.tools.launch.hang_watch import ALARM, sign, verify
from torchllm.tools.launch.launcher_notes import STORE
from torchllm.tools.launch.rank_start import LaunchHooks, start_runtime

TIMEOUT = 2.0
HOST = os.uname().nodename
Body = Callable[[Runtime], None]


class Job(NamedTuple):
    statuses: list[int]
    """exit status of each rank"""
    stderr: str
    """of all ranks together"""
    seconds: float
    """from the moment that all ranks had started"""
    dumps: list[Path]


def run(folder: Path, ranks: int, body: Body, *, has_server: bool = False) -> Job:
    """Run `body` on each rank of a job with a time-out of `TIMEOUT` seconds.

    has_server: the store is that of a job of several nodes.
    """
    folder = folder / body.__name__
    folder.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = ranks, store.port if has_server else None, folder, body
    processes = [POOL.context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        running = {process.sentinel for process in processes}
        deadline = time.monotonic() + patience(60)
        while running and time.monotonic() < deadline:
            running -= set(wait(running, timeout=deadline - time.monotonic()))
        ended = time.time()
        stderr = (folder / "stderr").read_text()
        assert not running, stderr
    finally:
        for process in processes:
            process.kill()
            process.join()
    statuses = [process.exitcode or 0 for process in processes]
    began = max((folder / f"began-{rank}").stat().st_mtime for rank in range(ranks))
    return Job(statuses, stderr, ended - began, sorted(folder.glob("hang/*/*")))


def _rank(rank: int, ranks: int, port: int | None, folder: Path, body: Body) -> None:
    with (folder / "stderr").open("a") as stderr:
        os.dup2(stderr.fileno(), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE=str(port is not None)
    )
    if port is None:
        os.environ[STORE] = str(folder / "store")
    torch.set_num_threads(1)
    runtime = start_runtime(
        Run(folder=str(folder), device="cpu", timeout=TIMEOUT, start_timeout=TIMEOUT, save_timeout=2 * TIMEOUT)
    )
    runtime.barrier()
    (folder / f"began-{rank}").touch()
    try:
        body(runtime)
        runtime.close()
    except BaseException:  # end as a program ends; multiprocessing prints errors in another form
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def reduce() -> None:
    dist.all_reduce(torch.ones(3))


def skip_one(runtime: Runtime) -> None:
    raise_false_alarm(runtime, "../../elsewhere")
    pair = dist.new_group([2, 3])
    reduce()
    if runtime.rank != 2:
        reduce()
    if runtime.rank >= 2:
        dist.all_reduce(torch.ones(3), group=pair)
    reduce()


def raise_false_alarm(runtime: Runtime, value: str) -> None:
    """Write into the job's store what a stranger might, to end the job or to have files written in another folder."""
    hooks = runtime.hooks
    assert isinstance(hooks, LaunchHooks)
    assert hooks.hang_watch is not None
    if runtime.rank == 0:
        hooks.hang_watch.store.set(ALARM, value)
    runtime.barrier()


def be_stopped(runtime: Runtime) -> None:
    if runtime.rank == 0:  # the lowest rank, which would log the report
        os.kill(os.getpid(), signal.SIGSTOP)
    reduce()


def send_no_message(runtime: Runtime) -> None:
    """With a run folder that does not answer, where the user's command would leave its output."""
    hang_watch.call_on_event = lambda *_: threading.Event().wait()  # type: ignore[assignment,return-value]
    reduce()
    if runtime.rank == 1:
        dist.recv(torch.ones(3), src=0)
    time.sleep(600)


class GoneStore:
    """A store whose host is gone."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistStoreError(f"{name}: no connection")


def lose_the_store(runtime: Runtime) -> None:
    reduce()
    if runtime.rank == 0:
        runtime.hooks.hang_watch.store = GoneStore()  # type: ignore[attr-defined]  # a stand-in
        reduce()
    time.sleep(3 * TIMEOUT)
    os._exit(3)


def save_in_the_background(runtime: Runtime) -> None:
    """Rank 1 does not come to a background save of rank 0, whose main thread has the shorter timeout of a step."""
    group = dist.new_group(group_desc=SAVES_IN_BACKGROUND)
    if runtime.rank == 0:
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(3), group=group), daemon=True).start()
    time.sleep(600)


def save_while_the_other_goes_on(runtime: Runtime) -> None:
    """Rank 0, which reports, has the longer timeout of a save; rank 1 is a step ahead."""
    with during("save") if runtime.rank == 0 else nullcontext():
        heartbeat().step = 7 + runtime.rank
        dist.all_reduce(torch.ones(3), group=runtime.host_group if runtime.rank == 0 else None)


def be_slow(runtime: Runtime) -> None:
    """A slow step of one rank, a slow one of all ranks, and a long time in which no rank waits for another."""
    raise_false_alarm(runtime, "20261122-101112")
    for step in range(2):
        runtime.should_stop()
        if runtime.rank == 1 or step == 1:
            time.sleep(TIMEOUT - 0.5)
        reduce()
    time.sleep(TIMEOUT + 2)


def line_of(function: Callable[..., Any], text: str) -> str:
    """file:line of the first line of a function that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    for number, line in enumerate(lines, start=first):
        if text in line:
            return f"tests/tools/launch/test_hang_watch.py:{number}"
    raise AssertionError(text)


def test_a_rank_that_skips_a_collective_is_named_with_it(tmp_path: Path) -> None:
    job = run(tmp_path, 4, skip_one, has_server=True)
    assert job.statuses == [1] * 4
    lines = job.stderr.split("\n  ")
    assert lines[0] == "hang: ranks waited over 2 s (run.start_timeout) for other ranks; aborting"
    blocked_at = line_of(reduce, "dist.all_reduce")
    assert lines[1].startswith(f"rank 2 ({HOST}) has not entered gloo:all_reduce number ")
    assert lines[1].rpartition(" have")[0].endswith(f" of ranks 0-3 ({blocked_at}); ranks 0-1, 3")
    pair = line_of(skip_one, "group=pair")
    assert lines[2] == f"rank 2's main thread is at {pair} in skip_one"
    assert lines[3] == f"rank 2 itself waits in gloo:all_reduce number 1 of ranks 2-3 ({pair})"
    assert lines[4:] == [f"every rank's stack and last operations: {job.dumps[0].parent}\n"]  # once, and no traceback
    assert [path.name for path in job.dumps] == [f"rank_{rank}.json" for rank in range(4)]
    dumps = [read_dump(path.read_text()) for path in job.dumps]
    assert [dump.in_wait for dump in dumps] == [True] * 4
    assert len(dumps[0].records) == len(dumps[3].records) > 5
    assert not list(tmp_path.rglob("elsewhere"))


def test_a_rank_whose_process_is_stopped_is_named_and_killed(tmp_path: Path) -> None:
    job = run(tmp_path, 3, be_stopped)
    assert job.statuses == [-signal.SIGKILL, 1, 1]
    assert job.stderr.startswith("rank 1: hang: ranks waited over 2 s")
    assert f"rank 0 ({HOST}) has not entered gloo:all_reduce" in job.stderr
    assert "rank 0 does not answer: its process has ended, is stopped, or is stuck outside Python\n" in job.stderr
    assert job.stderr.count("hang: ") == 1
    assert [path.name for path in job.dumps] == ["rank_1.json", "rank_2.json"]


@pytest.mark.exhaustive
def test_a_message_that_never_comes_ends_the_job_too(tmp_path: Path) -> None:
    job = run(tmp_path, 2, send_no_message)
    assert job.statuses == [1, 1]
    sleeping = line_of(send_no_message, "time.sleep")
    assert f"rank 0's main thread is at {sleeping} in send_no_message" in job.stderr
    receiving = line_of(send_no_message, "dist.recv")
    assert f"rank 1 waited for a message at {receiving} in send_no_message" in job.stderr


@pytest.mark.exhaustive
def test_a_rank_that_cannot_reach_the_store_ends_alone(tmp_path: Path) -> None:
    job = run(tmp_path, 2, lose_the_store)
    assert job.statuses == [1, 3]
    assert job.stderr.startswith("hang: rank 0, perhaps others, and the ranks cannot reach each other: ")
    assert job.stderr.count("\n") == 1


@pytest.mark.exhaustive
def test_a_save_in_the_background_has_the_limit_of_a_save(tmp_path: Path) -> None:
    job = run(tmp_path, 2, save_in_the_background)
    assert job.statuses == [1, 1]
    assert job.stderr.startswith("hang: ranks waited over 4 s (run.save_timeout) for other ranks; aborting\n")
    assert f"rank 1 ({HOST}) has not entered gloo:all_reduce number 1 of ranks 0-1" in job.stderr


@pytest.mark.exhaustive
def test_the_report_names_the_timeout_that_a_rank_has_found_exceeded(tmp_path: Path) -> None:
    job = run(tmp_path, 2, save_while_the_other_goes_on)
    assert job.stderr.startswith("hang: ranks waited over 2 s (run.start_timeout) for other ranks; aborting\n")
    assert "\n  step 7: rank 0; step 8: rank 1\n" in job.stderr


@pytest.mark.exhaustive
def test_no_alarm_if_ranks_are_slow_or_do_other_things(tmp_path: Path) -> None:
    job = run(tmp_path, 2, be_slow)
    assert job.statuses == [0, 0]
    assert job.stderr == ""
    assert job.dumps == []
    assert job.seconds > 3 * TIMEOUT - 1


def test_a_signed_text_is_read_with_the_same_secret_only() -> None:
    signed = sign(b"secret of the job", "20261122-101112").encode()
    assert verify(b"secret of the job", signed) == "20261122-101112"
    assert verify(b"another secret", signed) is None


@pytest.mark.parametrize(
    "change", [lambda v: v[:-1], lambda v: v + b"0", lambda v: v[70:], lambda v: b"\xff", lambda v: b""]
)
def test_what_nobody_has_signed_is_no_text(change: Callable[[bytes], bytes]) -> None:
    signed = sign(b"secret of the job", "a text of several words").encode()
    assert verify(b"secret of the job", change(signed)) is None
