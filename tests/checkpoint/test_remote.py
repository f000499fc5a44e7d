"""Copies of checkpoints, and runs that go on from them; storage is a folder, or fails as a test says."""

import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import workers
from tests.data.test_corpus import flip_bit
from tests.patience import until
from tests.s3 import Faults, s3_bucket
from tests.tiny_run import ROOT
from torchllm import config
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint import remote
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.history import Copies
from torchllm.checkpoint.manifest import MANIFEST, PROVEN, SUSPECT, CheckpointError
from torchllm.checkpoint.remote_owner import FOLDER, OwnerTiming
from torchllm.checkpoint.verify import check_files
from torchllm.runtime.storage import RemoteFolder, StorageError
from torchllm.train.step import Health

FAST_OWNER = OwnerTiming(beat=0.05, limit=0.3, look=0.05)
FAST: dict[str, Any] = {"waits": lambda: iter(lambda: 0.02, None), "timing": FAST_OWNER}


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with mock.patch.object(remote, "RemoteCopies", partial(remote.RemoteCopies, **FAST)):
        yield


def checkpoints(folder: Path, value: float = 0.0, *, group: Any = None, **settings: Any) -> Checkpointer:
    """A run whose copies are in `folder`/copies; its weights have this value."""
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"remote": str(folder / "copies"), **settings}
    return Checkpointer(config.Checkpoint(**settings), folder / "run", [model], optimizer, host_group=group)


def save(folder: Path, *steps: int, value: float = 0.0, **settings: Any) -> None:
    """A run that saves at these steps, and ends."""
    saving = checkpoints(folder, value, **settings)
    for step in steps:
        saving.save(step, {})
    saving.close()


@contextmanager
def resumed(folder: Path, step: int, **settings: Any) -> Iterator[Checkpointer]:
    """A run that goes on from this step, until the end of the context."""
    later = checkpoints(folder, **settings)
    restored = later.resume()
    assert restored is not None
    assert restored.step == step
    yield later
    later.close()


def weight(saving: Checkpointer) -> float:
    (model,) = saving._stages
    assert isinstance(model, nn.Linear)
    return float(model.weight.detach().mean())


def steps_in(folder: Path) -> list[int]:
    return [manifests.step_of(step) for step in manifests.step_folders(folder) if (step / MANIFEST).exists()]


def wait_for_copy(saving: Checkpointer, folder: Path, step: int) -> None:
    """Wait until a step is copied, and the next one may be."""
    until(lambda: steps_in(folder / "copies")[:1] == [step])
    until(lambda: saving._copies.in_use() is None)


def save_and_copy(folder: Path, *steps: int) -> None:
    """A run that keeps all steps, none of which takes longer to copy than to the next."""
    saving = checkpoints(folder, keep=0)
    for step in steps:
        saving.save(step, {})
        wait_for_copy(saving, folder, step)
    saving.close()


def test_a_run_goes_on_without_its_folder(tmp_path: Path) -> None:
    saving = checkpoints(tmp_path, 1.0)
    saving.save(5, {"position": 7})
    saving.close()
    run, copied = tmp_path / "run/checkpoints/step-00000005", tmp_path / "copies/step-00000005"
    names = sorted(path.name for path in run.iterdir())
    assert names == sorted(path.name for path in copied.iterdir())
    assert all((run / name).read_bytes() == (copied / name).read_bytes() for name in names)

    shutil.rmtree(tmp_path / "run")
    with resumed(tmp_path, 5) as later:
        assert manifests.read_manifest(run).data == {"position": 7}
        assert weight(later) == 1.0
        assert steps_in(tmp_path / "run/checkpoints") == [5]


