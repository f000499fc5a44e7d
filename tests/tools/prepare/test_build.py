import errno
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from tests.launched import children, ends
from tests.patience import until
from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.data.corpus import Corpus
from torchllm.data.readers import ReaderSettings
from torchllm.data.shard import SPLITS, Split
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.prepare import build, cache, records, tokenize_shard
from torchllm.tools.prepare.build import TokenizingProgress, shard_size_mib, warn_of_changes, write_corpus
from torchllm.tools.prepare.cache import plan_corpus, prepare_cached
from torchllm.tools.prepare.chosen_files import source_files
from torchllm.tools.prepare.corpus_writer import ShardFileWriter, first_noted
from torchllm.tools.prepare.counts import describe_corpus
from torchllm.tools.prepare.open_source import open_raw_source
from torchllm.tools.prepare.pieces import cut_pieces
from torchllm.tools.prepare.plan import CorpusPlan
from torchllm.tools.prepare.record_form import TextForm
from torchllm.tools.prepare.records import TextRecord
from torchllm.tools.prepare.source_files import stat_file
from torchllm.tools.prepare.sources import JsonLineFiles, ShardRange

BYTES = partial(load_tokenizer, "bytes")


def write_documents(folder: Path, count: int, size: int = 30) -> Source:
    lines = [json.dumps({"text": f"document {index} " + "x" * (index % size)}) for index in range(count)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return Source(kind="jsonl", path=str(folder / "a.jsonl"))


def plan_for(source: Source, vocab: int = 258, shard_mib: float = 64.0, **settings: Any) -> CorpusPlan:
    return plan_corpus(source, ReaderSettings(Data(**settings), vocab, load_tokenizer("bytes")), shard_mib)


def test_progress_is_told_to_the_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_documents(tmp_path, 100, size=1000)
    raw = open_raw_source(source, source_files(source))
    progress = TokenizingProgress(raw)
    progress.add(raw.total // 4)
    assert re.fullmatch(r"tokenizing: 25%, 0 MB of text, [\d.]+ MB/s", progress.describe())
    progress.finish(ShardRange(0, 0, raw.total // 2))
    assert progress.describe().startswith("tokenizing: 50%, ")
    raw.unit, raw.total = "files", 2
    assert TokenizingProgress(raw).describe().startswith("tokenizing: 0%, ")
    shown: list[Any] = []
    monkeypatch.setattr(build, "show_progress", shown.append)
    header = write_corpus(plan_for(source, shard_mib=0.05), BYTES, tmp_path / "c", processes=2)
    described, end = shown
    assert described.__self__.text_bytes() == header.text_bytes  # of all processes
    assert end is None


def documents(corpus: Corpus, split: Split) -> list[str]:
    """All documents of a split, decoded; also checks their begin and end."""
    if not corpus.tokens(split):
        return []
    window = corpus.window(split, 0, corpus.tokens(split) - 1)
    texts = []
    for document in np.split(window.ids, window.begins[1:]):
        assert (document[0], document[-1]) == (256, 257)
        texts.append(load_tokenizer("bytes").decode(document[1:-1].tolist()))
    return texts


def write_corpus_of(source: Source, folder: Path, **settings: Any) -> Corpus:
    write_corpus(plan_for(source, **settings), BYTES, folder)
    return Corpus(folder)


def test_every_document_is_in_one_split_which_its_text_decides(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 400)
    texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    one_shard = write_corpus_of(source, tmp_path / "one", validation_fraction=0.1)
    shards = write_corpus_of(source, tmp_path / "several", validation_fraction=0.1, shard_mib=0.002)
    assert one_shard.header.shards == 1
    assert shards.header.shards > 4
    held_out = documents(one_shard, "validation")
    assert 20 < len(held_out) < 70  # 40 expected, 5 standard deviations
    assert [text for text in texts if text not in held_out] == documents(one_shard, "train")
    assert [text for text in texts if text in held_out] == held_out
    assert documents(shards, "train") == documents(one_shard, "train")
    assert documents(shards, "validation") == held_out


def test_the_same_text_is_in_the_same_split_whatever_its_source(tmp_path: Path) -> None:
    texts = [f"text number {number}" for number in range(40)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n".join(reversed(lines + lines)))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts[5:]}), tmp_path / "c.parquet")
    for number, text in enumerate(texts):
        (tmp_path / f"{99 - number}.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    sources = [
        Source(kind="jsonl", path=str(tmp_path / "a.jsonl")),
        Source(kind="jsonl", path=f"{tmp_path}/*.jsonl"),
        Source(kind="parquet", path=str(tmp_path / "c.parquet"), text_key="body"),
        Source(kind="text", path=f"{tmp_path}/*.txt"),
    ]
    trained: set[str] = set()
    held_out: set[str] = set()
    for number, source in enumerate(sources):
        corpus = write_corpus_of(source, tmp_path / f"{number}", validation_fraction=0.3)
        trained.update(documents(corpus, "train"))
        held_out.update(documents(corpus, "validation"))
    assert 4 < len(held_out) < 20  # 12 expected
    assert not trained & held_out
    assert trained | held_out == set(texts)


def stream_of(corpus: Corpus) -> dict[Split, list[int]]:
    """The tokens of each split."""
    return {split: corpus.window(split, 0, corpus.tokens(split) - 1).ids.tolist() for split in SPLITS}


LONG_TEXT = "".join(f"line {number} of a book\n" for number in range(30_000))
FEW_DOCUMENTS = {
    "book": ("text", "", [LONG_TEXT]),
    "two files": ("text", "", ["one text. " * 400, "another. " * 30]),
    "chapters": ("text", "\n\n", ["chapter one " * 40 + "\n\n" + "chapter two " * 60]),
    "one long record": ("jsonl", "", [json.dumps({"text": "a record " * 900})]),
    "lines": ("jsonl", "", ["\n".join(json.dumps({"text": f"line {number}"}) for number in range(200))]),
}


@pytest.mark.parametrize(("kind", "delimiter", "texts"), FEW_DOCUMENTS.values(), ids=FEW_DOCUMENTS)
def test_of_few_documents_the_last_tokens_are_held_out(
    kind: Any, delimiter: str, texts: list[str], tmp_path: Path
) -> None:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.{kind}").write_text(text)
    source = Source(kind=kind, path=f"{tmp_path}/*.{kind}", delimiter=delimiter)
    all_of_it = write_corpus_of(source, tmp_path / "all", validation_fraction=0.0)
    plan = build.choose_split(plan_for(source, validation_fraction=0.02))
    write_corpus(plan, BYTES, tmp_path / "split")
    corpus = Corpus(tmp_path / "split")
    window = all_of_it.window("train", 0, all_of_it.tokens("train") - 1)
    place = len(window.ids) - int(len(window.ids) * 0.02)
    assert stream_of(corpus) == {"train": window.ids[:place].tolist(), "validation": window.ids[place:].tolist()}
    assert corpus.header.documents == all_of_it.header.documents
    held_out = corpus.window("validation", 0, corpus.tokens("validation") - 1)
    assert held_out.begins.tolist() == [begin - place for begin in window.begins.tolist() if begin >= place]
    assert corpus.window("validation", 0, 20, range(5, 10)).position == 5  # of the middle of a document
    assert corpus.describe().endswith(f"the last {len(window.ids) - place:,} held out")
    for shard in corpus.check():
        corpus.verify(*shard)


ABSENT = {
    "of Windows": ("\n\n", "\r\n\r\n", r'set it to "\\r\\n\\r\\n", which is there'),
    "of Unix": ("\r\n\r\n", "\n\n", r'set it to "\\n\\n", which is there'),
    "with backslashes": (r"\n--\n", "\n--\n", r'set it to "\\n--\\n", which is there'),
    "with blanks": ("\n\n", "\n \t\n", "blank lines hold blanks there, so remove these: sed -i"),
    "of another tokenizer": ("<|endoftext|>", "<|end_of_text|>", "set it to what is between two documents"),
}


@pytest.mark.parametrize(("delimiter", "end", "advice"), ABSENT.values(), ids=ABSENT)
def test_a_delimiter_that_is_nowhere_is_refused(delimiter: str, end: str, advice: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_bytes(f"some text{end}".encode() * 9)
    plan = plan_for(Source(kind="text", path=str(tmp_path), delimiter=delimiter), on_bad_record="skip")
    for use in (lambda: build.refuse_first(plan), lambda: write_corpus(plan, BYTES, tmp_path / "corpus")):
        with pytest.raises(DataError, match=f"is in none of the files, so each would be one document: {advice}"):
            use()


def test_files_without_the_delimiter_are_counted(tmp_path: Path) -> None:
    for name, end in (("a", "\n\n"), ("b", "\r\n\r\n"), ("c", "\n\n")):
        (tmp_path / f"{name}.txt").write_bytes(f"some text{end}".encode() * 9)
    (tmp_path / "d.txt").write_text("a long text. " * 60_000)
    header = write_corpus(
        plan_for(Source(kind="text", path=str(tmp_path), delimiter="\n\n")), BYTES, tmp_path / "corpus"
    )
    assert header.documents == 20
    assert describe_corpus(header) == ['the delimiter "\\n\\n" is not in 2 of 4 files: each of these is one document']


def test_of_many_documents_and_of_named_files_no_last_tokens_are_held_out(tmp_path: Path) -> None:
    for number in (499, 500):
        source = write_documents(tmp_path, number)
        assert build.choose_split(plan_for(source)).last_tokens == (number < 500)
    source = write_documents(tmp_path, 49)
    assert build.choose_split(plan_for(source, validation_fraction=0.1)).last_tokens
    for other in (plan_for(source, validation_fraction=0.0), replace(plan_for(source), held_out=1)):
        assert build.choose_split(other) == other
    assert build.choose_split(plan_for(Source())) == plan_for(Source())  # Python's own library keeps its corpus


def test_windows_across_shards_are_those_of_one_stream(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 200)
    write_corpus(plan_for(source, shard_mib=0.0005, validation_fraction=0.1), BYTES, tmp_path / "c")
    corpus = Corpus(tmp_path / "c")
    for split in SPLITS:
        files = len(list(corpus.folder.glob(f"*.{split}.bin")))
        assert files > 2, split
        if split == "validation":
            assert files < corpus.header.shards, split  # nothing is held out of some shards
        total = corpus.tokens(split)
        stream = corpus.window(split, 0, total - 1)
        for length in (7, 64, total // 2 - 1):
            assert corpus.count(split, length) == (total - 1) // length, split
            for number in range(corpus.count(split, length)):
                first, end = number * length, number * length + length + 1
                window = corpus.window(split, number, length)
                assert np.array_equal(window.ids, stream.ids[first:end]), split
                inside = (stream.begins >= first) & (stream.begins < end)
                assert np.array_equal(window.begins, stream.begins[inside] - first), split
                assert (window.document, window.position) == (0, 0), split


def test_processes_and_restarts_give_the_same_bytes(tmp_path: Path) -> None:
    plan = plan_for(write_documents(tmp_path, 300), shard_mib=0.003)
    alone = write_corpus(plan, BYTES, tmp_path / "alone")
    in_parallel = write_corpus(plan, BYTES, tmp_path / "many", processes=2)
    assert alone == in_parallel
    assert alone.shards > 3

    folder = tmp_path / "many"
    intact, damaged, lost = (folder / f"{number:05d}.train.bin" for number in range(3))
    (folder / "corpus.json").unlink()  # as if killed near the end
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    lost.unlink()
    intact_changed, damaged_changed = intact.stat().st_mtime_ns, damaged.stat().st_mtime_ns
    assert write_corpus(plan, BYTES, folder) == alone
    assert intact.stat().st_mtime_ns == intact_changed
    assert damaged.stat().st_mtime_ns != damaged_changed
    assert documents(Corpus(folder), "train") == documents(Corpus(tmp_path / "alone"), "train")


class DyingSource(JsonLineFiles):
    """A source whose reader ends its process, as Linux ends one that takes too much memory."""

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().records(shard)


def test_a_process_that_is_killed_is_an_error_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_documents(tmp_path, 50)
    monkeypatch.setattr(build, "_open_source", lambda plan: DyingSource(plan.files, TextForm("text")))
    with pytest.raises(DataError, match=r"was killed: most likely .* out of memory: .* --prepare\.processes=N"):
        write_corpus(plan_for(source, shard_mib=0.001), BYTES, tmp_path / "c", processes=2)


def rewrite(path: Path, content: bytes) -> None:
    """Write a file of the same size anew; the time of its last change stays, as with `cp -p`."""
    time = path.stat().st_mtime_ns
    assert path.stat().st_size == len(content)
    path.write_bytes(content)
    os.utime(path, ns=(time, time))


def test_finished_shards_are_kept_only_if_the_source_is_the_same_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_documents(tmp_path, 300)
    plan = plan_for(source, shard_mib=0.003)
    folder = tmp_path / "c"
    write_corpus(plan, BYTES, folder)
    assert "were changed" not in caplog.text
    text = Path(source.path)
    rewrite(text, text.read_bytes().swapcase().replace(b'"TEXT"', b'"text"'))
    warn_of_changes(plan, folder)  # as if it were prepared again
    assert f"{text}: files were changed since {folder} was begun: if their text was, delete it first" in caplog.text
    (folder / "corpus.json").unlink()  # as if killed near the end
    (folder / "00002.train.bin").unlink()
    assert write_corpus(plan, BYTES, folder) == write_corpus(plan, BYTES, tmp_path / "new")
    assert contents(folder, set()) == contents(tmp_path / "new", set())


def test_a_corpus_in_the_cache_of_a_source_with_other_text_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_documents(tmp_path, 300)
    data = Data(cache=str(tmp_path / "cache"))
    plan = plan_for(source)
    prepare_cached(plan, data)
    (note,) = Path(data.cache).rglob("source.json")
    noted = note.read_bytes()
    text = Path(source.path)
    text.chmod(0o600)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        prepare_cached(plan, data)  # reads the text, which is the same, and leaves the old note
    assert {path: path.read_bytes() for path in Path(data.cache).rglob("source.json*")} == {note: noted}
    prepare_cached(plan, data)
    monkeypatch.setattr(cache, "content_of", lambda files: pytest.fail("the text is read again"))
    prepare_cached(plan, data)  # does not read it again
    monkeypatch.undo()
    rewrite(text, text.read_bytes().swapcase().replace(b'"TEXT"', b'"text"'))
    with pytest.raises(DataError, match=rf"the files of '{text}' have other text than when .*: `touch` one of them"):
        prepare_cached(plan, data)
    text.touch()
    assert "DOCUMENT" in text.read_text()
    prepare_cached(plan_for(source), data)


def test_a_note_for_all_processes_is_on_disk_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pins" / "corpus"
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            first_noted(path, lambda: "a commit")
    assert list(path.parent.iterdir()) == []
    assert first_noted(path, lambda: "one") == first_noted(path, lambda: "two") == "one"


def test_progress_is_not_told_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(build, "show_progress", shown.append)
    monkeypatch.setattr(build, "_finished_shards", Mock(side_effect=DataError("broken")))
    with pytest.raises(DataError, match="broken"):
        write_corpus(plan_for(write_documents(tmp_path, 3)), BYTES, tmp_path / "corpus")
    assert shown[-1] is None


def test_the_default_size_of_a_shard_follows_the_source() -> None:
    gib = 1024
    sizes = [shard_size_mib(text, 0.0) for text in (1, 16 * gib, 64 * gib, 256 * gib, 60_000 * gib)]
    assert sizes == [64, 64, 256, 1024, 1024]
    assert shard_size_mib(64 * gib, 5.0) == 5.0


KILLED = """
import sys, pathlib
if __name__ == "__main__":  # worker processes import this file
    from tests.tools.prepare.test_build import *
    source = Source(kind="jsonl", path=sys.argv[1])
    write_corpus(plan_for(source, shard_mib=1.0), BYTES, pathlib.Path(sys.argv[2]), processes=3)
"""


def test_a_killed_preparation_leaves_no_corpus_and_can_be_finished(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 8_000, size=2000)
    plan = plan_for(source, shard_mib=1.0)
    folder = tmp_path / "c"
    script = tmp_path / "prepare.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), source.path, str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until((folder / "00001.json").exists)
    helpers = children(process.pid)
    assert len(helpers) >= 3
    for pid in helpers:  # a scheduler's signal to all processes is for the parent
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)
    until((folder / "00004.json").exists)
    process.kill()
    process.wait()
    assert all(ends(pid) for pid in helpers)
    with pytest.raises(DataError, match=r"no corpus\.json"):
        Corpus(folder)
    first = os.stat(folder / "00000.train.bin").st_mtime_ns
    header = write_corpus(plan, BYTES, folder)
    assert header.documents == 8_000
    assert os.stat(folder / "00000.train.bin").st_mtime_ns == first
    write_corpus(plan, BYTES, tmp_path / "alone")
    left_by_the_kill = {path.name for path in folder.glob("*.tmp")}
    assert contents(folder, left_by_the_kill) == contents(tmp_path / "alone", set())


def contents(folder: Path, ignored: set[str]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ignored}


def test_bad_records_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": ""}\n{"text": "two"}\nnonsense\n{"text": "  "}\n')
    source = Source(kind="jsonl", path=str(path))
    with pytest.raises(DataError, match=rf"{path}:2: empty document; set data\.on_bad_record = \"skip\""):
        write_corpus(plan_for(source), BYTES, tmp_path / "c")
    assert not list((tmp_path / "c").glob("*.bin*"))
    header = write_corpus(plan_for(source, on_bad_record="skip"), BYTES, tmp_path / "c")
    assert header.skipped == {"empty document": 2, "broken JSON": 1}
    assert documents(Corpus(tmp_path / "c"), "train") == ["one", "two"]


def test_an_unreadable_file_of_many_shards_is_counted_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.parquet").write_bytes(b"PAR1" + bytes(5000))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["good"]}), tmp_path / "d.parquet")
    source = Source(kind="parquet", path=f"{tmp_path}/*.parquet")
    plan = plan_for(source, on_bad_record="skip", shard_mib=0.001, validation_fraction=0.0)
    for processes in (1, 2):  # the second time the finished shards are kept
        with pytest.raises(DataError, match=r"would leave out .* records of .*/a\.parquet \(.* unreadable file"):
            write_corpus(plan, BYTES, tmp_path / "corpus", processes)
        header = write_corpus(plan, BYTES, tmp_path / "corpus", processes, max_bad_share=1.0)
        (tmp_path / "corpus" / "corpus.json").unlink()
        assert header.shards > 10
        assert header.skipped == {"unreadable file": 3}


def test_a_failing_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(write_documents(tmp_path, 20))
    for code, advice in (
        (errno.ENOSPC, "Make room there, or choose another"),
        (errno.EDQUOT, "Remove files of yours there, or choose another"),
        (errno.EACCES, "Choose another"),
    ):
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(code, os.strerror(code))))
        message = rf"^{tmp_path}/corpus cannot be written: {os.strerror(code)}\. {advice} folder \(data\.cache"
        with pytest.raises(DataError, match=message):
            write_corpus(plan, BYTES, tmp_path / "corpus")


def test_of_bad_records_in_many_processes_the_first_is_named(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 100)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines[60] = lines[99] = "nonsense"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl:61: broken JSON"):
        write_corpus(plan_for(source, shard_mib=0.001), BYTES, tmp_path / "c", processes=2)


def test_a_token_over_the_vocabulary_is_a_bad_record(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 3)
    with pytest.raises(DataError, match=r"model\.vocab = 257 has no room for the special tokens.* 258 or more"):
        plan_for(source, vocab=257)
    (tmp_path / "a.jsonl").write_text('{"text": "ABC"}\n{"text": "AxC"}\n')  # x is 120
    small = replace(plan_for(source, on_bad_record="skip"), vocab=100)
    assert write_corpus(small, BYTES, tmp_path / "c").skipped == {"token id over model.vocab": 1}
    with pytest.raises(DataError) as caught:
        write_corpus(replace(small, on_bad_record="error"), BYTES, tmp_path / "d")
    assert str(caught.value) == (
        f"{tmp_path}/a.jsonl:2: token id over model.vocab (120; model.vocab = 100); "
        "raise model.vocab to 258 or more, for data.tokenizer 'bytes' has that many ids, or use a smaller tokenizer"
    )


LONG_TEXTS = [
    "It's the first text.\nA line\r\n\n" * 3,
    "short",
    "And the second, with a z in it\n" * 3,
    "no-blank" * 9,
]


@pytest.mark.parametrize(("kind", "vocab"), [("text", 122), ("jsonl", 258), ("jsonl", 122), ("parquet", 122)])
def test_texts_in_pieces_are_the_same_corpus(
    kind: Literal["text", "jsonl", "parquet"], vocab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the second text has an id over a vocabulary of 122: what was written of it is removed."""
    for number, text in enumerate(LONG_TEXTS):
        (tmp_path / f"{number}.text").write_bytes(text.encode())
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in LONG_TEXTS))
    pyarrow.parquet.write_table(pyarrow.table({"text": LONG_TEXTS}), tmp_path / "a.parquet")
    source = Source(kind=kind, path=f"{tmp_path}/*.{kind}")
    plan = replace(plan_for(source, on_bad_record="skip"), vocab=vocab)
    whole = write_corpus(plan, BYTES, tmp_path / "whole")
    assert whole.skipped == ({} if vocab == 258 else {"token id over model.vocab": 1})

    monkeypatch.setattr(records, "IN_MEMORY", 20)
    monkeypatch.setattr(records, "BLOCK", 11)
    monkeypatch.setattr(tokenize_shard, "cut_pieces", partial(cut_pieces, size=7))
    assert write_corpus(plan, BYTES, tmp_path / "pieces") == whole
    assert contents(tmp_path / "pieces", set()) == contents(tmp_path / "whole", set())


def test_a_dropped_document_leaves_nothing(tmp_path: Path) -> None:
    with (tmp_path / "shard").open("wb") as file:
        writer = ShardFileWriter(file, "<u2")
        writer.add(np.array([1, 7, 2]))
        writer.begin_document()
        writer.extend(np.array([1, 9, 9]))
        writer.drop_document()
        writer.add(np.array([1, 2]))
    assert (writer.tokens, writer.documents, writer.largest_id) == (5, 2, 7)
    assert np.fromfile(tmp_path / "shard", "<u2").tolist() == [1, 7, 2, 1, 2]


def test_a_long_text_without_a_place_to_cut_is_a_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("short")
    (tmp_path / "b.txt").write_text("x" * 100)
    source = Source(kind="text", path=f"{tmp_path}/*.txt")
    monkeypatch.setattr(records, "IN_MEMORY", 20)
    monkeypatch.setattr(records, "BLOCK", 10)
    monkeypatch.setattr(tokenize_shard, "cut_pieces", partial(cut_pieces, size=7, longest=50))
    monkeypatch.setattr(BYTES(), "find_cut", lambda text, start: 0)
    with pytest.raises(DataError, match=r"b\.txt: no place to cut \(no blank or line end .* 'bytes' can cut it\); set"):
        write_corpus(plan_for(source), BYTES, tmp_path / "c")
    header = write_corpus(plan_for(source, on_bad_record="skip"), BYTES, tmp_path / "c")
    assert header.skipped == {"no place to cut": 1}
    assert documents(Corpus(tmp_path / "c"), "train") == ["short"]


def peak_memory(mebibytes: int, folder: Path) -> int:
    path = folder / f"{mebibytes}.txt"
    path.write_bytes(b"a line of 32 bytes is so long..\n" * (mebibytes * 2**15))
    plan = plan_for(Source(kind="text", path=str(path)))
    tracemalloc.start()
    write_corpus(plan, BYTES, folder / f"{mebibytes}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_a_text_file(tmp_path: Path) -> None:
    peak_memory(1, tmp_path)  # imports
    small, large = peak_memory(8, tmp_path), peak_memory(32, tmp_path)
    assert large < 1.1 * small
    assert large < 32 * 2**20


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
@pytest.mark.parametrize("kind", ["jsonl", "text", "parquet"])
def test_an_empty_file_ends_nothing_but_a_corpus_without_documents(
    tmp_path: Path, kind: Literal["jsonl", "text", "parquet"], on_bad_record: str
) -> None:
    source = Source(kind=kind, path=f"{tmp_path}/*.x")
    write: dict[str, Callable[[Path, list[str]], object]] = {
        "jsonl": lambda path, texts: path.write_text("\n" + "".join(json.dumps({"text": text}) for text in texts)),
        "text": lambda path, texts: path.write_text(" \n" + "".join(texts)),
        "parquet": lambda path, texts: pyarrow.parquet.write_table(
            pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())}), path
        ),
    }
    write[kind](tmp_path / "a.x", [])
    with pytest.raises(DataError, match=r"\*\.x': there is no document to train on \(1 empty file\)"):
        write_corpus(plan_for(source, on_bad_record=on_bad_record), BYTES, tmp_path / "c")
    write[kind](tmp_path / "b.x", ["one"])
    header = write_corpus(plan_for(source, on_bad_record=on_bad_record), BYTES, tmp_path / "d")
    assert (header.documents, header.skipped) == (1, {"empty file": 1})


GOOD, BAD = '{"text": "good"}\n', '{"body": "bad"}\n'


def test_skip_ends_where_it_would_lose_too_much(tmp_path: Path) -> None:
    for case, (shard_mib, (files, most, words)) in enumerate(
        product(
            [64.0, 0.001],
            [
                ([GOOD * 989 + BAD * 11], 0.02, ""),
                ([GOOD * 5 + BAD * 10], 0.0, ""),
                (
                    [GOOD * 989 + BAD * 11],
                    0.01,
                    r"11 of the 1,000 records of \S+/0\.x \(11 wrong key, the first at \S+:990\)",
                ),
                (
                    [GOOD * 989, BAD, GOOD],
                    0.5,
                    r"1 of the 1 records of \S+/1\.x \(1 wrong key, the first at \S+1\.x:1\)",
                ),
                (
                    [GOOD * 9 + BAD * 11, BAD * 11, GOOD],
                    0.5,
                    r"out 11 of the 11 .*1\.x.*; 11 of the 20 records of .*0\.x .*",
                ),
                ([GOOD, BAD], 1.0, ""),
            ],
        )
    ):
        folder = tmp_path / str(case)
        folder.mkdir()
        for number, content in enumerate(files):
            (folder / f"{number}.x").write_text(content)
        plan = plan_for(Source(kind="jsonl", path=f"{folder}/*.x"), shard_mib=shard_mib, on_bad_record="skip")
        if not words:
            header = write_corpus(plan, BYTES, folder / "c", max_bad_share=most)
            assert header.documents == "".join(files).count("good"), files
            continue
        with pytest.raises(DataError, match=words) as caught:
            write_corpus(plan, BYTES, folder / "c", max_bad_share=most)
        assert f"That is more than data.max_bad_share = {most:g} of the records of a file" in str(caught.value), files
        with pytest.raises(DataError, match=words):  # of the shards that are kept
            write_corpus(plan, BYTES, folder / "c", max_bad_share=most)
        advised = float(str(caught.value).rpartition("at least ")[2]) if shard_mib == 64.0 else 1.0  # else: so far
        header = write_corpus(plan, BYTES, folder / "c", max_bad_share=advised)
        assert header.documents == "".join(files).count("good"), files


def test_of_text_files_all_count_together(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number:02d}.txt").write_bytes(b"good" if number < 19 else b"\xff")
    plan = plan_for(Source(kind="text", path=str(texts)), on_bad_record="skip")
    with pytest.raises(DataError, match=r"11 of the 30 records of \S+ \(11 not UTF-8, the first at \S+/19\.txt:1\)"):
        write_corpus(plan, BYTES, tmp_path / "c")
    assert write_corpus(plan, BYTES, tmp_path / "c", max_bad_share=1.0).documents == 19
    library = replace(plan, source=Source(kind="stdlib"))  # no user can fix it
    assert write_corpus(library, BYTES, tmp_path / "library").documents == 19
    (texts / "29.txt").write_text("good")
    plan = plan_for(Source(kind="text", path=str(texts)), on_bad_record="skip")
    assert write_corpus(plan, BYTES, tmp_path / "d").documents == 20


SKIP = 'set data.on_bad_record = "skip"'


def test_a_fault_that_all_records_share_is_not_skipped(tmp_path: Path) -> None:
    for number, (after, (content, where, advice)) in enumerate(
        product(
            ["", GOOD],
            [
                (BAD * 100 + GOOD, ":1: wrong key", "set that key to a name that the file has"),
                ("no json\n" * 3, ":1: broken JSON", "so are the 2 after it: fix their common fault"),
                (BAD + "nonsense\n" + GOOD, ":1: wrong key", SKIP),
                (GOOD + BAD * 100, ":2: wrong key", SKIP),
                ("no json", ":1: broken JSON", "fix the file, or take it out of data.sources.path"),
                ("PAR1", ": file of another form", "fix the file, or take it out of data.sources.path"),
            ],
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "a.jsonl"
        path.write_text(content)
        (folder / "b.jsonl").write_text(after)
        with pytest.raises(DataError) as caught:
            write_corpus(plan_for(Source(kind="jsonl", path=f"{folder}/*.jsonl")), BYTES, folder / "c")
        message = str(caught.value)
        assert message.startswith(f"{path}{where}"), content
        assert f"; {advice}" in message, content
        assert (SKIP in message) == (advice == SKIP), content


def test_a_text_that_the_tokenizer_fails_on_is_a_bad_record(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "good": 2}, unk_token="none"))
    backtracking = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"(x+x+)+y"), "isolated")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([backtracking])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text(GOOD + json.dumps({"text": "x" * 40}) + "\n" + GOOD)
    name = str(tmp_path / "tokenizer.json")
    load = partial(load_tokenizer, name)
    source = Source(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    plan = plan_corpus(source, ReaderSettings(Data(tokenizer=name), 258, load()))
    with pytest.raises(DataError, match=r"a\.jsonl:2: text that the tokenizer fails on; set data"):
        write_corpus(plan, load, tmp_path / "c")
    header = write_corpus(replace(plan, on_bad_record="skip"), load, tmp_path / "c")
    assert (header.documents, header.skipped) == (2, {"text that the tokenizer fails on": 1})


def test_a_tokenizer_that_knows_hardly_a_word_is_an_error(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1, "red": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    name = str(tmp_path / "tokenizer.json")
    load = partial(load_tokenizer, name)
    text = tmp_path / "a.txt"
    text.write_text("red und blau")
    plan = plan_corpus(Source(kind="text", path=str(text)), ReaderSettings(Data(tokenizer=name), 258, load()))
    (line,) = describe_corpus(write_corpus(plan, load, tmp_path / "half"))
    assert line.startswith("50.0% of the tokens stand for text")
    text.write_text("gelb und blau")
    plan = replace(plan, files=[stat_file(str(text))])
    known = rf'{name} does not know the text of {text}: 75% of its tokens are \[UNK\]\. Use .*, or "bytes"'
    with pytest.raises(DataError, match=known):
        write_corpus(plan, load, tmp_path / "most")
    assert not (tmp_path / "most" / "corpus.json").exists()


def test_fingerprints_do_not_change(tmp_path: Path) -> None:
    """With another one no checkpoint resumes on it. tests/tools/prepare/test_source_files.py has a key."""
    corpus = write_corpus_of(write_documents(tmp_path, 30), tmp_path / "c", validation_fraction=0.2)
    assert corpus.fingerprint == "94a005002e1082c4"


def test_the_key_changes_with_all_that_matters_and_with_nothing_else(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 3)
    plan = plan_for(source)
    changed = [
        replace(plan, tokenizer="other"),
        replace(plan, validation_fraction=0.02),
        replace(plan, on_bad_record="skip"),
        replace(plan, source=replace(source, text_key="body")),
        replace(plan, last_tokens=True),
    ]
    write_documents(tmp_path, 4)
    changed.append(plan_for(source))
    assert len({plan.key, *(different.key for different in changed)}) == 7
    assert plan.keys == [plan.key, changed[4].key]
    assert plan_for(replace(source, weight=3.0)).key == changed[-1].key
