import errno
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import workers
from tests.tiny_run import process_as_it_was
from torchllm.config.errors import UserError
from torchllm.runtime.heartbeat import heartbeat
from torchllm.runtime.process import Runtime
from torchllm.tools.launch.rank_start import raise_first_error
from torchllm.tools.launch.stop_requests import StopRequests


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
    try:
        action()
    except UserError as error:
        return str(error)
    return "no error"


def votes(folder: str, event: str = "") -> list[tuple[bool, bool]]:
    """What should_stop() returns at steps 1 to 4, and whether to save, with an event before step 2."""
    rank = dist.get_rank()
    runtime = make_runtime(Path(folder), rank, dist.new_group(backend="gloo"))
    answers = []
    with process_as_it_was():
        runtime.stop_requests.listen()
        for step in range(1, 5):
            if step == 2 and event == "signal" and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == 2 and event in ("stop", "save") and rank == 0:
                (runtime.folder / event).touch()
            failed = step == 2 and event == "failure" and rank == 1
            answers.append((runtime.should_stop(failed), runtime.should_save))
    runtime.close()
    return answers


@pytest.mark.parametrize("event", ["signal", "stop", "failure"])
def test_an_event_on_one_rank_stops_all_ranks_one_step_later(tmp_path: Path, event: str) -> None:
    for answer in workers.run(votes, 2, str(tmp_path), event):
        assert answer[:3] == [(False, False), (False, False), (True, False)]
    assert not (tmp_path / "stop").exists()  # or the run could not go on


def errors_of_votes(folder: str, ranks: int) -> list[str]:
    """The error of each vote of steps 1 to 4, where the last rank begins step 3 in the place of step 2."""
    rank = dist.get_rank()
    runtime = make_runtime(Path(folder), rank, dist.new_group(backend="gloo"))
    errors = []
    for step in range(1, 5):
        heartbeat().step = step + (step > 1 and rank == ranks - 1)
        errors.append(error_of(runtime.should_stop))
    return errors


def test_ranks_that_are_out_of_step_end_one_step_later(tmp_path: Path) -> None:
    for first, second, third, *_ in workers.run(errors_of_votes, 3, str(tmp_path), 3):
        assert (first, second) == ("no error", "no error")
        assert third.startswith("a rank was at step 3 while another was at step 2: look for a continue")


def test_the_file_save_asks_all_ranks_for_one_checkpoint(tmp_path: Path) -> None:
    never = (False, False)
    assert workers.run(votes, 2, str(tmp_path), "save") == [[never, never, (False, True), never]] * 2
    assert not (tmp_path / "save").exists()  # or it would ask again
    assert workers.run(votes, 2, str(tmp_path)) == [[never] * 4] * 2


def test_a_folder_that_cannot_be_asked_or_changed_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    runtime = make_runtime(tmp_path)
    (tmp_path / "save").touch()
    monkeypatch.setattr(Path, "unlink", refuse)
    assert [runtime._save_requested() for _ in range(3)] == [False] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "deletion of the file 'save': Permission denied; training goes on, and it is tried again"
    ]
    monkeypatch.setattr(os, "stat", refuse)
    assert not runtime._save_requested()
    assert not runtime.stop_requests.requested()


def test_only_rank_0_writes_the_marker(tmp_path: Path) -> None:
    make_runtime(tmp_path, rank=1).mark_stopped(3)
    assert not (tmp_path / "stopped.json").exists()
    make_runtime(tmp_path).mark_stopped(3)
    assert (tmp_path / "stopped.json").read_text() == '{"step": 3}\n'


def test_a_marker_that_cannot_be_written_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_runtime(tmp_path / "gone").mark_stopped(3)
    assert "stopped.json: No such file or directory; a new start goes on from the checkpoint" in caplog.text


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
