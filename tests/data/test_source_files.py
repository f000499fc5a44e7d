"""Which files of a raw source are read."""

from pathlib import Path

import pytest

from torchllm.config import Source
from torchllm.data.error import DataError
from torchllm.data.source_files import source_files
from torchllm.data.sources import raw_mib


def test_stdlib_is_this_interpreters() -> None:
    files = source_files(Source())
    names = {Path(file.path).name for file in files}
    assert names >= {"argparse.py", "dataclasses.py", "base_events.py"}
    for file in files:
        assert "site-packages" not in file.path
        assert "/test/" not in file.path
    assert source_files(Source()) == files
    assert (raw_mib(Source(), files) or 0) > 5


def test_a_folder_is_the_files_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("b.jsonl", "deep/er/a.jsonl", "README", ".git/c.jsonl", ".hidden.jsonl"):
        (tmp_path / name).write_text("{}")
    lines = source_files(Source(kind="jsonl", path=str(tmp_path)))
    assert [file.path for file in lines] == [f"{tmp_path}/b.jsonl", f"{tmp_path}/deep/er/a.jsonl"]
    assert caplog.messages == [
        f"data.sources: 2 files in '{tmp_path}'; 2 hidden ones and ones of another kind are not read"
    ]
    texts = source_files(Source(kind="text", path=str(tmp_path)))
    assert [Path(file.path).name for file in texts] == ["README", "b.jsonl", "a.jsonl"]


def test_json_lines_that_are_read_as_text_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"text": "one"}\n{"text": "two"}\n')
    source = Source(kind="text", path=str(tmp_path))
    with pytest.raises(DataError, match=r'holds JSON lines, .* set kind = "jsonl", and text_key to the key'):
        source_files(source)
    (tmp_path / "b.txt").write_text('{"a": 1}\n"two"\n')
    assert len(source_files(source)) == 2
