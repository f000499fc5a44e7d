import gzip
import io
import json
import os
import re
import tempfile
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.data.corpus import Corpus
from torchllm.data.corpus_header import read_description
from torchllm.data.readers import ReaderSettings
from torchllm.data.tokenizer import BEGIN, END, ByteTokenizer, load_tokenizer
from torchllm.tools.prepare import records, sources
from torchllm.tools.prepare.build import write_corpus
from torchllm.tools.prepare.cache import plan_corpus
from torchllm.tools.prepare.chosen_files import source_files
from torchllm.tools.prepare.formats.in_place import token_files
from torchllm.tools.prepare.hub_rows import HubRows
from torchllm.tools.prepare.open_source import open_raw_source
from torchllm.tools.prepare.plan import CorpusPlan
from torchllm.tools.prepare.record_form import TextForm
from torchllm.tools.prepare.records import TextRecord


def read(source: Source, shards: int = 1) -> list[TextRecord]:
    raw = open_raw_source(source, source_files(source))
    return [record for shard in raw.cut_shards(shards) for record in raw.records(shard)]


class Read(NamedTuple):
    where: str
    text: str
    fault: str = ""


def read_all(source: Source, shards: int = 1) -> list[Read]:
    return [Read(record.origin.describe(), record.text, record.fault) for record in read(source, shards)]


