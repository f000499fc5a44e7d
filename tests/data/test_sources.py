import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from torchllm.config import Source
from torchllm.data.error import DataError
from torchllm.data.sources import TextRecord, raw_mib, read_records, read_source, source_files


def read(source: Source, cache: Path, processes: int = 1) -> list[TextRecord]:
    dataset = read_source(source, cache / "cache", processes)
    return read_records(dataset, source, 0, len(dataset))


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
    records = read(Source(kind="text", path=f"{tmp_path}/**/*.txt"), tmp_path)
    assert [record.text for record in records] == ["one\n", "two\r\n"]
    assert not any(record.fault for record in records)


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a[1].jsonl"  # a name that a glob would not find
    path.write_bytes(b'\xef\xbb\xbf{"body": "one"}\r\n\n{"id": 2, "body": "tw\\u00f6"}')
    records = read(Source(kind="jsonl", path=str(path), text_key="body"), tmp_path)
    assert records == [TextRecord("one", f"{path}:1"), TextRecord("twö", f"{path}:3")]


def test_parquet(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {"text": ["one", "two"], "id": [0, 0]})
    write_table(tmp_path / "b.parquet", {"text": ["three"], "id": [0]})
    records = read(Source(kind="parquet", path=f"{tmp_path}/*.parquet"), tmp_path, processes=2)
    assert [record.text for record in records] == ["one", "two", "three"]
    assert records[1].where == f"{tmp_path}/a.parquet row 1"


def test_hub_reads_whatever_datasets_loads(tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in ("one", "", "three")]
    (folder / "train.jsonl").write_text("\n".join(lines))
    source = Source(kind="hub", path=str(folder))
    assert read(source, tmp_path) == [
        TextRecord("one", f"{folder}[train] row 0"),
        TextRecord("", f"{folder}[train] row 1", "empty document"),
        TextRecord("three", f"{folder}[train] row 2"),
    ]
    with pytest.raises(DataError, match="no column 'body', it has: text"):
        read(Source(kind="hub", path=str(folder), text_key="body"), tmp_path)
    with pytest.raises(DataError, match="cannot load split 'nosuch'"):
        read(Source(kind="hub", path=str(folder), split="nosuch"), tmp_path)


def test_hub_without_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"cannot load split 'train' of 'nobody/nothing': .*[Hh]ub"):
        read(Source(kind="hub", path="nobody/nothing"), tmp_path)


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
    first, second, third = read(Source(kind="jsonl", path=str(path)), tmp_path)
    assert (first.text, third.text) == ("good", "good too")
    assert second.text == ""
    assert second.where == f"{path}:2"
    assert second.fault == fault


@pytest.mark.parametrize(
    ("content", "line", "fault"),
    [(b"a\nb\xffc", ":2", "not UTF-8"), (b"a\n\nb\0", ":3", "NUL character"), (b"", "", "empty document")],
)
def test_a_bad_text_file_is_named_by_line(tmp_path: Path, content: bytes, line: str, fault: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    (record,) = read(Source(kind="text", path=str(path)), tmp_path)
    assert record.where == f"{path}{line}"
    assert record.fault == fault


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
    dangling, empty = read(Source(kind=kind, path=f"{tmp_path}/*.x"), tmp_path)  # type: ignore[arg-type]
    assert dangling.where == str(tmp_path / "dangling.x")
    assert dangling.fault == "unreadable file"
    assert empty.where == str(tmp_path / "empty.x")
    assert empty.fault == {"text": "empty document", "jsonl": "empty file", "parquet": "unreadable file"}[kind]


def test_bad_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    write_table(tmp_path / "b.parquet", {"body": ["x"]})
    write_table(tmp_path / "c.parquet", {"text": ["x", None]})
    records = read(Source(kind="parquet", path=f"{tmp_path}/*.parquet"), tmp_path)
    assert [record.fault for record in records] == ["unreadable file", "wrong key", "", "not text"]
    assert records[3].where == f"{tmp_path}/c.parquet row 1"
