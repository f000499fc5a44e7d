import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    raise_first_error,
    report_errors,
    start_runtime,
)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    with process_as_it_was():
        yield


def here(folder: Path, rank: int = 0, group: Any = None) -> Runtime:
    """A runtime as start_runtime would make it, in the process group that is there."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return Runtime(rank, world, rank, torch.device("cpu"), folder, group, collect_interval=0)


def told(action: Callable[[], object]) -> str:
    """The text of the UserError that the action ends with."""
    try:
        action()
    except UserError as error:
        return str(error)
    return "no error"


def as_torchrun_would(run: Run, port: int, patch: Callable[[], None] = lambda: None) -> str:
    """start_runtime in a worker of the pool, whose own group it replaces."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    choose = runtimes.choose_device
    try:
        patch()
        with process_as_it_was():
            return told(lambda: start_runtime(run).close())
    finally:
        runtimes.choose_device = choose
        for name in variables:
            del os.environ[name]


def _one_sees_a_gpu() -> None:
    if dist.is_initialized() or os.environ["RANK"] == "1":
        runtimes.choose_device = lambda wanted, local_rank: torch.device("cuda", local_rank)


def _one_has_none() -> None:
    def choose(wanted: str, local_rank: int) -> torch.device:
        if local_rank == 1:
            raise UserError("local rank 1 has no GPU")
        return torch.device("cpu")

    runtimes.choose_device = choose


def test_what_one_rank_lacks_ends_all(tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path), device="cpu", collect_garbage_interval=7)
    assert workers.run(as_torchrun_would, 2, run, free_port()) == ["no error"] * 2
    assert workers.run(as_torchrun_would, 2, run, free_port(), _one_has_none) == ["rank 1: local rank 1 has no GPU"] * 2
    mixed = workers.run(as_torchrun_would, 2, run, free_port(), _one_sees_a_gpu)
    assert mixed == ["rank 0 sees no GPU, rank 1 does: mend that node"] * 2


def without_torchrun(run: Run) -> tuple[int, int, bool, bool]:
    dist.destroy_process_group()
    os.environ["MASTER_ADDR"] = "of something else"
    try:
        with process_as_it_was():
            runtime = start_runtime(run)
            found = runtime.rank, runtime.world_size, gc.isenabled(), (runtime.folder / ".shared").exists()
            runtime.close()
            return found
    finally:
        del os.environ["MASTER_ADDR"]


def test_a_process_alone_is_rank_0_of_1(tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path / "new" / "run"), device="cpu")
    assert workers.run(without_torchrun, 1, run) == [(0, 1, False, False)]


def share(folders: list[str]) -> str:
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    patience = runtimes._appears
    runtimes._appears = lambda exists: patience(exists, 0.3)
    try:
        return told(lambda: runtimes._share_folder(here(Path(folders[rank]), rank, group)))
    finally:
        runtimes._appears = patience


def test_a_run_folder_that_is_not_shared_is_found_at_the_start(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    (tmp_path / "other").mkdir()  # the same path on another node's own disk
    assert workers.run(share, 2, [one, one]) == ["no error"] * 2
    found = workers.run(share, 2, [one, other])
    assert found[0] == found[1]
    assert found[0].startswith(
        f"rank 1: run.folder = {other!r} is not the folder of rank 0: it must be one file system"
    )


def test_a_run_folder_that_cannot_be_written_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "run")
    found = workers.run(share, 2, [folder, folder])
    assert found[0] == found[1]
    assert found[0].startswith(f"run.folder = {folder!r} cannot be written: ")


def votes(folder: str, when: dict[int, str]) -> list[bool]:
    """should_stop() at steps 1 to 4, with things that happen before a step."""
    rank = dist.get_rank()
    runtime = here(Path(folder), rank, dist.new_group(backend="gloo"))
    answers = []
    with process_as_it_was():
        runtimes._handle_signals(runtime)
        for step in range(1, 5):
            what = when.get(step)
            if what == "signal" and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if what == "file" and rank == 0:
                (runtime.folder / "stop").touch()
            answers.append(runtime.should_stop(failed=what == "failure" and rank == 1))
    runtime.close()
    return answers


