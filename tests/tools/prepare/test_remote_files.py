"""Texts in object storage: the same records as on this machine, and no failure of the storage is taken for one."""

import gzip
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest

from tests.s3 import s3_bucket
from tests.tools.prepare.test_sources import Read, read_all
from torchllm.config import Config, Data, Source
from torchllm.config.errors import DataError
from torchllm.data.corpus import Corpus
from torchllm.data.readers import ReaderSettings
from torchllm.data.tokenizer import load_tokenizer
from torchllm.runtime.storage import RemoteFolder, StorageError
from torchllm.tools.config.checks import problems
from torchllm.tools.prepare import remote_files
from torchllm.tools.prepare.build import write_corpus
from torchllm.tools.prepare.cache import plan_corpus
from torchllm.tools.prepare.chosen_files import source_files
from torchllm.tools.prepare.file_search import find_files
from torchllm.tools.prepare.open_source import open_raw_source

AHEAD = 100
"""bytes of a request in these tests"""


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "AHEAD", AHEAD)
    monkeypatch.setattr(remote_files, "WAITS", (0.0, 0.0))
    remote_files._range.cache_clear()


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=2)
    return file.getvalue()


TEXTS = [f"text {number}: {'äöü ' * number}" for number in range(9)]
LINES = "\n".join(json.dumps({"text": text}) for text in TEXTS).encode()
FILES: dict[str, tuple[Source, dict[str, bytes]]] = {
    "text": (
        Source(kind="text"),
        {"a.txt": b"one" * 99, "b/c.txt": "zwölf".encode(), "d.txt": b"", "e.md.gz": gzip.compress(b"x" * 300)},
    ),
    "delimiter": (Source(kind="text", delimiter="\n\n"), {"a.txt": "\n\n".join(TEXTS).encode()}),
    "jsonl": (
        Source(kind="jsonl"),
        {"a.jsonl": LINES, "b.jsonl.gz": gzip.compress(LINES), "bad.jsonl": b'{"text": 1}\n[]\n\xff'},
    ),
    "array": (Source(kind="jsonl"), {"a.json": json.dumps([{"text": text} for text in TEXTS]).encode()}),
    "parquet": (Source(kind="parquet"), {"a.parquet": parquet(TEXTS), "cut.parquet": parquet(TEXTS)[:50]}),
}


