"""A corpus in object storage is read as one in a folder; the storage is a folder, or fails as a test says."""

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.tools.prepare.test_build import BYTES, plan_for, write_documents
from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.data import best_fit, checked_file, remote_shards
from torchllm.data.best_fit import BestFitCorpus
from torchllm.data.checked_file import DamagedFile
from torchllm.data.corpus import Corpus, close_shards
from torchllm.data.readers import ReaderSettings, reader_of
from torchllm.data.shard import SPLITS
from torchllm.runtime.storage import RemoteFolder, StorageError
from torchllm.tools.prepare.build import write_corpus

LENGTH = 500


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    """Blocks of 4 KiB, so that a shard of a test has several."""
    with (
        mock.patch.object(checked_file, "BLOCK", 4096),
        mock.patch.object(remote_shards, "BLOCK", 4096),
        mock.patch("torchllm.data.corpus_header.BLOCK", 4096),
        mock.patch("torchllm.tools.prepare.corpus_writer.BLOCK", 4096),
        mock.patch.object(remote_shards, "WAITS", (0.01, 0.01)),
    ):
        yield
    close_shards()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus whose bucket is this folder."""
    target = tmp_path / "bucket"
    write_corpus(plan_for(write_documents(tmp_path, 300), validation_fraction=0.2), BYTES, target)
    return target


def opened(folder: Path, cache: Path) -> Corpus:
    return Corpus(remote_shards.copy_description(f"file://{folder}", cache))


class Requests:
    """Counts what is read of the storage; fails while `error` is set."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.error = ""
        self.read = RemoteFolder.read

    def __call__(self, storage: RemoteFolder, name: str, start: int | None = None, end: int | None = None) -> bytes:
        self.names.append(name)
        if self.error:
            raise StorageError(self.error)
        return self.read(storage, name, start, end)


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    with mock.patch.object(RemoteFolder, "read", lambda *arguments: requests(*arguments)):
        yield requests


def windows(corpus: Corpus) -> list[tuple[list[int], list[int], int, int]]:
    result = []
    for split in SPLITS:
        for number in range(corpus.count(split, LENGTH)):
            for piece in (None, range(100, 200)):
                window = corpus.window(split, number, LENGTH, piece)
                result.append((window.ids.tolist(), window.begins.tolist(), window.document, window.position))
    return result


def test_it_is_read_as_in_a_folder(folder: Path, tmp_path: Path) -> None:
    here, remote = Corpus(folder), opened(folder, tmp_path / "cache")
    assert remote.fingerprint == here.fingerprint
    assert remote.describe() == here.describe()
    assert windows(remote) == windows(here)
    assert remote.check() == {}  # nothing waits to be verified: blocks are as they are read
    copied = pickle.loads(pickle.dumps(remote))
    assert windows(copied) == windows(here)


def test_best_fit_reads_it(folder: Path, tmp_path: Path) -> None:
    remote = remote_shards.copy_description(str(folder), tmp_path / "cache")
    here, there = (BestFitCorpus(place, None, LENGTH, tmp_path / place.name) for place in (folder, remote))
    assert there.count("train", LENGTH) == here.count("train", LENGTH)
    there.read_ahead("train", [0, 1], LENGTH)
    for number in (0, here.count("train", LENGTH) - 1):
        ids = there.window("train", number, LENGTH).ids
        assert np.array_equal(ids, here.window("train", number, LENGTH).ids)