@pytest.mark.parametrize("what", ["signal", "file", "failure"])
def test_what_one_rank_is_told_all_do_one_step_later(tmp_path: Path, what: str) -> None:
    answers = workers.run(votes, 2, str(tmp_path), {2: what})
    assert [answer[:3] for answer in answers] == [[False, False, True]] * 2
    assert not (tmp_path / "stop").exists()  # or the run could not go on
    assert workers.run(votes, 2, str(tmp_path), {}) == [[False] * 4] * 2


def test_a_second_signal_ends_the_process_unless_it_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = here(tmp_path)
    runtimes._handle_signals(runtime)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for moment in (100.0, 100.1, 105.0):  # torchrun forwards what Slurm has sent to every process already
        now[0] = moment
        signal.raise_signal(signal.SIGTERM)
    assert runtime._is_told_to_stop()
    assert not ended
    now[0] = 105.1
    signal.raise_signal(signal.SIGINT)
    assert ended == [128 + signal.SIGINT]


def test_the_marker_is_rank_0s(tmp_path: Path) -> None:
    here(tmp_path, rank=1).mark_stopped(3)
    assert not (tmp_path / "stopped.json").exists()
    here(tmp_path).mark_stopped(3)
    assert (tmp_path / "stopped.json").read_text() == '{"step": 3}\n'


def test_garbage_is_collected_at_the_same_step_on_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation: collected.append(step))
    runtime = here(tmp_path)
    for interval in (0, 3):
        runtime.collect_interval = interval
        for step in range(1, 8):
            runtime.collect_garbage(step)
    assert collected == [3, 6]


def test_the_first_error_of_all_ranks_is_raised() -> None:
    raise_first_error(lambda error: [None, None], None)
    assert told(lambda: raise_first_error(lambda error: [None, "b", "c"], None)) == "rank 1: b"
    assert told(lambda: raise_first_error(lambda error: ["a", "b"], "b")) == "a"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 3) == choose_device("cpu", 3) == torch.device("cpu")
    assert told(lambda: choose_device("cuda", 0)) == (
        'run.device = "cuda", but torch sees no GPU here; use "auto" or "cpu"'
    )
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert choose_device("cpu", 1) == torch.device("cpu")
    assert told(lambda: choose_device("auto", 2)).startswith(
        "local rank 2 has no GPU of its own, it sees 2: lower NPROC"
    )


def test_the_type_of_the_computation() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [compute_dtype(Training(), device) for device in (cpu, cuda)] == [torch.float32, torch.bfloat16]
    assert compute_dtype(Training(dtype="bfloat16"), cpu) == torch.bfloat16
    assert compute_dtype(Training(dtype="float32"), cuda) == torch.float32


def hooked(rank: int, local_rank: int, error: Exception) -> None:
    """What Python does at the end of a process with an uncaught error."""
    report_errors(rank, local_rank)
    sys.excepthook(type(error), error, None)


def test_errors_are_said_once_and_bugs_name_their_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    hooked(0, 0, UserError("no such file"))
    assert capsys.readouterr().err == "error: no such file\n"
    assert not slept
    # Rank 0 ends the job with the same error meanwhile; where it has none, one rank of the node speaks first.
    for rank, local_rank in ((8, 0), (9, 1)):
        hooked(rank, local_rank, UserError("no such file"))
        assert capsys.readouterr().err == f"rank {rank}: error: no such file\n"
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert 1 < slept[0] < slept[1] < 10
    hooked(3, 3, ValueError("a bug"))
    assert capsys.readouterr().err == "rank 3: failed:\nValueError: a bug\n\n"


def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        report_errors(rank)
        logging.getLogger("torchllm").info("said by %d", rank)
    assert capsys.readouterr().err == "said by 0\n"