def write_table(path: Path, columns: dict[str, list[Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


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
    plan = plan_corpus(source, ReaderSettings(Data(), 258, load_tokenizer("bytes")))
    assert plan == plan_corpus(source, ReaderSettings(Data(), 258, load_tokenizer("bytes")))
    (folder / "train.jsonl").write_text('{"text": "another"}')
    os.utime(folder / "train.jsonl", (1, 1))
    assert plan_corpus(source, ReaderSettings(Data(), 258, load_tokenizer("bytes"))).key != plan.key


def write_hub_set(folder: Path, texts: list[str]) -> None:
    """Lay out a data set as the hub has it: two configurations, the default one of three files."""
    (folder / "default").mkdir(parents=True)
    for number in range(3):
        write_table(folder / "default" / f"train-{number}.parquet", {"text": texts[number::3], "id": texts[number::3]})
    (folder / "small").mkdir()
    write_table(folder / "small" / "only.parquet", {"text": ["of the subset"]})
    parts = ["- {config_name: default, data_files: default/*.parquet}", "- {config_name: small, data_files: small/*}"]
    (folder / "README.md").write_text("\n".join(["---", "configs:", *parts, "---"]))


class FakeHub:
    """A hub with one data set, a/b, whose commits are folders on this machine."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets
        import huggingface_hub

        self.folder = folder
        self.branches: dict[str | None, str] = {}
        """commit of each branch; None is the default one"""
        self.asked: list[str | None] = []
        """revisions whose commit was asked for"""
        self.opened: list[tuple[object, ...]] = []
        """configuration and revision of each opened set"""
        load = datasets.load_dataset_builder

        def dataset_info(api: object, path: str, revision: str | None) -> huggingface_hub.DatasetInfo:
            assert path == "a/b"
            self.asked.append(revision)
            return huggingface_hub.DatasetInfo(id=path, sha=self.branches[revision])

        def load_dataset_builder(path: str, name: str | None, revision: str) -> Any:
            assert path == "a/b"
            self.opened.append((name, revision))
            return load(str(self.folder / revision), name)

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
        monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "copies")

    def commit(self, commit: str, texts: list[str], branch: str | None = None) -> None:
        """Add a commit, and let a branch name it."""
        write_hub_set(self.folder / commit, texts)
        self.branches[branch] = commit


OLD, NEW = "0" * 40, "1" * 40
HUB_TEXTS = [f"text {number}" for number in range(10)]


def plan_of(source: Source, cache: Path) -> CorpusPlan:
    return plan_corpus(source, ReaderSettings(Data(cache=str(cache)), 258, load_tokenizer("bytes")))


def written_texts(folder: Path) -> list[list[str]]:
    """The documents of each shard of a corpus of bytes without held-out ones."""
    corpus = Corpus(folder)
    texts = []
    for number, tokens in enumerate(read_description(folder).columns["train"].tokens.tolist()):
        ids = corpus.open_shard("train", number).read_ids(0, tokens)
        text = load_tokenizer("bytes").decode(ids.tolist()).removeprefix(BEGIN)
        texts.append(text.removesuffix(END).split(END + BEGIN))
    return texts


def test_the_branch_of_a_hub_set_is_the_commit_that_it_was_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    hub.commit(OLD, HUB_TEXTS)
    source = Source(kind="hub", path="a/b")
    plan = plan_of(source, tmp_path)
    assert plan.source.revision == OLD
    hub.commit(NEW, ["other texts"] * 3)
    assert plan_of(source, tmp_path) == plan
    assert plan_of(replace(source, revision=OLD), tmp_path).key == plan.key
    assert hub.asked == [None]  # a commit asks nobody, and a restart needs no network
    hub.branches["v2"] = NEW
    other = plan_of(replace(source, revision="v2"), tmp_path)
    assert other.source.revision == NEW
    assert other.key != plan.key
    (tmp_path / "revisions" / "a--b@newest").unlink()
    assert plan_of(source, tmp_path).key == other.key
    assert hub.asked == [None, "v2", None]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_hub_set_streams_into_shards_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    hub.commit(OLD, HUB_TEXTS)
    plan = plan_corpus(
        Source(kind="hub", path="a/b"),
        ReaderSettings(Data(cache=str(tmp_path), validation_fraction=0.0), 258, ByteTokenizer()),
    )
    header = write_corpus(plan, partial(load_tokenizer, "bytes"), tmp_path / "corpus", processes)
    assert hub.opened == [(None, OLD)]
    assert header.shards == 3
    assert header.plan["source"]["revision"] == OLD
    assert written_texts(tmp_path / "corpus") == [HUB_TEXTS[0::3], HUB_TEXTS[1::3], HUB_TEXTS[2::3]]
    assert not list((tmp_path / "hub" / "copies").rglob("*.arrow"))


def test_the_subset_of_a_hub_set_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    hub.commit(OLD, HUB_TEXTS)
    source = Source(kind="hub", path="a/b", subset="small", revision=OLD)
    assert read_all(source) == [Read("a/b[train] row 0", "of the subset")]
    assert hub.opened == [("small", OLD)]
    source = Source(kind="hub", path="a/b", revision=OLD)
    assert read_all(source)[4] == Read("a/b[train] file 1 row 0", "text 1")


def test_files_of_a_hub_set_share_a_shard_where_its_size_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    hub.commit(OLD, HUB_TEXTS)
    raw = HubRows(Source(kind="hub", path="a/b", revision=OLD), TextForm("text"))
    assert (raw.total, raw.mib) == (3, 0.0)
    assert [(shard.start, shard.stop) for shard in raw.cut_shards(2)] == [(0, 1), (1, 2), (2, 3)]
    raw.mib = 100.0
    assert [(shard.start, shard.stop) for shard in raw.cut_shards(2)] == [(0, 1), (1, 3)]
    assert [(shard.start, shard.stop) for shard in raw.cut_shards(9)] == [(0, 1), (1, 2), (2, 3)]


def test_a_file_of_the_hub_that_breaks_off_is_a_clear_error(tmp_path: Path) -> None:
    write_hub_set(tmp_path / "set", HUB_TEXTS)
    raw = HubRows(Source(kind="hub", path=str(tmp_path / "set")), TextForm("text"))
    broken = tmp_path / "set" / "default" / "train-1.parquet"
    broken.write_bytes(broken.read_bytes()[:-20])
    first, second, _ = raw.cut_shards(3)
    assert len(list(raw.records(first))) == 4
    with pytest.raises(DataError, match=rf"cannot load split 'train' of '{tmp_path}/set': "):
        list(raw.records(second))


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


@settings(derandomize=True, max_examples=60, deadline=None)
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
    read_bytes = 0

    def readinto(self, buffer: Any, /) -> int | None:
        count = super().readinto(buffer)
        CountedFile.read_bytes += count or 0
        return count


def test_all_shards_of_a_file_together_read_it_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "0123456789"}\n' * 20_000)
    source = Source(kind="jsonl", path=str(path))
    assert open_raw_source(source, source_files(source)).mib == pytest.approx(path.stat().st_size / 2**20, rel=1e-4)
    block = 512

    def counted_open(name: str, buffering: int) -> io.BufferedReader:
        return io.BufferedReader(CountedFile(name), buffering)

    for shards in (1, 16, 64):
        CountedFile.read_bytes = 0
        with patch.object(sources, "BLOCK", block), patch.object(sources, "open_file", counted_open):
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


def test_a_batch_repeats_a_long_text_of_a_dictionary_in_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    write_table(path, {"text": ["long " * 2**14] * 600, "n": [*range(600)]})
    assert path.stat().st_size < 10_000
    rows = []
    rows_of = sources.TableFiles.rows_of

    def counted(self: sources.TableFiles, batch: pyarrow.RecordBatch, *place: Any) -> Any:
        rows.append(batch.num_rows)
        return rows_of(self, batch, *place)

    monkeypatch.setattr(sources.TableFiles, "rows_of", counted)
    for limit, most in ((2**28, 256), (2**20, 12)):
        monkeypatch.setattr(sources, "_DICTIONARY_BYTES", limit)
        rows.clear()
        assert len(read(Source(kind="parquet", path=str(path)))) == sum(rows) == 600
        assert most / 2 < max(rows) <= most


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


BAD_LINES = {
    b'{"text": "cut off': "broken JSON",
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": "a\\u0000b"}': "NUL character",
    b'{"body": "x"}': "wrong key",
    b'{"text": 7}': "not text",
    b'["text"]': "not a JSON object",
    b'{"text": " \\n"}': "empty document",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
    b"[" * 100_000: "broken JSON",
}


def test_bad_lines_are_named_and_reading_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(line + b'\n{"text": "good"}\n' for line in BAD_LINES))
    expected = []
    for number, fault in enumerate(BAD_LINES.values()):
        expected += [Read(f"{path}:{2 * number + 1}", "", fault), Read(f"{path}:{2 * number + 2}", "good")]
    assert read_all(Source(kind="jsonl", path=str(path))) == expected


def test_a_bad_text_file_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content, line, fault in (
        (b"a\nb\xffc", ":2", "not UTF-8"),
        (b"\xef\xbb\xbfa\n\xf0\x9f\x99\x82\nb\n\xf0\x9f", ":4", "not UTF-8"),
        (b"\xef\xbb\xbf\xc3\xb6\xc3\xb6\n\n\0", ":3", "NUL character"),
        (b"", "", "empty file"),
        (b" \n\t \r\n\xe3\x80\x80  ", "", "empty file"),
    ):
        path.write_bytes(content)
        for block in (2**20, 5, 1):
            with patch.object(records, "BLOCK", block):
                (record,) = read(Source(kind="text", path=str(path)))
            assert (record.origin.describe(), record.fault) == (f"{path}{line}", fault)


def test_a_large_text_file_is_checked_but_not_kept(tmp_path: Path) -> None:
    for number, mark in enumerate([b"", b"\xef\xbb\xbf"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = "naïve 日本語 🙂\r\n" * 10
        path = folder / "a.txt"
        path.write_bytes(mark + text.encode())
        source = Source(kind="text", path=str(path))
        (small,) = read(source)
        with patch.object(records, "IN_MEMORY", 100), patch.object(records, "BLOCK", 7):
            (large,) = read(source)
            assert large.is_long, mark
            assert "".join(large.blocks()) == text, mark
        assert not small.is_long, mark
        assert (small.text, large.text) == (text, ""), mark
        assert small._replace(text="") == large, mark
        assert small.size == len(text.encode()), mark


DELIMITED = st.lists(st.sampled_from(["a", "bc", "\n", "\n\n", "\n\n\n", "<|s|>", "<", " ", "é"]), max_size=12)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(texts=st.lists(DELIMITED.map("".join), min_size=1, max_size=3), shards=st.integers(1, 40))
@pytest.mark.parametrize(("delimiter", "split"), [("\n\n", r"\n\n+"), ("<|s|>", r"<\|s\|>")])
def test_documents_between_delimiters_do_not_depend_on_the_cut(
    delimiter: str, split: str, texts: list[str], shards: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.object(sources, "BLOCK", 7):
        expected = []
        for number, text in enumerate(texts):
            Path(folder, f"{number}.txt").write_text(text)
            found = [document for document in re.split(split, text) if document.strip()]
            expected += found or ([] if text.strip() else [""])
        source = Source(kind="text", path=f"{folder}/*.txt", delimiter=delimiter)
        documents = read(source, shards)
        assert [document.text for document in documents] == expected
        for document in documents:
            if document.text:
                assert (document.origin.byte is None) == (delimiter not in Path(document.origin.name).read_text())
                content = Path(document.origin.name).read_bytes()[document.origin.byte or 0 :]
                assert content.startswith(document.text.encode())


def test_a_bad_document_between_delimiters_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo\n\xff\n\nthree")
    one, two, three = read(Source(kind="text", path=str(tmp_path), delimiter="\n\n"))
    assert (one.text, two.fault, three.text) == ("one", "not UTF-8", "three")
    assert two.origin.describe() == f"{tmp_path}/a.txt:4"


@pytest.mark.parametrize("kind", ["text", "megatron"])
def test_a_path_that_is_no_path_is_named(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d[x]").mkdir()
    (tmp_path / "d[x]/a.txt").touch()
    find = source_files if kind == "text" else token_files
    for path, words in (
        ("$DATA/a.jsonl", "variables in it are not replaced"),
        ("{a,b}.jsonl", r"braces are no part of a glob: give one \[\[data.sources\]\] table per path"),
        ('["a.jsonl", "b.jsonl"]', "it looks like a list: give one"),
        ("a.jsonl,b.jsonl", "if it is several paths, give one"),
        ("d[x]/*.txt", r"\[\.\.\.\] in it stands for one character: write 'd\[\[\]x\]/\*\.txt'"),
        ("e[x]/*.txt", "the path is relative to the folder where the command was started, /"),
        ("/nowhere/a.jsonl", "check the path"),
        ("a.jsonl", "the path is relative to the folder where the command was started, /"),
    ):
        with pytest.raises(DataError, match=rf"^data\.sources: no file .*: {words}"):
            find(Source(kind=kind, path=path))


def test_empty_missing_and_dangling_files(tmp_path: Path) -> None:
    for number, kind in enumerate(["text", "jsonl", "parquet"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(DataError, match="no file matches"):
            source_files(Source(kind=kind, path=str(folder / "missing")))
        if kind == "text":
            with pytest.raises(DataError, match="the folder is empty"):
                source_files(Source(kind=kind, path=str(folder)))
        else:
            (folder / "a.md").touch()
            with pytest.raises(DataError, match=r"the folder has no file that ends with \.(jsonl or |parquet)"):
                source_files(Source(kind=kind, path=str(folder)))
        (folder / "dangling.x").symlink_to(folder / "nowhere")
        (folder / "empty.x").touch()
        dangling, empty = read(Source(kind=kind, path=f"{folder}/*.x"))
        assert dangling.origin.describe() == str(folder / "dangling.x"), kind
        assert dangling.fault == "unreadable file", kind
        assert empty.origin.describe() == str(folder / "empty.x"), kind
        assert empty.fault == ("unreadable file" if kind == "parquet" else "empty file"), kind


def test_bad_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    write_table(tmp_path / "b.parquet", {"body": ["x"]})
    write_table(tmp_path / "c.parquet", {"text": ["x", None]})
    write_table(tmp_path / "d.parquet", {"text": [[1.0, 2.0]], "words": ["x"]})
    found = read(Source(kind="parquet", path=f"{tmp_path}/*.parquet"))
    assert [record.fault for record in found] == ["unreadable file", "wrong key", "", "not text", "wrong key"]
    assert found[3].origin.describe() == f"{tmp_path}/c.parquet row 1"
    assert found[4].detail.startswith(
        ": the column 'text' is no text, it has: text (list<element: double>), words (string)"
    )


def compressed(content: bytes, compression: str) -> bytes:
    """Return `content` in two frames of a compression; the first byte is in the first."""
    return _frame(content[:1], compression) + _frame(content[1:], compression)


def _frame(content: bytes, compression: str) -> bytes:
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, compression) as stream:
        stream.write(content)
    return packed.getvalue().to_pybytes()


COMPRESSIONS = ["gzip", "zstd", "bz2", "lz4"]


def test_a_compressed_file_is_what_is_in_it(tmp_path: Path) -> None:
    for number, ((source, content, texts), compression) in enumerate(
        product(
            [
                (Source(kind="jsonl"), b'\n{"text": "one"}\n{"text": "tw\xc3\xb6"}\n', ["one", "twö"]),
                (Source(kind="text", delimiter="\n\n"), b"\xef\xbb\xbfone\n\n\ntw\xc3\xb6", ["one", "twö"]),
                (Source(kind="text"), b"\xef\xbb\xbfone\n\xc3\xb6", ["one\nö"]),
                (Source(kind="jsonl"), b"\n \n", [""]),
            ],
            COMPRESSIONS,
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "a"  # the name does not say it
        source = replace(source, path=str(path))
        path.write_bytes(content)
        plain = read_all(source)
        path.write_bytes(compressed(content, compression))
        assert read_all(source) == read_all(source, shards=7) == plain, compression
        assert [record.text for record in plain] == texts, compression
        assert plain[0].fault == ("" if texts[0] else "empty file"), compression
        whole = path.read_bytes()
        for damaged in (whole[:-3], whole + b"no frame"):
            path.write_bytes(damaged)
            *_, last = read(source)
            assert last.fault == "unreadable file", compression
            assert last.detail.startswith(f" ({compression}, and damaged, cut off or followed by other bytes: "), (
                compression
            )


@pytest.mark.parametrize("delimiter", ["", "\n\n"])
def test_a_line_of_a_compressed_file_is_limited(
    tmp_path: Path, delimiter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LONGEST", 2**19)
    path = tmp_path / "long"
    source = Source(kind="text" if delimiter else "jsonl", path=str(path), delimiter=delimiter)
    path.write_bytes(gzip.compress(delimiter.encode() + b"a" * 2**20))
    (record,) = read(source)
    assert record.fault == "unreadable file"
    assert record.detail in (" (a line of over 524,288 bytes)", " (no delimiter in 524,288 bytes)")


FORMS = [
    (b"PK\x03\x04rest", "a zip archive: unpack it"),
    (b"a.txt".ljust(257, b"\0") + b"ustar\0", "a tar archive: unpack it"),
    (b"PAR1rest", 'parquet: set kind = "parquet"'),
    (b"\x93NUMPY\x01\0", "an array of numpy"),
    ('{"text": "one"}\n'.encode("utf-16"), "text in UTF-16 or UTF-32: convert it by iconv -t UTF-8"),
]


def test_a_file_of_another_form_is_named(tmp_path: Path) -> None:
    for number, (source, (content, words), packed) in enumerate(
        product([Source(kind="jsonl"), Source(kind="text"), Source(kind="text", delimiter="\n")], FORMS, [False, True])
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "a"
        path.write_bytes(gzip.compress(content) if packed else content + b"\n" * 100)
        (record,) = read(replace(source, path=str(path)), shards=5)
        assert (record.fault, record.detail) == ("file of another form", f": it is {words}"), packed


@pytest.mark.parametrize(
    ("content", "faults"),
    [
        (b'[{"text": "one"}, {"text": "two"}]', ["", ""]),
        (b'\xef\xbb\xbf\n[\n  {"text": "one"}\n]\n', [""]),
        (b'[{"text": "one"}]\n{"text": "two"}\n', ["not a JSON object", ""]),
    ],
)
def test_a_json_array_is_told_from_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, faults: list[str]
) -> None:
    path = tmp_path / "a b.json"
    for packed in (content, gzip.compress(content)):
        path.write_bytes(packed)
        found = read(Source(kind="jsonl", path=str(path)))
        assert [record.fault for record in found] == faults
    monkeypatch.setattr(sources, "_LARGEST_ARRAY", 10)
    found = read(Source(kind="jsonl", path=str(path)))
    assert [record.fault for record in found] == (["file of another form"] if faults[0] == "" else faults)