def test_the_newest_is_loaded_from_where_it_is(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with resumed(tmp_path, 1, remote="") as alone:
        alone.save(2, {})
    with mock.patch.object(RemoteFolder, "download", side_effect=AssertionError), resumed(tmp_path, 2):
        pass


def test_a_copy_without_its_manifest_or_suspect_is_not_loaded(tmp_path: Path) -> None:
    save_and_copy(tmp_path, 1, 2, 3)
    (tmp_path / "copies/step-00000003" / MANIFEST).unlink()
    (tmp_path / "copies/step-00000002" / SUSPECT).write_text("{}")
    shutil.rmtree(tmp_path / "run")
    with resumed(tmp_path, 1) as later:
        later.save(2, {})  # the copy that is suspect is replaced
    assert not (tmp_path / "copies/step-00000002" / SUSPECT).exists()
    assert steps_in(tmp_path / "copies") == [2, 1]


@contextmanager
def slow_uploads() -> Iterator[threading.Event]:
    """Uploads wait for the event."""
    go_on = threading.Event()
    upload = RemoteFolder.upload

    def wait_and_upload(storage: RemoteFolder, *arguments: Any) -> None:
        assert go_on.wait(60)
        upload(storage, *arguments)

    with mock.patch.object(RemoteFolder, "upload", wait_and_upload):
        yield go_on


def test_a_copy_that_takes_longer_than_an_interval_is_made_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder stays so long, and those that come meanwhile are not copied."""
    local = tmp_path / "run/checkpoints"
    with slow_uploads() as go_on:
        saving = checkpoints(tmp_path, keep=1)
        for step in (1, 2, 3):
            saving.save(step, {})
        assert [f"step-0000000{step} is not copied" in caplog.text for step in (1, 2, 3)] == [False, True, True]
        assert steps_in(local) == [3, 1]
        go_on.set()
        wait_for_copy(saving, tmp_path, 1)
        saving.save(4, {})
        wait_for_copy(saving, tmp_path, 4)
        assert steps_in(local) == [4]
        saving.close()


def test_the_newest_is_copied_when_a_run_ends(tmp_path: Path) -> None:
    with slow_uploads() as go_on:
        saving = checkpoints(tmp_path, keep=0)
        for step in (1, 2, 3):
            saving.save(step, {})
        closing = vars(saving._copies)["_closing"]
        threading.Thread(target=lambda: (closing.wait(60), go_on.set())).start()
        saving.close()
    assert steps_in(tmp_path / "copies") == [3]  # the first was given up for it


def test_a_copy_replaces_a_damaged_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, value=1.0)
    folder = tmp_path / "run/checkpoints/step-00000002"
    (folder / "__0_0.distcp").chmod(0o600)
    flip_bit(folder / "__0_0.distcp", 100)
    with resumed(tmp_path, 2) as later:
        assert weight(later) == 1.0
    assert not check_files(folder, manifests.read_manifest(folder))
    assert list(folder.parent.glob("damaged-*"))


def requests_of_a_start(folder: Path) -> list[str]:
    """Resume a run that has lost its folder; return its requests, without those of the owner's lease."""
    requests = []

    def counted(method: str) -> Any:
        plain = getattr(RemoteFolder, method)

        def request(storage: RemoteFolder, name: str = "", *arguments: Any) -> Any:
            if not name.startswith(FOLDER):
                requests.append(f"{method} {name}")
            return plain(storage, name, *arguments)

        return mock.patch.object(RemoteFolder, method, request)

    shutil.rmtree(folder / "run")
    with counted("sizes"), counted("folders"), counted("exists"), counted("read"), counted("download"):
        later = checkpoints(folder, keep=0)
        assert later.resume() is not None
    later.close()
    return requests


def test_a_start_makes_as_many_requests_beside_any_number_of_copies(tmp_path: Path) -> None:
    save_and_copy(tmp_path, 1, 2, 3)
    of_three = requests_of_a_start(tmp_path)
    assert sorted(set(of_three)) == sorted(of_three)  # nothing is asked for twice
    assert sum(request.startswith("folders") for request in of_three) == 1
    for step in range(4, 13):
        shutil.copytree(tmp_path / "copies/step-00000003", tmp_path / f"copies/step-{step:08d}")
    shutil.rmtree(tmp_path / "copies/step-00000012")
    save(tmp_path, 12, keep=0)
    assert len(requests_of_a_start(tmp_path)) == len(of_three)


def test_damage_to_a_copy_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_and_copy(tmp_path, 1, 2)
    flip_bit(tmp_path / "copies/step-00000002/__0_0.distcp", 100)
    shutil.rmtree(tmp_path / "run")
    with resumed(tmp_path, 1):
        assert "DAMAGED CHECKPOINT, the older step-00000001" in caplog.text


def test_a_storage_that_fails_at_the_start_ends_it(tmp_path: Path) -> None:
    """An older checkpoint would lose steps because of a network that may be back in a minute."""
    save(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000002")
    later = checkpoints(tmp_path)
    with (
        mock.patch.object(RemoteFolder, "download", side_effect=StorageError("cannot read X: 403")),
        pytest.raises(CheckpointError, match="cannot read X: 403"),
    ):
        later.resume()
    later.close()


class Outage:
    """Uploads fail while `is_on`."""

    def __init__(self) -> None:
        self.is_on = True
        self.upload = RemoteFolder.upload

    def __call__(self, storage: RemoteFolder, file: Path, name: str) -> None:
        if self.is_on:
            raise StorageError("cannot write X: expired token")
        self.upload(storage, file, name)


@pytest.fixture
def outage() -> Iterator[Outage]:
    outage = Outage()
    with mock.patch.object(RemoteFolder, "upload", lambda *arguments: outage(*arguments)):
        yield outage


def test_training_goes_on_while_storage_fails(tmp_path: Path, outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    saving = checkpoints(tmp_path)
    saving.save(1, {})
    until(lambda: "step-00000001 is not copied yet, training goes on: cannot write X: expired token" in caplog.text)
    saving.save(2, {})  # does not wait
    assert "step-00000002 is not copied: the copy of step-00000001 takes longer" in caplog.text
    outage.is_on = False
    wait_for_copy(saving, tmp_path, 1)
    saving.save(3, {})
    wait_for_copy(saving, tmp_path, 3)
    assert caplog.text.count("expired token") == 1
    outage.is_on = True
    saving.save(4, {})
    saving.close()  # tries once more, and ends
    assert "the run ends, and step-00000004 is not copied" in caplog.text
    assert steps_in(tmp_path / "copies") == [3, 1]


def test_a_copy_that_was_interrupted_is_made_when_the_run_goes_on(tmp_path: Path, outage: Outage) -> None:
    save(tmp_path, 1)
    assert steps_in(tmp_path / "copies") == []
    outage.is_on = False
    checkpoints(tmp_path).close()  # a run that loads nothing copies nothing
    assert steps_in(tmp_path / "copies") == []
    with resumed(tmp_path, 1):
        pass
    assert steps_in(tmp_path / "copies") == [1]
    with mock.patch.object(RemoteFolder, "upload", side_effect=AssertionError), resumed(tmp_path, 1):
        pass  # what is whole is not copied again


def test_a_folder_that_is_deleted_first_is_not_copied(tmp_path: Path, outage: Outage) -> None:
    saving = checkpoints(tmp_path, keep=1)
    for step in range(1, 5):
        saving.save(step, {})
    outage.is_on = False
    saving.close()
    assert steps_in(tmp_path / "copies") == [4]


def test_copies_are_kept_by_the_same_rules(tmp_path: Path) -> None:
    saving = checkpoints(tmp_path, keep=1, keep_every=4)
    for step in range(1, 7):
        saving.save(step, {})
        wait_for_copy(saving, tmp_path, step)
    saving.close()
    assert steps_in(tmp_path / "copies") == steps_in(tmp_path / "run/checkpoints")
    # A run that has lost its folder keeps the same ones.
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "copies/step-00000004" / PROVEN).write_text("{}")
    with resumed(tmp_path, 6, keep=1) as later:
        for step in (7, 8):
            later.save(step, {})
            wait_for_copy(later, tmp_path, step)
    assert steps_in(tmp_path / "copies") == [8, 4]


def test_marks_are_copied(tmp_path: Path) -> None:
    saving = checkpoints(tmp_path)
    for step in (1, 2):
        saving.save(step, {})
        wait_for_copy(saving, tmp_path, step)
    saving.judge(Health(step=3, skipped=3, validation_loss=None, is_lost=True, problem=""))
    copied = {step for step in (1, 2) if (tmp_path / f"copies/step-0000000{step}" / SUSPECT).exists()}
    assert copied == {1, 2}  # at once: the run ends now
    saving.close()


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    first = checkpoints(tmp_path)
    other = config.Checkpoint(remote=str(tmp_path / "copies"))
    model = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match="is in use by the run"):
        Checkpointer(other, tmp_path / "other", [model], torch.optim.SGD(model.parameters(), lr=0.1))
    first.close()
    Checkpointer(other, tmp_path / "other", [model], torch.optim.SGD(model.parameters(), lr=0.1)).close()
    assert json.loads((tmp_path / "copies" / FOLDER / "000002").read_text())["run"] == str(tmp_path / "other")


def test_a_run_that_was_followed_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was suspended for long: the copies, of the same steps, are another run's by now."""
    followed = checkpoints(tmp_path, 1.0)
    followed.save(1, {})
    wait_for_copy(followed, tmp_path, 1)
    before = {path: path.read_bytes() for path in (tmp_path / "copies/step-00000001").iterdir()}
    (tmp_path / "copies" / FOLDER / "000002").write_text("{}")
    followed.save(2, {})
    followed.judge(Health(step=3, skipped=3, validation_loss=None, is_lost=True, problem=""))
    followed.close()
    assert "belongs to another run by now" in caplog.text
    assert steps_in(tmp_path / "copies") == [1]
    assert {path: path.read_bytes() for path in (tmp_path / "copies/step-00000001").iterdir()} == before
    assert not (tmp_path / "copies/step-00000002").exists()


def test_a_run_that_is_followed_between_two_files_copies_no_more(tmp_path: Path) -> None:
    """As when it is suspended: what the other run has copied meanwhile stays."""
    upload = RemoteFolder.upload
    copied: list[str] = []

    def upload_and_follow(storage: RemoteFolder, file: Path, name: str) -> None:
        upload(storage, file, name)
        copied.append(name)
        (tmp_path / "copies" / FOLDER / "000002").write_text("{}")

    followed = checkpoints(tmp_path, 1.0)
    with mock.patch.object(RemoteFolder, "upload", upload_and_follow):
        followed.save(1, {})
        followed.close()
    assert len(copied) == 1


def test_a_manifest_whose_answer_was_lost_is_a_copy(tmp_path: Path) -> None:
    put = RemoteFolder.put_if_absent
    saving = checkpoints(tmp_path)
    with mock.patch.object(RemoteFolder, "put_if_absent", lambda *arguments: put(*arguments) and False):
        saving.save(1, {})
        wait_for_copy(saving, tmp_path, 1)
    saving.save(2, {})
    saving.close()
    assert steps_in(tmp_path / "copies")[0] == 2


def test_a_copy_in_the_way_is_named_as_a_copy(tmp_path: Path) -> None:
    """The run's folder is empty: another one would not help."""
    save(tmp_path, 1)
    shutil.rmtree(tmp_path / "run")
    later = checkpoints(tmp_path, resume="none")
    url = re.escape(f"{tmp_path}/copies/step-00000001")
    with pytest.raises(CheckpointError, match=f"{url} exists: use .*another run.folder and checkpoint.remote"):
        later.resume()
    later.close()


def test_without_a_url_nothing_is_copied(tmp_path: Path) -> None:
    assert type(checkpoints(tmp_path, remote="")._copies) is Copies


def _save_and_lose(folder: str, save: bool, url: str = "", variables: Mapping[str, str] | None = None) -> list[str]:
    """Save on all ranks, or resume; return the files that this rank has copied. url: "" for a folder."""
    root = Path(folder)
    group = dist.group.WORLD
    counted: list[str] = []
    name = "upload" if save else "download"
    copy: Callable[..., None] = getattr(RemoteFolder, name)

    def counting(self: RemoteFolder, first: Any, second: Any) -> None:
        counted.append(Path(first).name)
        copy(self, first, second)

    with (
        mock.patch.object(remote, "RemoteCopies", partial(remote.RemoteCopies, **FAST)),
        mock.patch.object(RemoteFolder, name, counting),
        mock.patch.dict("os.environ", variables or {}),
    ):
        saving = checkpoints(root, float(save), group=group, remote=url or str(root / "copies"))
        if save:
            saving.save(3, {})
        else:
            assert saving.resume() is not None
            assert weight(saving) == 1.0
        saving.close()
    return sorted(counted)


def test_ranks_share_the_files(tmp_path: Path) -> None:
    """In each direction every file is copied once, whatever the number of ranks."""
    saved = workers.run(_save_and_lose, 4, str(tmp_path), True)
    names = sorted(path.name for path in (tmp_path / "copies/step-00000003").iterdir() if path.name != MANIFEST)
    assert sorted(name for names_of_rank in saved for name in names_of_rank) == names
    assert len(names) == 5
    shutil.rmtree(tmp_path / "run")
    loaded = workers.run(_save_and_lose, 2, str(tmp_path), False)
    assert sorted(name for names_of_rank in loaded for name in names_of_rank) == names


def _save_over_an_older_attempt(folder: str, fails: bool) -> None:
    """Save where an attempt that was killed has copied files of the same names and sizes; rank 1 cannot copy."""
    failing = mock.patch.object(RemoteFolder, "upload", side_effect=StorageError("cannot write X: 503"))
    with (
        mock.patch.object(remote, "RemoteCopies", partial(remote.RemoteCopies, **FAST)),
        failing if fails and dist.get_rank() == 1 else nullcontext(),
    ):
        saving = checkpoints(Path(folder), 2.0 if fails else 1.0, group=dist.group.WORLD)
        saving.save(3, {})
        saving.close()


def test_files_of_an_older_attempt_are_not_taken_for_a_ranks_share(tmp_path: Path) -> None:
    workers.run(_save_over_an_older_attempt, 2, str(tmp_path), False)
    assert steps_in(tmp_path / "copies") == [3]
    (tmp_path / "copies/step-00000003" / MANIFEST).unlink()  # as if it had been killed before
    shutil.rmtree(tmp_path / "run")
    workers.run(_save_over_an_older_attempt, 2, str(tmp_path), True)
    assert steps_in(tmp_path / "copies") == []


def _beats_while_rank_1_copies(folder: str, save: bool) -> int:
    """Save or resume on two ranks, rank 1 slowly; return the heartbeats of this rank meanwhile."""
    name = "upload" if save else "download"
    copy: Callable[..., None] = getattr(RemoteFolder, name)

    def slow(self: RemoteFolder, first: Any, second: Any) -> None:
        time.sleep(0.2 * dist.get_rank())
        copy(self, first, second)

    with (
        mock.patch.object(remote, "RemoteCopies", partial(remote.RemoteCopies, **FAST)),
        mock.patch.object(remote, "LOOK", 0.01),
        mock.patch.object(RemoteFolder, name, slow),
        mock.patch.object(remote, "beat") as beat,
    ):
        saving = checkpoints(Path(folder), group=dist.group.WORLD)
        if save:
            saving.save(3, {})
        else:
            assert saving.resume() is not None
        saving.close()
    return beat.call_count


def test_a_rank_that_waits_for_copies_is_not_stuck(tmp_path: Path) -> None:
    for save in (True, False):
        beats = workers.run(_beats_while_rank_1_copies, 2, str(tmp_path), save)
        assert min(beats) >= 1
        assert beats[0] == beats[1]
        shutil.rmtree(tmp_path / "run")


def _save_in_background(folder: str) -> list[float]:
    """Return sums over the ranks that this thread computes while another one saves and copies."""
    sums = []
    with mock.patch.object(remote, "RemoteCopies", partial(remote.RemoteCopies, **FAST)):
        saving = checkpoints(Path(folder), group=dist.group.WORLD, asynchronous=True, keep=1)
        for step in range(1, 9):
            saving.save(step, {})
            for size in range(1, 40):
                numbers = torch.ones(size)
                dist.all_reduce(numbers)
                sums.append(float(numbers.sum()) / size)
        saving.close()
    return sums


def test_copies_in_the_background_do_not_disturb_messages_of_training(tmp_path: Path) -> None:
    for sums in workers.run(_save_in_background, 2, str(tmp_path)):
        assert set(sums) == {2.0}
    assert steps_in(tmp_path / "copies")[0] == 8


@pytest.mark.exhaustive
def test_ranks_share_the_files_in_a_bucket(tmp_path: Path) -> None:
    with s3_bucket() as bucket:  # the ranks may be older than its environment
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        for ranks, save in ((4, True), (2, False)):
            copied = workers.run(_save_and_lose, ranks, str(tmp_path), save, f"{bucket}/run", variables)
            assert sum(map(len, copied)) == 5
            shutil.rmtree(tmp_path / "run")


@pytest.mark.exhaustive
def test_training_goes_on_while_a_bucket_answers_wrongly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It refuses, fails or is slow while the run saves; then it refuses, or cuts its answers, while the run starts."""
    with s3_bucket() as bucket:
        copies = RemoteFolder(f"{bucket}/run")
        saving = checkpoints(tmp_path, 1.0, remote=copies.url, keep=0)
        for step, fault in enumerate(("403", "503", "slow"), start=1):
            Faults.fault = fault
            saving.save(step, {})  # does not wait
            name = manifests.step_folder(Path(), step).name
            if fault != "slow":
                until(lambda name=name: f"{name} is not copied yet, training goes on: cannot" in caplog.text, 60)
                assert f"{copies.url}/{name}" in caplog.text
            Faults.fault = ""
            until(lambda name=name: copies.exists(f"{name}/{MANIFEST}"), 60)
            until(lambda: saving._copies.in_use() is None)  # else the next is not copied
        saving.close()

        shutil.rmtree(tmp_path / "run")
        for fault in ("403", "cut"):
            Faults.fault = fault
            failing = checkpoints(tmp_path, remote=copies.url)
            with pytest.raises(CheckpointError, match=copies.url):
                failing.resume()
            failing.close()
            assert not manifests.step_folders(tmp_path / "run/checkpoints")
        Faults.fault = "slow"
        later = checkpoints(tmp_path, remote=copies.url)
        assert later.resume() is not None
        assert weight(later) == 1.0
        later.close()


SAVING = """
import sys
from pathlib import Path
from functools import partial
from tests.checkpoint.test_remote import FAST, checkpoints, remote

remote.RemoteCopies = partial(remote.RemoteCopies, **FAST)
saving = checkpoints(Path(sys.argv[1]), keep=2)
restored = saving.resume()
step = 0 if restored is None else restored.step
print(f"resumed {step}", flush=True)
while True:
    step += 1
    saving.save(step, {"position": step})
"""


@pytest.mark.exhaustive
def test_kills_leave_whole_copies(tmp_path: Path, trials: int) -> None:
    """A run is killed at moments of its save and copy; after each the copies are whole, and a run goes on from them."""
    moments = random.Random(1)
    last = 0
    for number in range(12 * trials):
        if number % 2:
            shutil.rmtree(tmp_path / "run/checkpoints", ignore_errors=True)  # but its owner's nonce goes with it
        run = subprocess.Popen([sys.executable, "-c", SAVING, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert run.stdout is not None
        resumed = int(run.stdout.readline().split()[1])
        assert resumed >= last, "a copy that was whole is lost"
        time.sleep(moments.uniform(0.05, 1))
        run.kill()
        run.wait()
        whole = [
            manifests.read_manifest(tmp_path / f"copies/step-{step:08d}") for step in steps_in(tmp_path / "copies")
        ]
        for manifest in whole:
            folder = manifests.step_folder(tmp_path / "copies", manifest.step)
            assert not check_files(folder, manifest)
        last = max((manifest.step for manifest in whole), default=0)
    assert last > 12