def test_best_fit_reads_ahead(
    folder: Path, tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What groups are packed from at once, then the ids, so that a sequence makes no request."""
    monkeypatch.setattr(best_fit, "PACKED_TOGETHER", 16)
    remote = remote_shards.copy_description(str(folder), tmp_path / "cache")
    count = BestFitCorpus(remote, None, LENGTH, tmp_path / "counts").count("train", LENGTH)
    close_shards()
    shutil.rmtree(remote / "00000.train.bin")
    corpus = BestFitCorpus(remote, None, LENGTH, tmp_path / "counts")
    numbers = [0, count // 2, count - 1]
    requests.names.clear()
    with mock.patch.object(remote_shards, "fetch", side_effect=remote_shards.fetch) as fetch:
        corpus.read_ahead("train", numbers, LENGTH)
    assert fetch.call_count == 2
    assert 2 < len(requests.names) == len(list((remote / "00000.train.bin").iterdir()))  # none twice
    requests.names.clear()
    for number in numbers:
        corpus.window("train", number, LENGTH)
    assert requests.names == []


def test_a_block_is_read_once(folder: Path, tmp_path: Path, requests: Requests) -> None:
    remote = opened(folder, tmp_path / "cache")
    assert sorted(requests.names) == ["corpus.json", "shards.bin", "sums.bin"]
    requests.names.clear()
    remote.read_ahead("train", [3, 4, 3], LENGTH)
    ahead = len(requests.names)
    assert 0 < ahead <= 4
    for _ in range(2):
        remote.window("train", 3, LENGTH)
    assert len(requests.names) <= ahead + 1  # the documents' begins
    first = windows(remote)
    requests.names.clear()
    close_shards()  # as a later run
    assert windows(opened(folder, tmp_path / "cache")) == first
    assert requests.names == ["corpus.json"]


def test_a_damaged_block_is_refused_and_one_in_the_cache_is_read_again(folder: Path, tmp_path: Path) -> None:
    remote = opened(folder, tmp_path / "cache")
    before = windows(remote)
    block = remote.folder / "00000.train.bin" / "000000"
    content = bytearray(block.read_bytes())
    content[10] ^= 1
    block.write_bytes(content)
    assert windows(remote) == before  # the storage has the right one
    stored = folder / "00000.train.bin"
    stored.write_bytes(bytes(content) + stored.read_bytes()[len(content) :])
    block.unlink()
    with pytest.raises(DamagedFile, match=r"00000\.train\.bin is damaged: its bytes 0 to 4,095 do not have"):
        windows(remote)


def test_a_corpus_that_was_prepared_again_is_another_one(folder: Path, tmp_path: Path) -> None:
    first = opened(folder, tmp_path / "cache")
    windows(first)
    shutil.rmtree(folder)
    write_corpus(plan_for(write_documents(tmp_path, 200), validation_fraction=0.2), BYTES, folder)
    second = opened(folder, tmp_path / "cache")
    assert second.fingerprint != first.fingerprint
    assert windows(second) == windows(Corpus(folder))


def test_an_outage_is_waited_for(folder: Path, tmp_path: Path, requests: Requests) -> None:
    remote = opened(folder, tmp_path / "cache")
    requests.error = "cannot read X: 503"
    with pytest.raises(DataError, match="cannot read X: 503"):
        remote.window("train", 0, LENGTH)

    def recover(seconds: float) -> None:
        requests.error = ""

    requests.names.clear()
    with mock.patch("torchllm.data.remote_shards.time.sleep", recover):
        assert len(remote.window("train", 0, LENGTH).ids) == LENGTH + 1


def test_a_full_disk_is_no_end(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, remote = Corpus(folder), opened(folder, tmp_path / "cache")
    with mock.patch.object(remote_shards, "write_whole", side_effect=OSError(28, "No space left on device")):
        assert windows(remote) == windows(here)
    assert "the cache cannot be written, training goes on: No space left on device" in caplog.text


def test_the_oldest_blocks_leave(folder: Path, tmp_path: Path) -> None:
    remote = opened(folder, tmp_path / "cache")
    before = windows(remote)
    for number in range(40):
        (remote.folder / f"00000.train.bin/{900 + number:06d}").touch()
    blocks = sorted(remote.folder.glob("*.bin/*"))
    usage = shutil.disk_usage(tmp_path)._replace(total=400 * 4096)
    enough = 40 * 4096
    for free, deleted in ((0, -(-len(blocks) // 10)), (enough - 4096, 1 + 2), (enough, 0)):
        before_it = sorted(remote.folder.glob("*.bin/*"))
        usage_then = usage._replace(free=free)
        with mock.patch("torchllm.data.remote_shards.shutil.disk_usage", return_value=usage_then):
            remote_shards.make_room(remote.folder)
        assert len(before_it) - len(list(remote.folder.glob("*.bin/*"))) == deleted
    assert windows(remote) == before


def write_blocks(file: Path, count: int, time: int) -> list[Path]:
    """Write blocks of a shard, each a second after the one before."""
    file.mkdir(parents=True, exist_ok=True)
    blocks = [file / f"{number:06d}" for number in range(count)]
    for second, block in enumerate(blocks, time):
        block.touch()
        os.utime(block, (second, second))
    return blocks


def test_blocks_of_earlier_corpora_leave_and_those_of_other_users_stay(tmp_path: Path) -> None:
    theirs = write_blocks(tmp_path / "theirs/00000.train.bin", 10, 0)
    earlier = write_blocks(tmp_path / "earlier/00000.train.bin", 10, 100)
    now = write_blocks(tmp_path / "now/00000.train.bin", 10, 200)
    with (
        mock.patch("torchllm.data.remote_shards.shutil.disk_usage", return_value=mock.Mock(total=2**40, free=0)),
        mock.patch("torchllm.data.remote_shards.os.access", lambda path, mode: path.parent.name != "theirs"),
    ):
        remote_shards.make_room(tmp_path / "now")
    assert [block.exists() for block in theirs + earlier + now] == [True] * 10 + [False] * 2 + [True] * 18


def test_blocks_are_listed_once_for_many_that_are_written(tmp_path: Path) -> None:
    """On a disk of 1,000 blocks, of which 100 stay free: room is made for 5 more."""
    write_blocks(tmp_path / "a/00000.train.bin", 900, 0)
    left, lists = 900, 0
    for number in range(25):
        (tmp_path / f"a/00000.train.bin/{900 + number:06d}").touch()
        left += 1
        usage = mock.Mock(total=1000 * 4096, free=(1000 - left) * 4096)
        with mock.patch("torchllm.data.remote_shards.shutil.disk_usage", return_value=usage):
            remote_shards.make_room(tmp_path / "a")
        before, left = left, len(os.listdir(tmp_path / "a/00000.train.bin"))
        lists += left < before
    assert lists == 5
    assert left <= 900


def test_a_block_that_another_process_deletes_first_is_no_fault(folder: Path, tmp_path: Path) -> None:
    remote = opened(folder, tmp_path / "cache")
    windows(remote)
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    deleted = sorted(remote.folder.glob("*.bin/*"))[:1]

    def sorted_later(blocks: Iterator[Path], **arguments: Any) -> list[Path]:
        found = list(blocks)
        deleted[0].unlink()
        return sorted(found, **arguments)

    with (
        mock.patch("torchllm.data.remote_shards.shutil.disk_usage", return_value=usage),
        mock.patch.object(remote_shards, "sorted", sorted_later, create=True),
    ):
        remote_shards.make_room(remote.folder)


def test_a_table_that_is_not_the_headers_is_refused(folder: Path, tmp_path: Path) -> None:
    content = (folder / "sums.bin").read_bytes()
    (folder / "sums.bin").write_bytes(content[:-1] + b"x")
    with pytest.raises(DataError, match=r"sums\.bin is not as corpus\.json there says: delete both, and copy it again"):
        opened(folder, tmp_path / "cache")
    (folder / "sums.bin").write_bytes(content)
    opened(folder, tmp_path / "cache")  # nothing of it was kept


def test_the_reader_takes_a_url(folder: Path, tmp_path: Path) -> None:
    data = Data(sources=(Source(kind="tokens", path=f"file://{folder}"),), cache=str(tmp_path / "cache"))
    settings = ReaderSettings(data, 512, BYTES())
    reader = reader_of("tokens")
    sequences = reader.open(data.sources[0], reader.prepare(data.sources[0], settings), settings)
    assert sequences.fingerprint == Corpus(folder).fingerprint
    (folder / "corpus.json").unlink()
    with pytest.raises(DataError, match=r"cannot read file://.*/bucket/corpus\.json"):
        reader.prepare(data.sources[0], settings)
