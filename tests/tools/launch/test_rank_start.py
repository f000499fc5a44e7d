import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import workers
from tests.recipes.warm import rank_of_torchrun
from tests.runtime.test_process import error_of, make_runtime
from tests.tiny_run import free_port, process_as_it_was
from tests.tools.launch.test_records import collectives_begun
from torchllm.config import Run
from torchllm.config.errors import UserError
from torchllm.tools.launch import rank_start
from torchllm.tools.launch.head import NodeMissing, NodeWait
from torchllm.tools.launch.lease import DONE, Timing, check_owner
from torchllm.tools.launch.rank_start import start_runtime
from torchllm.tools.launch.take_lease import take_lease


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    with process_as_it_was():
        yield


def start_under_torchrun(
    run: Run, port: int, patch: Callable[[], None] = lambda: None, reads_only: bool = False
) -> str:
    """Call start_runtime in a worker of the pool, whose own group it replaces, with torchrun's variables set."""
    with rank_of_torchrun(port), mock.patch.object(rank_start, "choose_device", rank_start.choose_device):
        patch()
        return error_of(lambda: start_runtime(run, reads_only=reads_only).close())


def _give_rank_1_a_gpu() -> None:
    if os.environ["RANK"] == "1":
        rank_start.choose_device = lambda requested, local_rank: torch.device("cuda", local_rank)


def _fail_on_rank_1() -> None:
    def choose(requested: str, local_rank: int) -> torch.device:
        if local_rank == 1:
            raise UserError("local rank 1 has no GPU")
        return torch.device("cpu")

    rank_start.choose_device = choose


def test_a_device_that_one_rank_lacks_ends_all_ranks(tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path), device="cpu", collect_garbage_interval=7)
    assert workers.run(start_under_torchrun, 2, run, free_port()) == ["no error"] * 2
    errors = workers.run(start_under_torchrun, 2, run, free_port(), _fail_on_rank_1)
    assert errors == ["rank 1: local rank 1 has no GPU"] * 2
    errors = workers.run(start_under_torchrun, 2, run, free_port(), _give_rank_1_a_gpu)
    assert errors == ["rank 0 sees no GPU but rank 1 does: fix rank 0's node"] * 2


def collectives_at_start(folder: str, port: int) -> Counter[str]:
    with collectives_begun() as collectives:
        assert start_under_torchrun(Run(folder=folder, device="cpu"), port) == "no error"
    return Counter(collectives)


def test_the_ranks_exchange_six_hashes_and_a_secret_at_the_start_and_no_objects(tmp_path: Path) -> None:
    for collectives in workers.run(collectives_at_start, 2, str(tmp_path), free_port()):
        assert collectives == {"gloo:all_reduce": 6, "gloo:broadcast": 1}


class Alone(NamedTuple):
    """What start_runtime makes of a process that no launcher has started."""

    rank: int
    world_size: int
    collects_garbage: bool
    unfreezes_at_exit: bool
    probe_exists: bool


def start_without_torchrun(run: Run) -> Alone:
    dist.destroy_process_group()
    os.environ["MASTER_ADDR"] = "of something else"
    try:
        with process_as_it_was():
            with mock.patch("atexit.register") as register:
                runtime = start_runtime(run)
            unfreezes_at_exit = mock.call(gc.unfreeze) in register.mock_calls
            probe = runtime.folder / ".shared"
            alone = Alone(runtime.rank, runtime.world_size, gc.isenabled(), unfreezes_at_exit, probe.exists())
            runtime.close()
            return alone
    finally:
        del os.environ["MASTER_ADDR"]


def test_a_process_alone_is_rank_0_of_1(tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path / "new" / "run"), device="cpu")
    alone = Alone(rank=0, world_size=1, collects_garbage=False, unfreezes_at_exit=True, probe_exists=False)
    assert workers.run(start_without_torchrun, 1, run) == [alone]


