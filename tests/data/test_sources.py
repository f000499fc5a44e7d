import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from torchllm.config import Source
from torchllm.data.error import DataError
from torchllm.data.sources import TextRecord, raw_mib, read_records, read_source, source_files


def read(source: Source, cache: Path, processes: int = 1) -> list[TextRecord]:
    dataset = read_source(source, cache / "cache", processes)
    return read_records(dataset, source, 0, len(dataset))


def test_stdlib_is_this_interpreters() -> None:
    names = [Path(path).name for path, _, _ in source_files(Source())]
    assert {"argparse.py", "dataclasses.py", "base_events.py"} <= set(names)
    assert not any("site-packages" in path or "/test/" in path for path, _, _ in source_files(Source()))
    assert source_files(Source()) == source_files(Source())
    assert (raw_mib(Source(), source_files(Source())) or 0) > 5


def test_text_files_are_documents_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"\xef\xbb\xbftwo\r\n")
    (tmp_path / "1.txt").write_text("one\n")
    found = read(Source(kind="text", path=f"{tmp_path}/**/*.txt"), tmp_path)
    assert [(row.text, row.bad) for row in found] == [("one\n", ""), ("two\r\n", "")]


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a[1].jsonl"  # a name that a glob would not find
    path.write_bytes(b'\xef\xbb\xbf{"body": "one"}\r\n\n{"id": 2, "body": "tw\\u00f6"}')
    found = read(Source(kind="jsonl", path=str(path), text_key="body"), tmp_path)
    assert found == [TextRecord("one", f"{path}:1"), TextRecord("twö", f"{path}:3")]


def test_parquet(tmp_path: Path) -> None:
    for name, texts in (("a", ["one", "two"]), ("b", ["three"])):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts, "id": [0] * len(texts)}), tmp_path / f"{name}.parquet"
        )
    found = read(Source(kind="parquet", path=f"{tmp_path}/*.parquet"), tmp_path, processes=2)
    assert [row.text for row in found] == ["one", "two", "three"]
    assert found[1].where == f"{tmp_path}/a.parquet row 1"


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


@pytest.mark.parametrize(("line", "bad"), BAD_LINES, ids=[f"{bad}-{i}" for i, (_, bad) in enumerate(BAD_LINES)])
def test_a_bad_line_is_named_and_reading_goes_on(tmp_path: Path, line: bytes, bad: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good too"}\n')
    first, second, third = read(Source(kind="jsonl", path=str(path)), tmp_path)
    assert (first.text, third.text) == ("good", "good too")
    assert (second.text, second.where, second.bad) == ("", f"{path}:2", bad)


@pytest.mark.parametrize(
    ("content", "line", "bad"),
    [(b"a\nb\xffc", ":2", "not UTF-8"), (b"a\n\nb\0", ":3", "NUL character"), (b"", "", "empty document")],
)
def test_a_bad_text_file_is_named_by_line(tmp_path: Path, content: bytes, line: str, bad: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    (row,) = read(Source(kind="text", path=str(path)), tmp_path)
    assert (row.where, row.bad) == (f"{path}{line}", bad)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_empty_missing_and_dangling_files(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match="no file matches"):
        source_files(Source(kind=kind, path=str(tmp_path / "missing")))  # type: ignore[arg-type]
    (tmp_path / "dangling.x").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty.x").touch()
    dangling, empty = read(Source(kind=kind, path=f"{tmp_path}/*.x"), tmp_path)  # type: ignore[arg-type]
    assert (dangling.where, dangling.bad) == (str(tmp_path / "dangling.x"), "unreadable file")
    assert empty.where == str(tmp_path / "empty.x")
    assert empty.bad == {"text": "empty document", "jsonl": "empty file", "parquet": "unreadable file"}[kind]


def test_bad_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "c.parquet")
    found = read(Source(kind="parquet", path=f"{tmp_path}/*.parquet"), tmp_path)
    assert [row.bad for row in found] == ["unreadable file", "wrong key", "", "not text"]
    assert found[3].where == f"{tmp_path}/c.parquet row 1"