def write_all(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def at(source: Source, path: str) -> Source:
    return Source(kind=source.kind, path=path, delimiter=source.delimiter)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("shards", [1, 4])
def test_the_records_are_those_of_local_files(kind: str, shards: int, tmp_path: Path) -> None:
    source, files = FILES[kind]
    write_all(files, tmp_path)
    here = read_all(at(source, str(tmp_path)), shards)
    there = read_all(at(source, f"file://{tmp_path}"), shards)
    assert [Read(where.removeprefix("file://"), text, fault) for where, text, fault in there] == here


TREE = [
    "train.txt",
    "val/a.txt",
    "deep/er/b.txt",
    "test.txt",
    ".hidden/c.txt",
    "d.bin",
    "corpus/shards.bin",
    "corpus/e.txt",
]


@pytest.mark.parametrize(
    "path", ["", "/", "/*.txt", "/**/*.txt", "/deep", "/train.txt", "/*/*.txt", "/nothing", "/none/*"]
)
def test_the_files_are_those_of_a_local_folder(path: str, tmp_path: Path) -> None:
    write_all(dict.fromkeys(TREE, b"x"), tmp_path)
    here = find_files(f"{tmp_path}{path}", lambda name: name.endswith(".txt"))
    there = find_files(f"file://{tmp_path}{path}", lambda name: name.endswith(".txt"))
    assert [(file.path.removeprefix("file://"), file.split) for file in there.files] == [
        tuple(file) for file in here.files
    ]
    assert {name.removeprefix("file://"): kind for name, kind in there.outputs.items()} == here.outputs


def test_requests_do_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """Of a listing; a file is asked for before it is read and after it, and each of its bytes is read once."""
    write_all({f"{number:02d}.txt": b"x" * 250 for number in range(20)}, tmp_path)
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(RemoteFolder, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return original(*arguments)

        return call

    with mock.patch.multiple(RemoteFolder, **{name: counted(name) for name in ("find", "entry", "read")}):
        source = Source(kind="text", path=f"file://{tmp_path}")
        files = source_files(source)
        assert calls.count("find") == 1
        assert "entry" not in calls
        assert calls.count("read") <= 8 * 3  # some are looked at for JSON lines
        calls.clear()
        raw = open_raw_source(source, files)
        assert len([record for shard in raw.cut_shards(1) for record in raw.records(shard)]) == 20
    assert 18 * 3 <= calls.count("read") <= 20 * 3
    assert calls.count("entry") == 2 * 20


class Failing:
    """A storage that fails some times, then for good."""

    def __init__(self, times: int) -> None:
        self.left = times

    def read(self, folder: RemoteFolder, *arguments: Any) -> bytes:
        self.left -= 1
        if self.left >= 0:
            raise StorageError("cannot read a.jsonl.gz: 503")
        return ORIGINAL_READ(folder, *arguments)


ORIGINAL_READ = RemoteFolder.read


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"])
def test_a_failing_storage_is_no_bad_record(name: str, tmp_path: Path) -> None:
    """Which `data.on_bad_record` may skip: it is asked three times, then the preparation ends."""
    content = {"jsonl": LINES, "gz": gzip.compress(LINES), "txt": b"one", "parquet": parquet(TEXTS)}[
        name.rpartition(".")[2]
    ]
    write_all({name: content}, tmp_path)
    kind: Any = {"txt": "text", "parquet": "parquet"}.get(name.rpartition(".")[2], "jsonl")
    source = Source(kind=kind, path=f"file://{tmp_path}/{name}")
    expected = read_all(source)
    failing = Failing(2)
    remote_files._range.cache_clear()
    with mock.patch.object(RemoteFolder, "read", lambda *arguments: failing.read(*arguments)):
        assert read_all(source) == expected
        failing.left = 99
        remote_files._range.cache_clear()
        with pytest.raises(DataError, match="503"):
            read_all(source)


def test_a_preparation_that_a_storage_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that were finished are kept, and the corpus is the one of local files."""
    monkeypatch.setattr(remote_files, "AHEAD", 1000)  # a file is one request
    write_all({f"{number}.jsonl": LINES for number in range(6)}, tmp_path / "text")
    load = partial(load_tokenizer, "bytes")
    written = {}
    for path in (f"file://{tmp_path}/text", str(tmp_path / "text")):
        settings = ReaderSettings(Data(), 258, load())
        plan = plan_corpus(Source(kind="jsonl", path=path), settings, shard_mib=len(LINES) / 2**20)
        folder = tmp_path / f"corpus{len(written)}"
        if not written:
            reads = 0

            def failing(*arguments: Any) -> bytes:
                nonlocal reads
                reads += 1
                if reads > 3:
                    raise StorageError("cannot read 3.jsonl: 503")
                return ORIGINAL_READ(*arguments)

            with mock.patch.object(RemoteFolder, "read", failing), pytest.raises(DataError, match="503"):
                write_corpus(plan, load, folder)
            finished = {file: file.stat().st_mtime_ns for file in folder.glob("*.train.bin")}
            assert 0 < len(finished) < 6
        write_corpus(plan, load, folder)
        written[path] = {file.name: file.read_bytes() for file in folder.glob("*.bin")}
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    there, here = written.values()
    assert there == here


@pytest.mark.parametrize("is_read", [False, True])
def test_an_object_that_was_replaced_is_refused(is_read: bool, tmp_path: Path) -> None:
    """Before it is read, and between two of its requests."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(LINES)
    source = Source(kind="jsonl", path=f"file://{tmp_path}")
    raw = open_raw_source(source, source_files(source))
    (shard,) = raw.cut_shards(1)
    records = raw.records(shard)
    if is_read:
        next(records)
    file.write_bytes(LINES[: len(LINES) // 2].swapcase() + LINES[len(LINES) // 2 :])
    with pytest.raises(DataError, match=r"a\.jsonl was changed after the preparation had begun"):
        list(records)


def test_what_no_storage_has_is_refused() -> None:
    for source, words in (
        (Source(kind="megatron", path="s3://bucket/a"), "does not read: download it"),
        (Source(kind="text", path="https://host/a.txt"), "of the web, and no storage's: download"),
        (Source(kind="hub", path="https://huggingface.co/datasets/a/b"), "and this to its id"),
    ):
        found = problems(Config(data=Data(sources=(source,))), 1)
        assert [problem.key for problem in found if words in problem.message] == ["data.sources.0.path"]
    assert not problems(Config(data=Data(sources=(Source(kind="text", path="memory://bucket/a.txt"),))), 1)
    with pytest.raises(DataError, match=r"no file matches .*: the storage has no object of this name, or below it"):
        source_files(Source(kind="text", path="memory://nothing/a"))


@pytest.mark.exhaustive
def test_a_corpus_of_a_bucket_is_the_one_of_a_folder(tmp_path: Path) -> None:
    source, files = FILES["jsonl"]
    files = {name: content for name, content in files.items() if name != "bad.jsonl"}
    write_all(files, tmp_path / "text")
    corpora = []
    with s3_bucket() as bucket:
        folder = RemoteFolder(bucket)
        for name, content in files.items():
            folder.put(f"raw/{name}", content)
        for path in (f"{bucket}/raw/*.jsonl*", str(tmp_path / "text")):
            settings = ReaderSettings(Data(), 258, load_tokenizer("bytes"))
            plan = plan_corpus(at(source, path), settings)
            written = tmp_path / f"corpus{len(corpora)}"
            write_corpus(plan, lambda: load_tokenizer("bytes"), written, processes=2)
            corpora.append(written)
    names = sorted(path.name for path in corpora[1].iterdir() if path.suffix == ".bin")
    assert Corpus(str(corpora[0])).header.tokens > 2 * sum(map(len, TEXTS))
    for name in names:
        assert (corpora[0] / name).read_bytes() == (corpora[1] / name).read_bytes(), name
