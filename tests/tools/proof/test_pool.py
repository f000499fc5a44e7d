"""The pool of ranks: one failing test does not disturb the next, whatever it did to its ranks, and nothing leaks."""

import itertools
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchllm.tools.proof.pool import Pool, WorkerFailed


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Of its own: those that are killed here would be missed elsewhere."""
    pool = Pool()
    yield pool
    pool.close()


def rank_and(*arguments: object, **keywords: object) -> tuple[int, int, int, object]:
    return dist.get_rank(), dist.get_world_size(), os.getpid(), (arguments, keywords)


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("rotten")
    dist.barrier()


def dies_on(rank: int, of_signal: bool) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL) if of_signal else os._exit(3)
    dist.barrier()


def hangs_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def processes(pool: Pool, ranks: int = 2) -> list[int]:
    """After checking that the ranks work together."""
    results = pool.run(rank_and, ranks)
    assert [result[:2] for result in results] == [(rank, ranks) for rank in range(ranks)]
    return [result[2] for result in results]


def test_results_come_in_order_of_rank(pool: Pool) -> None:
    results = pool.run(rank_and, 3, 1, two=2)
    assert [result[0] for result in results] == [0, 1, 2]
    assert all(result[3] == ((1,), {"two": 2}) for result in results)
    assert len({result[2] for result in results}) == 3


def test_ranks_are_kept_until_they_are_renewed(pool: Pool) -> None:
    three = processes(pool, 3)
    assert processes(pool, 2) == three[:2]
    assert processes(pool, 3) == three
    pool.renew(range(2))
    assert not set(three[:2]) & set(processes(pool, 2))
    assert processes(pool, 3)[2] == three[2]


def test_a_failing_function_fails_only_its_test(pool: Pool) -> None:
    for rank in (0, 1):
        with pytest.raises(WorkerFailed, match=rf"(?s)rank {rank} of 2:.*fails_on.*ValueError: rotten"):
            pool.run(fails_on, 2, rank)
        processes(pool)


@pytest.mark.parametrize(("of_signal", "cause"), [(False, " with status 3"), (True, ": SIGKILL")])
def test_a_rank_that_dies_is_replaced(pool: Pool, of_signal: bool, cause: str) -> None:
    first_processes = processes(pool)
    with pytest.raises(WorkerFailed, match=f"rank 1 of 2:\nthe process died{cause}"):
        pool.run(dies_on, 2, 1, of_signal)
    assert not set(first_processes) & set(processes(pool))


def test_a_rank_that_hangs_is_replaced(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    first_processes = processes(pool)
    monkeypatch.setattr(pool, "timeout", 1.0)
    answer = "no answer within 1 s: ranks hang, or this machine is too busy"
    with pytest.raises(WorkerFailed, match=f"rank 1 of 2:\n{answer}"):
        pool.run(hangs_on, 2, 1)
    monkeypatch.undo()
    assert not set(first_processes) & set(processes(pool))
    for process in first_processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def resources() -> tuple[int, int]:
    """After some work on a mesh: this process's open files and threads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    assert whole.to_local().sum() == 28
    return _open_files(), len(os.listdir("/proc/self/task"))


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's /proc")
def test_nothing_leaks(pool: Pool) -> None:
    for _ in range(3):
        pool.run(resources, 2)
    resources_at_first = [_open_files(), *itertools.chain(*pool.run(resources, 2))]
    for _ in range(20):
        pool.run(resources, 2)
    resources_at_last = [_open_files(), *itertools.chain(*pool.run(resources, 2))]
    for at_first, at_last in zip(resources_at_first, resources_at_last, strict=True):
        assert at_last < at_first + 5, (resources_at_first, resources_at_last)  # a leak would add 20 or more
