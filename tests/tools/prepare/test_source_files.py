"""Which files of a raw source are read."""

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.data.corpus import Corpus
from torchllm.data.readers import ReaderSettings
from torchllm.data.shard import SPLITS
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.prepare.build import write_corpus
from torchllm.tools.prepare.cache import plan_corpus
from torchllm.tools.prepare.chosen_files import choose_files, source_files
from torchllm.tools.prepare.formats.in_place import describe_in_place, token_files
from torchllm.tools.prepare.hub_rows import raw_mib

ROOT = Path(__file__).parents[3]


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
    assert caplog.messages == [f"data.sources: 2 files in '{tmp_path}'; not read: 1 hidden, 1 without a suffix"]
    (tmp_path / "b.folder").mkdir()
    source_files(Source(kind="jsonl", path=f"{tmp_path}/b*"))
    assert caplog.messages[1:] == [f"data.sources: 1 files in '{tmp_path}/b*'; 1 folders that match are not read"]


def test_the_line_on_files_that_are_not_read_is_on_the_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.md", "c.toml", "d.toml", "e.csv", "runs/a/config.toml", "runs/a/metrics.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("some text")
    source_files(Source(kind="text", path="."))
    (line,) = caplog.messages
    assert f"`{line.removeprefix('data.sources: ')}`" in (ROOT / "docs/data.md").read_text()


def test_a_folder_of_text_is_the_text_files_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for name in ("a.txt", "deep/b.md.gz", "wiki_00", "mine.toml", "c.py", "deep/d.py", "runs/x/lease/000001"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("some text")
    source = Source(kind="text", path=str(tmp_path))
    texts = [file.path.removeprefix(f"{tmp_path}/") for file in source_files(source)]
    assert texts == ["a.txt", "deep/b.md.gz", "wiki_00"]
    assert caplog.messages == [
        f"data.sources: 3 files in '{tmp_path}' (1 .md.gz, 1 .txt, 1 without a suffix); not read: 2 .py, 1 .toml; left "
        f"out as output of torchllm: {tmp_path}/runs/x (a run)"
    ]
    for name in ("a.txt", "deep/b.md.gz", "wiki_00"):
        (tmp_path / name).unlink()
    glob = f"{tmp_path}/**/*.py"
    with pytest.raises(
        DataError, match=re.escape(f'2 .py, 1 .toml: to read these, name them in a glob, path = "{glob}"')
    ):
        source_files(source)
    assert len(source_files(Source(kind="text", path=glob))) == 2
    assert caplog.messages[-1].startswith(f"data.sources: 2 files in '{glob}' (2 .py); left out")
    (tmp_path / "rows.parquet").touch()
    with pytest.raises(DataError, match=r"that ends with .jsonl or .ndjson or .json, but .*: set kind = \"parquet\""):
        source_files(Source(kind="jsonl", path=str(tmp_path)))


def test_json_lines_that_are_read_as_text_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"text": "one"}\n{"text": "two"}\n')
    source = Source(kind="text", path=str(tmp_path))
    with pytest.raises(DataError, match=r'holds JSON lines, .* set kind = "jsonl", and text_key to the key'):
        source_files(source)
    (tmp_path / "b.txt").write_text('{"a": 1}\n"two"\n')
    assert len(source_files(source)) == 2


SPLIT_TEXTS = {"train-0": "red", "validation-0": "green", "dev/part": "blue", "test-0": "black", "latest": "white"}
KINDS = {"text": "txt", "delimited": "txt", "jsonl": "jsonl", "parquet": "parquet"}