def start_reading(run: Run, port: int) -> str:
    return start_under_torchrun(run, port, reads_only=True)


def test_a_rank_that_knows_no_rank_0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    error = error_of(lambda: rank_start._open_store(Run(), 0, timedelta(seconds=1)))
    assert error.startswith("WORLD_SIZE=2, but MASTER_ADDR and MASTER_PORT and RANK not set: start the recipe with")
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "65536")):
        monkeypatch.setenv(name, value)
    error = error_of(lambda: rank_start._open_store(Run(), 0, timedelta(seconds=1)))
    assert error == "MASTER_PORT=65536: a port is a number from 1 to 65535"


def test_a_job_of_one_node_stays_on_the_loopback_whatever_the_site_says(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "eth0")
    with mock.patch.object(dist, "init_process_group"), mock.patch.dict(os.environ):
        rank_start._join_job(Run(device="cpu"), 0, 1, dist.HashStore(), timedelta(seconds=1))
        assert [os.environ[name] for name in names] == ["lo", "lo"]


def test_a_folder_of_another_job_is_refused_on_all_ranks_unless_they_only_read(tmp_path: Path) -> None:
    lease = take_lease(tmp_path, Timing(beat=0.05))
    (tmp_path / "stopped.json").touch()
    run = Run(folder=str(tmp_path), device="cpu")
    errors = workers.run(start_under_torchrun, 2, run, free_port())
    assert len(set(errors)) == 1
    assert f"belongs to another job, which is running: process {os.getpid()} on" in errors[0]
    assert workers.run(start_reading, 2, run, free_port()) == ["no error"] * 2
    assert sorted(os.listdir(tmp_path)) == ["lease", "stopped.json"]
    check_owner(tmp_path, lease.claim)
    lease.release()
    assert workers.run(start_under_torchrun, 2, run, free_port()) == ["no error"] * 2
    assert sorted(os.listdir(tmp_path)) == ["lease"]
    assert DONE in (tmp_path / "lease/000002").read_text()


def share(folders: list[str]) -> str:
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    runtime = make_runtime(Path(folders[rank]), rank, group)
    appears = rank_start._appears
    rank_start._appears = lambda exists: appears(exists, 0.3)
    try:
        return error_of(lambda: rank_start._share_folder(runtime))
    finally:
        rank_start._appears = appears


def test_a_run_folder_that_is_not_shared_is_found_at_the_start(tmp_path: Path) -> None:
    shared, separate = str(tmp_path / "shared"), str(tmp_path / "separate")
    (tmp_path / "separate").mkdir()  # in place of the same path on another node's own disk
    assert workers.run(share, 2, [shared, shared]) == ["no error"] * 2
    errors = workers.run(share, 2, [shared, separate])
    assert errors[0] == errors[1]
    assert errors[0].startswith(
        f"rank 1: run.folder = {separate!r} is not the folder of rank 0: it must be on one file system"
    )


def test_a_run_folder_that_cannot_be_written_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "run")
    errors = workers.run(share, 2, [folder, folder])
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"run.folder = {folder!r} cannot be written: ")


def test_a_rank_without_launcher_says_that_rank_0_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    error = error_of(lambda: rank_start._open_store(Run(start_timeout=0.2), 1, timedelta(seconds=1)))
    assert error.startswith(f"waited for 0.2 s (run.start_timeout) for node 0 at 127.0.0.1:{port} (")


def test_rank_0_says_which_rank_without_launcher_does_not_come() -> None:
    store = dist.HashStore()
    store.set(rank_start.joined_key(1), "")
    with pytest.raises(NodeMissing, match=r"waited for 0 s \(run.start_timeout\) for rank 2 of 4 to join. Does it run"):
        rank_start.await_ranks(store, 4, NodeWait(0.0))
    for rank in (2, 3):
        store.set(rank_start.joined_key(rank), "")
    rank_start.await_ranks(store, 4, NodeWait(0.0))
