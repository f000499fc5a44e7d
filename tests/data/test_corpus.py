import errno
import json
import os
import pickle
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.data.many_shards import TOKENS_PER_SHARD, counting, descriptors, write_many_shards
from tests.tools.prepare.test_build import BYTES, plan_for, write_documents
from torchllm.config import Source
from torchllm.config.errors import DataError
from torchllm.data import checked_file
from torchllm.data import corpus as corpus_module
from torchllm.data.checked_file import BLOCK, CheckedFile, CorpusFile, DamagedFile, has_sum
from torchllm.data.corpus import Corpus, close_shards
from torchllm.data.shard import SPLITS, OpenShard, ShardSize
from torchllm.data.synthetic import Synthetic
from torchllm.tools.prepare.build import write_corpus
from torchllm.tools.prepare.corpus_writer import ShardFileWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(plan_for(write_documents(tmp_path, 100), validation_fraction=0.2), BYTES, tmp_path / "c")
    return tmp_path / "c"


def test_a_pickled_corpus_is_its_folder(folder: Path) -> None:
    corpus = Corpus(folder)
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 1000
    copy = pickle.loads(pickled)
    assert np.array_equal(copy.window("train", 3, 50).ids, corpus.window("train", 3, 50).ids)


def test_the_fingerprint_is_of_the_content_not_the_place(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "moved")
    fingerprint = Corpus(moved).fingerprint

    def fingerprint_of(count: int, validation_fraction: float) -> str:
        target = tmp_path / f"{count}-{validation_fraction}"
        plan = plan_for(write_documents(tmp_path, count), validation_fraction=validation_fraction)
        write_corpus(plan, BYTES, target)
        return Corpus(target).fingerprint

    assert fingerprint_of(100, 0.2) == fingerprint
    assert len({fingerprint, fingerprint_of(100, 0.3), fingerprint_of(101, 0.2)}) == 3


def test_a_damaged_description_is_not_opened(folder: Path) -> None:
    header, table = folder / "corpus.json", folder / "shards.bin"
    good = header.read_text()
    content = json.loads(good)
    for text, message in (
        (good[:-10], "damaged"),
        ("{}", "format None"),
        (json.dumps(content | {"extra": 1}), "damaged"),
        (json.dumps(content | {"dtype": "<u4"}), "was changed"),
    ):
        header.write_text(text)
        with pytest.raises(DataError, match=rf"corpus\.json.* {message}"):
            Corpus(folder)
    header.write_text(good)
    columns = table.read_bytes()
    table.write_bytes(columns[:20])
    with pytest.raises(DataError, match=r"shards\.bin was changed"):
        Corpus(folder)
    table.unlink()
    with pytest.raises(DataError, match=r"shards\.bin cannot be read \(No such file"):
        Corpus(folder)
    table.write_bytes(columns[:-1] + b"?")
    corpus = Corpus(folder)  # it reads tokens and documents only
    with pytest.raises(DataError, match=r"shards\.bin was changed"):
        corpus.check()


