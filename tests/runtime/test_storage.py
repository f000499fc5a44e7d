"""On fsspec's memory, on a folder, and on a server of S3."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.s3 import s3_bucket
from torchllm.runtime.storage import RemoteFolder, StorageError, storage_problem


@pytest.fixture(params=["memory", "file", "path", pytest.param("s3", marks=pytest.mark.exhaustive)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    roots = {"memory": f"memory:/{tmp_path}", "file": f"file://{tmp_path}", "path": str(tmp_path)}
    with s3_bucket() if request.param == "s3" else nullcontext(roots.get(request.param)) as root:
        yield f"{root}/run/"


def test_objects(url: str, tmp_path: Path) -> None:
    storage = RemoteFolder(url)
    assert storage.sizes() == {}
    assert storage.folders() == []
    assert not storage.exists("step/a")
    storage.put("step/a", b"first")
    storage.put("step/a", b"second")
    local = tmp_path / "local"
    local.write_bytes(b"012345")
    storage.upload(local, "step/b")
    assert storage.sizes("step") == {"a": 6, "b": 6}
    assert storage.folders() == ["step"]
    assert storage.exists("step/a")
    assert storage.read("step/a") == b"second"
    assert storage.read("step/b", 2, 4) == b"23"
    storage.download("step/b", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"012345"
    storage.delete("step/a")
    storage.delete("step/a")
    storage.delete_folder("step")
    storage.delete_folder("step")
    assert storage.sizes("step") == {}


def test_one_of_several_writers_succeeds(url: str) -> None:
    storage = RemoteFolder(url)
    start = threading.Barrier(4)
    winners = []

    def write(number: int) -> None:
        start.wait()
        if storage.put_if_absent("owner/000001", b"%d" % number):
            winners.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert storage.read("owner/000001") == b"%d" % winners[0]


@pytest.mark.parametrize("put", ["put", "put_if_absent"])
def test_a_write_that_ends_midway_leaves_no_part(put: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full disk, or a kill, which would leave the temporary file."""
    folder = RemoteFolder(str(tmp_path))

    def write_half(file: Path, content: bytes) -> None:
        with file.open("xb") as opened:
            opened.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        with pytest.raises(StorageError, match=r"cannot write .*manifest\.json: .*No space left"):
            getattr(folder, put)("step-1/manifest.json", b"whole")
    assert not list((tmp_path / "step-1").iterdir())
    assert getattr(folder, put)("step-1/manifest.json", b"whole") in (None, True)
    assert folder.read("step-1/manifest.json") == b"whole"


def test_errors_name_the_object(url: str, tmp_path: Path) -> None:
    storage = RemoteFolder(url)
    with pytest.raises(StorageError, match=r"^cannot read \S+/run/step/none: "):
        storage.read("step/none")
    with pytest.raises(FileNotFoundError):  # of the local file
        storage.upload(tmp_path / "gone", "step/a")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("gs://bucket/run", "needs the package gcsfs: pip install gcsfs"),
        ("nope://bucket", "is no URL of a storage: Protocol not known: nope"),
        ("memory://run", ""),
    ],
)
def test_problems_of_urls(url: str, problem: str) -> None:
    assert storage_problem(url) == problem
    if problem:
        with pytest.raises(StorageError, match=problem):
            RemoteFolder(url)
