import errno
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchllm.config import Data, Source
from torchllm.data import records, sources
from torchllm.data.cache import plan_corpus
from torchllm.data.error import DataError
from torchllm.data.records import TextRecord
from torchllm.data.sources import ShardRange, open_raw_source, raw_mib, source_files
from torchllm.data.tokenizer import load_tokenizer


def read(source: Source, shards: int = 1) -> list[TextRecord]:
    raw = open_raw_source(source, source_files(source))
    return [record for shard in raw.cut_shards(shards) for record in raw.records(shard)]


class Read(NamedTuple):
    """What a test compares of a record."""

    where: str
    text: str
    fault: str = ""


def read_all(source: Source, shards: int = 1) -> list[Read]:
    return [Read(record.origin.describe(), record.text, record.fault) for record in read(source, shards)]


def write_table(path: Path, columns: dict[str, list[Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_stdlib_is_this_interpreters() -> None:
    files = source_files(Source())
    names = {Path(file.path).name for file in files}
    assert names >= {"argparse.py", "dataclasses.py", "base_events.py"}
    for file in files:
        assert "site-packages" not in file.path
        assert "/test/" not in file.path
    assert source_files(Source()) == files
    assert (raw_mib(Source(), files) or 0) > 5


def test_text_files_are_documents_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"\xef\xbb\xbftwo\r\n")
    (tmp_path / "1.txt").write_text("one\n")
    records = read(Source(kind="text", path=f"{tmp_path}/**/*.txt"))
    assert [record.text for record in records] == ["one\n", "two\r\n"]
    assert not any(record.fault for record in records)


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a[1].jsonl"  # a name that a glob would not find
    path.write_bytes(b'\xef\xbb\xbf{"body": "one"}\r\n\n{"id": 2, "body": "tw\\u00f6"}')
    records = read_all(Source(kind="jsonl", path=str(path), text_key="body"))
    assert records == [Read(f"{path}:1", "one"), Read(f"{path}:3", "twö")]


def test_parquet(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {"text": ["one", "two"], "id": [0, 0]})
    write_table(tmp_path / "b.parquet", {"text": ["three"], "id": [0]})
    records = read(Source(kind="parquet", path=f"{tmp_path}/*.parquet"), shards=5)
    assert [record.text for record in records] == ["one", "two", "three"]
    assert records[1].origin.describe() == f"{tmp_path}/a.parquet row 1"


def test_hub_reads_whatever_datasets_loads(tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in ("one", "", "three")]
    (folder / "train.jsonl").write_text("\n".join(lines))
    source = Source(kind="hub", path=str(folder))
    expected = [
        Read(f"{folder}[train] row 0", "one"),
        Read(f"{folder}[train] row 1", "", "empty document"),
        Read(f"{folder}[train] row 2", "three"),
    ]
    assert read_all(source) == read_all(source, shards=2) == expected
    with pytest.raises(DataError, match="no column 'body', it has: text"):
        read(Source(kind="hub", path=str(folder), text_key="body"))
    with pytest.raises(DataError, match="cannot load split 'nosuch'"):
        read(Source(kind="hub", path=str(folder), split="nosuch"))


def test_the_key_of_a_hub_source_has_its_revision(tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}')
    source = Source(kind="hub", path=str(folder))
    plan = plan_corpus(source, Data(), load_tokenizer("bytes"), 258)
    assert plan == plan_corpus(source, Data(), load_tokenizer("bytes"), 258)
    (folder / "train.jsonl").write_text('{"text": "another"}')
    os.utime(folder / "train.jsonl", (1, 1))
    assert plan_corpus(source, Data(), load_tokenizer("bytes"), 258).key != plan.key


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_under_the_hubs_cache_is_named(monkeypatch: pytest.MonkeyPatch, code: int, tmp_path: Path) -> None:
    import datasets

    def load(*arguments: object, **options: object) -> None:
        try:
            raise OSError(code, os.strerror(code))
        except OSError as error:
            raise datasets.exceptions.DatasetGenerationError("An error occurred while generating the data") from error

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    message = (
        rf"'a/b': An error .* data: .*{os.strerror(code)} \(data sets are kept in {tmp_path}/cache, [\d,]+ MiB free"
    )
    with pytest.raises(DataError, match=message):
        read(Source(kind="hub", path="a/b"))


def test_hub_without_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"cannot load split 'train' of 'nobody/nothing': .*[Hh]ub"):
        read(Source(kind="hub", path="nobody/nothing"))


LINES = [
    b"\n",
    b"  \r\n",
    b"nonsense\n",
    b'{"text": "\xff"}\n',
    b'{"text": "long ' + b"x" * 30 + b'"}\n',
    b'{"text": "cr"}\r\n',
]
CONTENTS = st.lists(
    st.sampled_from(LINES) | st.integers(0, 99).map(lambda number: b'{"text": "%d"}\n' % number), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(files=st.lists(CONTENTS, min_size=1, max_size=3), last_line_ends=st.booleans(), shards=st.integers(2, 60))
def test_records_of_json_lines_do_not_depend_on_the_cut(
    files: list[list[bytes]], last_line_ends: bool, shards: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.object(sources, "BLOCK", 7):
        for number, lines in enumerate(files):
            content = b"".join(lines)
            Path(folder, f"{number}.jsonl").write_bytes(content if last_line_ends else content.rstrip(b"\n"))
        source = Source(kind="jsonl", path=f"{folder}/*.jsonl")
        assert read_all(source, shards) == read_all(source)


class CountedFile(io.FileIO):
    """A file that adds up what is read of all such files."""

    read_bytes = 0

    def readinto(self, buffer: Any, /) -> int | None:
        count = super().readinto(buffer)
        CountedFile.read_bytes += count or 0
        return count


def test_all_shards_of_a_file_together_read_it_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "0123456789"}\n' * 20_000)
    source = Source(kind="jsonl", path=str(path))
    block = 512

    def counted_open(name: str, mode: str, buffering: int) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(CountedFile(name), buffering)

    for shards in (1, 16, 64):
        CountedFile.read_bytes = 0
        with patch.object(sources, "BLOCK", block), patch.object(sources, "open", counted_open, create=True):
            assert len(read(source, shards)) == 20_000
        assert path.stat().st_size <= CountedFile.read_bytes <= path.stat().st_size + shards * 3 * block


def test_records_of_text_and_parquet_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    for number, rows in enumerate([40, 1, 0, 25]):
        (tmp_path / f"{number}.txt").write_text("x" * rows)
        table = pyarrow.table({"text": [f"{number} {row}" for row in range(rows)], "other": ["y" * 50] * rows})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=4)
    (tmp_path / "4.parquet").write_bytes(b"no parquet at all, and long enough to be in more than one shard")
    kinds = (("text", "txt", 4), ("parquet", "parquet", 68))
    for kind, suffix, count in kinds:
        source = Source(kind=kind, path=f"{tmp_path}/*.{suffix}")  # type: ignore[arg-type]
        expected = read_all(source)
        assert len(expected) == count
        raw = open_raw_source(source, source_files(source))
        for shards in (2, 3, 7, 30):
            assert read_all(source, shards) == expected
            assert 1 < len(raw.cut_shards(shards)) <= shards


def test_a_row_group_is_in_the_shard_in_which_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {row}" for row in range(12)]}), path, row_group_size=4)
    source = Source(kind="parquet", path=str(path))
    raw = open_raw_source(source, source_files(source))
    assert [record.origin.describe() for record in read(source)] == [f"{path} row {row}" for row in range(12)]
    begin = pyarrow.parquet.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    first, rest = list(raw.records(ShardRange(0, 0, begin))), list(raw.records(ShardRange(1, begin, raw.total)))
    assert [record.text for record in first] == [f"row {row}" for row in range(4)]
    assert [record.origin.row for record in rest] == list(range(4, 12))


def test_a_file_that_changes_after_it_was_listed_is_an_error(tmp_path: Path) -> None:
    for kind in ("text", "jsonl", "parquet"):
        path = tmp_path / f"a.{kind}"
        path.write_text('{"text": "one"}\n')
        source = Source(kind=kind, path=str(path))  # type: ignore[arg-type]
        raw = open_raw_source(source, source_files(source))
        with path.open("a") as file:
            file.write('{"text": "two"}\n')
        with pytest.raises(DataError, match=rf"{path} was changed after the preparation had begun"):
            list(raw.records(raw.cut_shards(1)[0]))


BAD_LINES = [
    (b'{"text": "cut off', "broken JSON"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "a\\u0000b"}', "NUL character"),
    (b'{"body": "x"}', "wrong key"),
    (b'{"text": 7}', "not text"),
    (b'["text"]', "not a JSON object"),
    (b'{"text": " \\n"}', "empty document"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b"[" * 100_000, "broken JSON"),
]


@pytest.mark.parametrize(("line", "fault"), BAD_LINES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_line_is_named_and_reading_goes_on(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good too"}\n')
    first, second, third = read(Source(kind="jsonl", path=str(path)))
    assert (first.text, third.text) == ("good", "good too")
    assert second.text == ""
    assert second.origin.describe() == f"{path}:2"
    assert second.fault == fault


@pytest.mark.parametrize(
    ("content", "line", "fault"),
    [
        (b"a\nb\xffc", ":2", "not UTF-8"),
        (b"\xef\xbb\xbfa\n\xf0\x9f\x99\x82\nb\n\xf0\x9f", ":4", "not UTF-8"),
        (b"a\n\nb\0", ":3", "NUL character"),
        (b"\xef\xbb\xbf\xc3\xb6\xc3\xb6\n\n\0", ":3", "NUL character"),
        (b"", "", "empty document"),
        (b" \n\t \r\n\xe3\x80\x80  ", "", "empty document"),
    ],
)
def test_a_bad_text_file_is_named_by_line(tmp_path: Path, content: bytes, line: str, fault: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    for block in (2**20, 5, 1):
        with patch.object(records, "BLOCK", block):
            (record,) = read(Source(kind="text", path=str(path)))
        assert record.origin.describe() == f"{path}{line}"
        assert record.fault == fault


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_large_text_file_is_checked_but_not_kept(tmp_path: Path, mark: bytes) -> None:
    text = "naïve 日本語 🙂\r\n" * 10
    path = tmp_path / "a.txt"
    path.write_bytes(mark + text.encode())
    source = Source(kind="text", path=str(path))
    (small,) = read(source)
    with patch.object(records, "IN_MEMORY", 100), patch.object(records, "BLOCK", 7):
        (large,) = read(source)
        assert large.is_long
        assert "".join(large.blocks()) == text
    assert not small.is_long
    assert (small.text, large.text) == (text, "")
    assert small._replace(text="") == large
    assert small.size == len(text.encode())


def test_a_folder_is_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    for kind, pattern in (("text", "*.txt"), ("jsonl", "*.jsonl")):
        with pytest.raises(DataError) as caught:
            source_files(Source(kind=kind, path=str(tmp_path)))  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"data.sources: '{tmp_path}' is a folder; write '{tmp_path}/{pattern}' for the files in it"
        )


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_empty_missing_and_dangling_files(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match="no file matches"):
        source_files(Source(kind=kind, path=str(tmp_path / "missing")))  # type: ignore[arg-type]
    (tmp_path / "dangling.x").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty.x").touch()
    dangling, empty = read(Source(kind=kind, path=f"{tmp_path}/*.x"))  # type: ignore[arg-type]
    assert dangling.origin.describe() == str(tmp_path / "dangling.x")
    assert dangling.fault == "unreadable file"
    assert empty.origin.describe() == str(tmp_path / "empty.x")
    assert empty.fault == {"text": "empty document", "jsonl": "empty file", "parquet": "unreadable file"}[kind]


def test_bad_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    write_table(tmp_path / "b.parquet", {"body": ["x"]})
    write_table(tmp_path / "c.parquet", {"text": ["x", None]})
    records = read(Source(kind="parquet", path=f"{tmp_path}/*.parquet"))
    assert [record.fault for record in records] == ["unreadable file", "wrong key", "", "not text"]
    assert records[3].origin.describe() == f"{tmp_path}/c.parquet row 1"