def test_a_damaged_shard_is_found_by_the_check_and_at_first_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = folder / "00000.train.bin"
    content = tokens.read_bytes()
    for damage, message in (
        (lambda: tokens.write_bytes(content[:-2]), r"00000\.train\.bin is .* bytes, the corpus says"),
        (tokens.unlink, r"00000\.train\.bin is missing"),
    ):
        damage()
        with pytest.raises(DataError, match=message):
            Corpus(folder).check()
        with pytest.raises(DataError, match=message):
            Corpus(folder).window("train", 0, 10)
    tokens.write_bytes(content)
    corpus = Corpus(folder)
    corpus.check()
    last = corpus.count("train", 10) - 1
    corpus.window("train", last, 10)
    os.truncate(tokens, 100)
    with pytest.raises(DataError, match=r"00000\.train\.bin became shorter .* ends at byte 100"):
        corpus.window("train", last, 10)

    def fail(descriptor: int, count: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(DataError, match=r"00000\.train\.bin cannot be read at byte 0: Input/output error"):
        corpus.window("train", 0, 10)


def write_two_shards(folder: Path) -> Corpus:
    """Write a corpus of two shards of several MiB each into `folder` / "c"."""
    lines = [json.dumps({"text": f"{number} " * 2000}) for number in range(600)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    source = Source(kind="jsonl", path=str(folder / "a.jsonl"))
    write_corpus(plan_for(source, shard_mib=2.5, validation_fraction=0.1), BYTES, folder / "c")
    corpus = Corpus(folder / "c")
    assert corpus.header.shards == 2
    return corpus


def flip_bit(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))


class Hashed:
    """How many bytes of file contents this thread has hashed; stands for `has_sum`."""

    def __init__(self) -> None:
        self.bytes = 0
        self.thread = threading.get_ident()

    def __call__(self, block: bytes, checksum: np.void) -> bool:
        if threading.get_ident() == self.thread:  # the watch of an earlier test's files may still run
            self.bytes += len(block)
        return has_sum(block, checksum)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Hashed:
    counter = Hashed()
    monkeypatch.setattr(checked_file, "has_sum", counter)
    monkeypatch.setattr(corpus_module, "has_sum", counter)
    return counter


def test_a_damaged_block_is_found_when_it_is_first_read(tmp_path: Path) -> None:
    write_two_shards(tmp_path)
    train = tmp_path / "c" / "00000.train.bin"
    size = train.stat().st_size
    first_bytes = f"its bytes {BLOCK:,} to {2 * BLOCK - 1:,} do not have their checksum"
    flip_bit(train, BLOCK + 7)
    corpus = Corpus(tmp_path / "c")
    corpus.window("train", 0, 1000)
    for _ in range(2):  # it stays damaged
        with pytest.raises(DamagedFile, match=rf"00000\.train\.bin is damaged: {first_bytes}: copy or prepare"):
            corpus.window("train", 0, BLOCK // 2)
    close_shards()
    flip_bit(train, BLOCK + 7)
    flip_bit(train, size - 1)  # of the index of documents
    with pytest.raises(DamagedFile, match=f"to {size - 1:,} do not have"):
        Corpus(tmp_path / "c").window("train", 0, 1000)


def test_each_block_is_hashed_once_per_process_and_not_once_verified(tmp_path: Path, hashed: Hashed) -> None:
    write_two_shards(tmp_path)
    hashed.bytes = 0
    corpus = Corpus(tmp_path / "c", tmp_path / "records")
    sizes = {(split, number): corpus.bytes_of(split, number) for split in SPLITS for number in range(2)}
    sequences = corpus.count("train", 500)
    corpus.window("train", 3, 500)
    assert hashed.bytes <= 3 * BLOCK  # the block of the sequence, of its documents' begins, and of the index
    for _ in range(2):
        for number in np.random.default_rng(0).permutation(sequences):
            corpus.window("train", int(number), 500)
        close_shards()  # opening a file again does not check it again
    assert hashed.bytes == sizes["train", 0] + sizes["train", 1]

    unverified = corpus.check()
    assert len(unverified) == 4
    hashed.bytes = 0
    for shard in unverified:
        corpus.verify(*shard)
    assert hashed.bytes == sum(sizes.values())
    again = Corpus(tmp_path / "c", tmp_path / "records")
    assert not again.check()
    hashed.bytes = 0
    again.window("train", 3, 500)
    close_shards()
    assert hashed.bytes == 0
    with os.scandir(tmp_path / "records") as records:
        assert sum(record.stat().st_size for record in records) == 4 * 8

    os.utime(tmp_path / "c" / "00001.train.bin")
    assert list(Corpus(tmp_path / "c", tmp_path / "records").check()) == [("train", 1)]
    copy = shutil.copytree(tmp_path / "c", tmp_path / "copy")  # with the same times
    assert len(Corpus(copy, tmp_path / "records").check()) == 4


def test_a_file_verified_by_another_process_is_not_checked_any_more(tmp_path: Path, hashed: Hashed) -> None:
    write_two_shards(tmp_path)
    reader = Corpus(tmp_path / "c", tmp_path / "records")
    reader.window("train", 0, 500)
    close_shards()
    other = Corpus(tmp_path / "c", tmp_path / "records")
    for shard in other.check():
        other.verify(*shard)
    hashed.bytes = 0
    for number in range(reader.count("train", 5000)):
        reader.window("train", number, 5000)
    close_shards()
    assert hashed.bytes == 0


def test_verifying_names_every_damaged_block_and_damaged_sums(tmp_path: Path) -> None:
    corpus = write_two_shards(tmp_path)
    train = tmp_path / "c" / "00001.train.bin"
    for block in (0, 2):
        flip_bit(train, block * BLOCK)
    with pytest.raises(DamagedFile, match=r"0 to 1,048,575 do not have their checksum, nor do 1 other MiB") as raised:
        corpus.verify("train", 1)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.path) == (str(raised.value), train)
    flip_bit(tmp_path / "c" / "sums.bin", 0)
    with pytest.raises(DataError, match=r"sums\.bin was changed"):
        corpus.check()


def test_a_block_that_was_checked_is_checked_again_in_a_file_that_was_changed(tmp_path: Path) -> None:
    corpus = write_two_shards(tmp_path)
    corpus.window("train", 3, 500)
    close_shards()
    flip_bit(tmp_path / "c" / "00000.train.bin", 5)
    with pytest.raises(DamagedFile, match="its bytes 0 to"):
        corpus.window("train", 3, 500)
    close_shards()


def test_records_that_cannot_be_written_are_a_warning(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "records").write_text("a file, where a folder should be")
    corpus = Corpus(folder, tmp_path / "records")
    for shard in corpus.check():
        corpus.verify(*shard)
    assert not corpus.check()  # it knows itself what it has verified
    (record,) = caplog.records
    assert re.search(r"records/\w+-\w+ cannot be written \(.*\): the next run verifies", record.getMessage())


def test_an_id_that_the_corpus_does_not_have_is_named(folder: Path) -> None:
    """In an open file that was verified, whose sums are not looked at again."""
    corpus = Corpus(folder)
    for shard in corpus.check():
        corpus.verify(*shard)
    path = folder / "00000.train.bin"
    corpus.window("train", 3, 500)
    with path.open("r+b") as file:
        file.seek(2 * 1234)
        file.write(np.uint16(50_000).tobytes())
    message = r"00000\.train\.bin is damaged: at byte 2,468 is token id 50000, but the corpus has none over 257: copy"
    with pytest.raises(DamagedFile, match=message):
        corpus.window("train", 2, 500)
    corpus.window("train", 3, 500)


def test_the_documents_of_long_shards_are_found(tmp_path: Path) -> None:
    """Shards of many entries in the index, with documents longer and much shorter than its stride."""
    random = np.random.default_rng(0)
    lengths = [*random.integers(2, 40, size=20_000), 300_000, *random.integers(2, 2000, size=200)]
    path = tmp_path / "00000.train.bin"
    with path.open("wb") as file:
        writer = ShardFileWriter(file, "<u2")
        for length in lengths:
            writer.add(random.integers(256, size=int(length), dtype=np.uint16))
        writer.finish()
    size = ShardSize(writer.tokens, writer.documents, id_bytes=2)
    shard = OpenShard(CheckedFile(CorpusFile(path, size.file_bytes)), size, writer.largest_id)
    ids = np.fromfile(path, dtype="<u2", count=writer.tokens)
    begins = np.cumsum([0, *lengths[:-1]])
    for first in [0, 1, 65_535, 65_536, 65_537, 131_072, writer.tokens - 1, *random.integers(writer.tokens, size=50)]:
        for length in (1, 2000, 70_000):
            end = min(int(first) + length, writer.tokens)
            assert np.array_equal(shard.read_ids(int(first), end), ids[first:end])
            inside = (begins >= first) & (begins < end)
            assert np.array_equal(shard.read_begins(int(first), end), begins[inside])
    shard.close()


def test_tokens_behind_the_stream_are_of_another_document(folder: Path) -> None:
    """Those further ahead of the last sequence, of any split: none is of the other split."""
    corpus = Corpus(folder)
    for split in SPLITS:
        tokens = corpus.tokens(split)
        window = corpus.window(split, 0, tokens - 1, range(tokens + 2))
        assert (len(window.ids), window.ids[tokens:].tolist()) == (tokens + 3, [0, 0, 0])
        assert window.begins[-1] == tokens
        assert np.array_equal(window.ids[:tokens], corpus.window(split, 0, tokens - 1).ids)


def test_synthetic_is_a_function_of_split_and_number() -> None:
    source = Synthetic(1000)
    ids, begins, *_ = source.window("train", 2**39, 512)
    assert ids.shape == (513,)
    assert begins.tolist() == [0]
    longer = source.window("train", 2**39, 512, range(514))
    assert (len(longer.ids), np.array_equal(longer.ids[:513], ids)) == (515, True)
    piece = source.window("train", 2**39, 512, range(128, 256))
    assert np.array_equal(piece.ids, ids[128:257])
    assert (piece.begins.tolist(), piece.document, piece.position) == ([], 0, 128)
    assert np.array_equal(ids, Synthetic(1000).window("train", 2**39, 512).ids)
    assert ids.max() < 1000
    for different in (source.window("train", 1, 512), source.window("validation", 2**39, 512)):
        assert (ids == different.ids).mean() < 0.05


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("shards", [100, 1000])
def test_opening_reads_the_columns_and_holds_few_descriptors(tmp_path: Path, shards: int) -> None:
    folder = tmp_path / "c"
    write_many_shards(folder, shards)
    header_bytes = (folder / "corpus.json").stat().st_size
    assert header_bytes < 2000
    with counting(folder) as calls:
        before = bytes_read()
        corpus = Corpus(folder)
        assert bytes_read() - before < header_bytes + 32 * shards + 5000  # tokens and documents of both splits
        assert len(calls.opened) == 2
        for number in np.random.default_rng(0).integers(corpus.count("train", 300), size=100):
            corpus.window("train", int(number), 300)
        assert len(calls.opened) > 102  # sequences cross shards
        assert descriptors(folder) == 16
        calls.opened.clear()
        corpus.check()
    files = [Path(path).name for path in calls.opened]
    assert sum("train" in file for file in files) == shards
    assert sum("validation" in file for file in files) == 1  # of the only shard that has any


def test_shards_in_use_stay_open(tmp_path: Path) -> None:
    write_many_shards(tmp_path / "c", 40)
    corpus = Corpus(tmp_path / "c")
    with counting(tmp_path) as calls:
        for number in range(39):  # sequences of a shard each, and shard 0 between them
            corpus.window("train", number, TOKENS_PER_SHARD)
            corpus.window("train", 0, 10)
    opened = [Path(path).name for path in calls.opened if not path.endswith("sums.bin")]
    assert opened == [f"{number:05d}.train.bin" for number in range(40)]