def write_splits(folder: Path, kind: str) -> Source:
    """Write files of a data set with splits, each with one document, the name of a color."""
    for name, text in SPLIT_TEXTS.items():
        path = folder / f"{name}.{KINDS[kind]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
        else:
            path.write_text(json.dumps({"text": text}) if kind == "jsonl" else text + "|" * (kind == "delimited"))
    if kind == "delimited":
        return Source(kind="text", path=str(folder), delimiter="|")
    return Source(kind=kind, path=str(folder))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_splits_by_name_are_those_of_the_corpus(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    source = write_splits(tmp_path / "set", kind)
    tokenizer = load_tokenizer("bytes")
    plan = plan_corpus(source, ReaderSettings(Data(validation_fraction=0.5), 258, tokenizer))
    folder, end = tmp_path / "set", KINDS[kind]
    assert caplog.messages == [
        f"data.sources: 2 files in '{folder}'; 2 files ({folder}/dev/part.{end}, {folder}/validation-0.{end}) held out "
        f"by name, in place of data.validation_fraction; 1 files ({folder}/test-0.{end}) left out as a test set"
    ]
    write_corpus(plan, partial(load_tokenizer, "bytes"), tmp_path / "out")
    corpus = Corpus(tmp_path / "out")
    texts = {}
    for split in SPLITS:
        ids = corpus.window(split, 0, corpus.tokens(split) - 1).ids.tolist()
        texts[split] = tokenizer.decode([token for token in ids if token < 256])
    assert texts == {"train": "whitered", "validation": "bluegreen"}
    assert corpus.header.plan["held_out"] == 2


def test_a_file_or_folder_that_is_named_is_trained(tmp_path: Path) -> None:
    source = write_splits(tmp_path / "set", "jsonl")
    for path in (f"{source.path}/test-0.jsonl", f"{source.path}/dev", f"{source.path}/test-*.jsonl"):
        chosen = choose_files(Source(kind="jsonl", path=path))
        assert (len(chosen.train), chosen.held_out) == (1, [])
    for name in ("train-0", "latest"):
        Path(source.path, f"{name}.jsonl").unlink()
    with pytest.raises(
        DataError, match=r"all of the 3 files at .* are for validation or a test, as .*: to train on them"
    ):
        choose_files(source)


@pytest.mark.parametrize("kind", ["jsonl", "nanogpt"])
def test_sources_to_evaluate_on_are_read_whole_whatever_the_names(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name in ("validation-0", "test-0", "train-0"):
        file = tmp_path / "set" / name
        if kind == "jsonl":
            file.with_suffix(".jsonl").write_text('{"text": "a"}\n')
        else:
            np.array([1, 2], "<u2").tofile(file.with_suffix(".bin"))
    source = Source(kind=kind, path=str(tmp_path / "set"))
    data = Data(validation=(source,), dtype="uint16", separator=0, cache=str(tmp_path / "cache"))
    if kind == "jsonl":
        plan = plan_corpus(source, ReaderSettings(data, 258, load_tokenizer("bytes")))
        assert (len(plan.files), plan.held_out) == (3, 0)
    else:
        description = describe_in_place(source, data, 258).read_text()
        assert all(f"/{name}-0.bin" in description for name in ("validation", "test", "train"))


def test_keys_of_corpora_without_splits_are_those_of_earlier_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one")
    os.utime("a.txt", (1, 1))
    plan = plan_corpus(Source(kind="text", path="a.txt"), ReaderSettings(Data(), 258, load_tokenizer("bytes")))
    assert plan.key == "3d5248bced54f7dc"  # as commit 8ca45ed made it


def test_token_files_are_split_by_the_same_names(tmp_path: Path) -> None:
    for name in ("train", "dev", "eval/a", "test", "contest"):
        path = tmp_path / f"{name}.bin"
        path.parent.mkdir(exist_ok=True)
        np.array([1, 2], "<u2").tofile(path)
    (tmp_path / "again").symlink_to(".")
    (tmp_path / "train.txt").touch()
    chosen = token_files(Source(kind="nanogpt", path=str(tmp_path)))
    names = [[Path(file.path).relative_to(tmp_path).as_posix() for file in files] for files in chosen]
    assert names == [["contest.bin", "train.bin"], ["dev.bin", "eval/a.bin"]]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4241003\n"


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "nanogpt"])
def test_a_pointer_of_git_lfs_or_a_pipe_is_no_data(kind: str, tmp_path: Path) -> None:
    name = {"nanogpt": "a.bin", "text": "a.txt"}.get(kind, f"a.{kind}")
    source = Source(kind=kind, path=str(tmp_path))  # type: ignore[arg-type]

    def choose() -> None:
        if kind == "nanogpt":
            describe_in_place(source, Data(dtype="uint16", separator=0, cache=str(tmp_path)), 300)
        else:
            choose_files(source)

    (tmp_path / name).write_text(POINTER)
    with pytest.raises(DataError, match=rf"{name} is a pointer of git-lfs in place of the file: run `git lfs pull`"):
        choose()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} is .*not a regular file"):
        choose()
