"""Two runs, one URL: threads stand for the runs."""

import json
import shutil
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from torchllm.checkpoint.remote_owner import FOLDER, NotOwner, OwnerTiming, RemoteOwner, refuse_followed
from torchllm.runtime.storage import RemoteFolder

FAST = OwnerTiming(beat=0.02, limit=0.6, look=0.05)


@pytest.fixture
def storage(tmp_path: Path) -> RemoteFolder:
    return RemoteFolder(f"memory:/{tmp_path}/copies")


def run(tmp_path: Path, name: str) -> Path:
    return tmp_path / name / "checkpoints"


def test_a_living_owner_keeps_the_url(storage: RemoteFolder, tmp_path: Path) -> None:
    first = RemoteOwner(storage, run(tmp_path, "first"), FAST)
    with pytest.raises(
        NotOwner, match=r"in use by the run .*/first on .*, since .*: name another URL, or end that run"
    ):
        RemoteOwner(storage, run(tmp_path, "second"), FAST)
    refuse_followed(storage, first.number)
    first.release()
    second = RemoteOwner(storage, run(tmp_path, "second"), FAST)
    with pytest.raises(NotOwner, match="belongs to another run by now"):
        refuse_followed(storage, first.number)
    refuse_followed(storage, second.number)
    second.release()


def test_a_run_that_starts_again_is_the_owner_at_once(storage: RemoteFolder, tmp_path: Path) -> None:
    killed = RemoteOwner(storage, run(tmp_path, "first"), FAST)
    began = time.monotonic()
    RemoteOwner(storage, run(tmp_path, "first"), FAST._replace(limit=60)).release()
    assert time.monotonic() - began < 30
    assert list(storage.sizes(FOLDER)) == ["000001", "000001.count"]
    killed.release()


def test_a_take_whose_answer_was_lost_is_a_take(storage: RemoteFolder, tmp_path: Path) -> None:
    """The client writes again, and finds its own record."""
    put = RemoteFolder.put_if_absent
    with mock.patch.object(RemoteFolder, "put_if_absent", lambda *arguments: put(*arguments) and False):
        owner = RemoteOwner(storage, run(tmp_path, "first"), FAST)
    assert owner.number == 1
    owner.release()


def test_a_dead_owner_is_followed(storage: RemoteFolder, tmp_path: Path) -> None:
    dead = RemoteOwner(storage, run(tmp_path, "first"), FAST)
    dead._released.set()  # as if it were killed: it counts no more, and releases nothing
    dead._thread.join()
    next_owner = RemoteOwner(storage, run(tmp_path, "second"), FAST)
    assert json.loads(storage.read(f"{FOLDER}/000002"))["run"] == str(tmp_path / "second")
    with pytest.raises(NotOwner):
        refuse_followed(storage, dead.number)
    next_owner.release()


@pytest.mark.parametrize("trials", [1, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_one_of_several_runs_succeeds(tmp_path: Path, trials: int) -> None:
    for trial in range(trials):
        race_of_four(RemoteFolder(f"memory:/{tmp_path}/{trial}"), tmp_path / str(trial))


def race_of_four(storage: RemoteFolder, tmp_path: Path) -> None:
    start = threading.Barrier(4)
    owners, refused = [], []

    def take(name: str) -> None:
        start.wait()
        try:
            owners.append(RemoteOwner(storage, run(tmp_path, name), FAST))
        except NotOwner as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(owners) == 1
    assert len(refused) == 3
    owners[0].release()


def test_the_copy_of_a_run_folder_is_another_run(storage: RemoteFolder, tmp_path: Path) -> None:
    first = RemoteOwner(storage, run(tmp_path, "first"), FAST)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with pytest.raises(NotOwner, match="in use by the run"):
        RemoteOwner(storage, run(tmp_path, "second"), FAST)
    first.release()


def test_an_owner_that_cannot_be_read_is_waited_for(storage: RemoteFolder, tmp_path: Path) -> None:
    storage.put(f"{FOLDER}/000001", b'{"non')  # it was killed while it wrote
    owner = RemoteOwner(storage, run(tmp_path, "second"), FAST)
    assert owner.number == 2
    owner.release()
