import gc
import os
import signal
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import workers
from tests.tiny_run import free_port, process_as_it_was
from torchllm.config import Run, Training
from torchllm.config.errors import UserError
from torchllm.runtime import process as runtimes
from torchllm.runtime.process import (
    Runtime,
    choose_device,
    compute_dtype,
    has_usable_gpu,
    raise_first_error,
    start_runtime,
)
from torchllm.runtime.stop import StopRequests
from torchllm.runtime.torch_compat import flight_records
from torchllm.tools.launch.head import NodeMissing, NodeWait
from torchllm.tools.launch.lease import DONE, Timing, check_owner, take_lease


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    with process_as_it_was():
        yield


def make_runtime(folder: Path, rank: int = 0, group: Any = None) -> Runtime:
    """A runtime as start_runtime would make it, in the process group that exists; each rank on a node of its own."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    requests = StopRequests(folder, rank, world_size)
    return Runtime(rank, world_size, 0, torch.device("cpu"), folder, group, collect_interval=0, stop_requests=requests)


def error_of(action: Callable[[], object]) -> str:
    """The text of the UserError that the action raises."""
    try:
        action()
    except UserError as error:
        return str(error)
    return "no error"


def start_under_torchrun(
    run: Run, port: int, patch: Callable[[], None] = lambda: None, reads_only: bool = False
) -> str:
    """Call start_runtime in a worker of the pool, whose own group it replaces, with torchrun's variables set."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(variables)
    choose = runtimes.choose_device
    try:
        patch()
        with process_as_it_was():
            return error_of(lambda: start_runtime(run, reads_only=reads_only).close())
    finally:
        runtimes.choose_device = choose
        for name in variables:
            del os.environ[name]


def _give_rank_1_a_gpu() -> None:
    if os.environ["RANK"] == "1":
        runtimes.choose_device = lambda requested, local_rank: torch.device("cuda", local_rank)


def _fail_on_rank_1() -> None:
    def choose(requested: str, local_rank: int) -> torch.device:
        if local_rank == 1:
            raise UserError("local rank 1 has no GPU")
        return torch.device("cpu")

    runtimes.choose_device = choose


@pytest.mark.parametrize(
    ("files", "visible", "expected"),
    [
        (["nvidia0"], None, True),
        (["nvidia0"], "0", True),
        (["nvidia0"], "", False),
        (["nvidia0"], "-1", False),
        (["nvidiactl"], None, False),
        ([], None, False),
    ],
)
def test_a_gpu_that_this_process_may_use(
    files: list[str], visible: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert has_usable_gpu(tmp_path) == expected


def test_a_gpu_that_torch_cannot_use_is_no_silent_training_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runtimes, "has_usable_gpu", lambda: True)
    with pytest.raises(UserError, match=r'cannot use it: .* set run.device = "cpu" to train on the CPU'):
        choose_device("auto", 0)
    assert choose_device("cpu", 0).type == "cpu"
    monkeypatch.setattr(runtimes, "has_usable_gpu", lambda: False)
    assert choose_device("auto", 0).type == "cpu"


def test_a_device_that_one_rank_lacks_ends_all_ranks(tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path), device="cpu", collect_garbage_interval=7)
    assert workers.run(start_under_torchrun, 2, run, free_port()) == ["no error"] * 2
    errors = workers.run(start_under_torchrun, 2, run, free_port(), _fail_on_rank_1)
    assert errors == ["rank 1: local rank 1 has no GPU"] * 2
    errors = workers.run(start_under_torchrun, 2, run, free_port(), _give_rank_1_a_gpu)
    assert errors == ["rank 0 sees no GPU but rank 1 does: fix rank 0's node"] * 2


def collectives_at_start(folder: str, port: int) -> Counter[str]:
    """Names of the collectives that a rank begins in start_runtime."""
    latest = max((record.number for record in flight_records()), default=-1)
    assert start_under_torchrun(Run(folder=folder, device="cpu"), port) == "no error"
    return Counter(record.name for record in flight_records() if record.number > latest)


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_the_ranks_exchange_six_hashes_and_a_secret_at_the_start_and_no_objects(tmp_path: Path, ranks: int) -> None:
    for collectives in workers.run(collectives_at_start, ranks, str(tmp_path), free_port()):
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
    error = error_of(lambda: runtimes._open_store(Run(), 0, timedelta(seconds=1)))
    assert error.startswith("WORLD_SIZE=2, but MASTER_ADDR and MASTER_PORT and RANK not set: start the recipe with")


def test_a_job_of_one_node_stays_on_the_loopback_whatever_the_site_says(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "eth0")
    with mock.patch.object(dist, "init_process_group"), mock.patch.dict(os.environ):
        runtimes._join_job(Run(device="cpu"), 0, 1, dist.HashStore(), timedelta(seconds=1))
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
    appears = runtimes._appears
    runtimes._appears = lambda exists: appears(exists, 0.3)
    try:
        return error_of(lambda: runtimes._share_folder(runtime))
    finally:
        runtimes._appears = appears


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


def votes(folder: str, events: dict[int, str]) -> list[bool]:
    """What should_stop() returns at steps 1 to 4, with events that happen before a step."""
    rank = dist.get_rank()
    runtime = make_runtime(Path(folder), rank, dist.new_group(backend="gloo"))
    answers = []
    with process_as_it_was():
        runtime.stop_requests.listen()
        for step in range(1, 5):
            event = events.get(step)
            if event == "signal" and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if event == "file" and rank == 0:
                (runtime.folder / "stop").touch()
            failed = event == "failure" and rank == 1
            answers.append(runtime.should_stop(failed))
    runtime.close()
    return answers


@pytest.mark.parametrize("event", ["signal", "file", "failure"])
def test_an_event_on_one_rank_stops_all_ranks_one_step_later(tmp_path: Path, event: str) -> None:
    answers = workers.run(votes, 2, str(tmp_path), {2: event})
    assert [answer[:3] for answer in answers] == [[False, False, True]] * 2
    assert not (tmp_path / "stop").exists()  # or the run could not go on
    assert workers.run(votes, 2, str(tmp_path), {}) == [[False] * 4] * 2


def save_votes(folder: str, event: int) -> list[tuple[bool, bool]]:
    """What should_stop() and should_save are at steps 1 to 4, with a file that appears before step `event`."""
    rank = dist.get_rank()
    runtime = make_runtime(Path(folder), rank, dist.new_group(backend="gloo"))
    answers = []
    for step in range(1, 5):
        if step == event and rank == 0:
            (runtime.folder / "save").touch()
        answers.append((runtime.should_stop(), runtime.should_save))
    runtime.close()
    return answers


def test_the_file_save_asks_all_ranks_for_one_checkpoint(tmp_path: Path) -> None:
    once = [(False, False), (False, False), (False, True), (False, False)]
    assert workers.run(save_votes, 2, str(tmp_path), 2) == [once] * 2
    assert not (tmp_path / "save").exists()  # or it would ask again


def test_only_rank_0_writes_the_marker(tmp_path: Path) -> None:
    make_runtime(tmp_path, rank=1).mark_stopped(3)
    assert not (tmp_path / "stopped.json").exists()
    make_runtime(tmp_path).mark_stopped(3)
    assert (tmp_path / "stopped.json").read_text() == '{"step": 3}\n'


def test_garbage_is_collected_at_the_same_step_on_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(step))
    runtime = make_runtime(tmp_path)
    for interval in (0, 3):
        runtime.collect_interval = interval
        for step in range(1, 8):
            runtime.collect_garbage(step, saved=step == 5)
    assert collected == [3, 5, 6]


class Cycle:
    """An object that refers to itself, as a model does."""

    def __init__(self) -> None:
        self.itself = self


def test_a_collection_finds_old_cycles_and_looks_through_the_survivors_of_the_first_one_only_once(
    tmp_path: Path,
) -> None:
    runtime = make_runtime(tmp_path)
    runtime.collect_interval = 1
    gc.disable()
    model = weakref.ref(Cycle())
    survivor = Cycle()
    runtime.collect_garbage(1)
    assert model() is None
    assert gc.get_freeze_count() > 1000
    later = Cycle()
    for step in (2, 3, 4):  # `later` is in the oldest generation then
        runtime.collect_garbage(step)
    assert len(gc.get_objects()) < 0.1 * gc.get_freeze_count()
    former, former_survivor = weakref.ref(later), weakref.ref(survivor)
    del later, survivor
    runtime.collect_garbage(5)
    assert former() is None
    assert former_survivor() is not None
    runtime.release_memory()
    assert former_survivor() is None
    assert len(gc.get_objects()) < 0.1 * gc.get_freeze_count()  # the modules are not looked through again


def test_the_first_error_of_all_ranks_is_raised() -> None:
    raise_first_error(lambda error: [None, None], None)
    assert error_of(lambda: raise_first_error(lambda error: [None, "b", "c"], None)) == "rank 1: b"
    assert error_of(lambda: raise_first_error(lambda error: ["a", "b"], "b")) == "a"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 3) == choose_device("cpu", 3) == torch.device("cpu")
    assert error_of(lambda: choose_device("cuda", 0)) == (
        'run.device = "cuda", but torch sees no GPU here; use "auto" or "cpu"'
    )
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert choose_device("cpu", 1) == torch.device("cpu")
    error = error_of(lambda: choose_device("auto", 2))
    assert error.startswith("local rank 2 has no GPU of its own: it sees 2. Lower NPROC")


def test_compute_dtype() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [compute_dtype(Training(), device) for device in (cpu, cuda)] == [torch.float32, torch.bfloat16]
    assert compute_dtype(Training(dtype="bfloat16"), cpu) == torch.bfloat16
    assert compute_dtype(Training(dtype="float32"), cuda) == torch.float32


def test_a_rank_without_launcher_says_that_rank_0_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    error = error_of(lambda: runtimes._open_store(Run(start_timeout=0.2), 1, timedelta(seconds=1)))
    assert error.startswith(f"waited for 0.2 s (run.start_timeout) for node 0 at 127.0.0.1:{port} (")


def test_rank_0_says_which_rank_without_launcher_does_not_come() -> None:
    store = dist.HashStore()
    store.set(runtimes.joined_key(1), "")
    with pytest.raises(NodeMissing, match=r"waited for 0 s \(run.start_timeout\) for rank 2 of 4 to join. Does it run"):
        runtimes.await_ranks(store, 4, NodeWait(0.0))
    for rank in (2, 3):
        store.set(runtimes.joined_key(rank), "")
    runtimes.await_ranks(store, 4, NodeWait(0.0))
