import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchllm.config import Data, Source
from torchllm.data.build import CorpusPlan, TokenizerSpec, shard_size_mib
from torchllm.data.cache import plan_corpus, tokenize_source
from torchllm.data.corpus import Corpus
from torchllm.data.error import DataError
from torchllm.data.shard import SPLITS, Split
from torchllm.data.sources import SourceFile
from torchllm.data.tokenizer import load_tokenizer

BYTES = TokenizerSpec("bytes", "llama3")


def write_documents(folder: Path, count: int, size: int = 30) -> Source:
    lines = [json.dumps({"text": f"document {index} " + "x" * (index % size)}) for index in range(count)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return Source(kind="jsonl", path=str(folder / "a.jsonl"))


def plan_for(source: Source, vocab: int = 258, shard_mib: float = 64.0, **settings: Any) -> CorpusPlan:
    return plan_corpus(source, Data(**settings), load_tokenizer("bytes"), vocab, shard_mib)


def documents(corpus: Corpus, split: Split) -> list[str]:
    """All documents of a split, decoded; also checks their begin and end."""
    if not corpus.tokens(split):
        return []
    ids, begins = corpus.window(split, 0, corpus.tokens(split) - 1)
    texts = []
    for document in np.split(ids, begins[1:]):
        assert (document[0], document[-1]) == (256, 257)
        texts.append(load_tokenizer("bytes").decode(document[1:-1].tolist()))
    return texts


def write_corpus_of(source: Source, folder: Path, **settings: Any) -> Corpus:
    tokenize_source(plan_for(source, **settings), BYTES, folder)
    return Corpus(folder)


def test_every_document_is_in_one_split_which_its_number_decides(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 400)
    texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    one_shard = write_corpus_of(source, tmp_path / "one", validation_fraction=0.1)
    shards = write_corpus_of(source, tmp_path / "several", validation_fraction=0.1, shard_mib=0.005)
    assert one_shard.header.shards == 1
    assert shards.header.shards > 4
    held_out = documents(one_shard, "validation")
    assert 20 < len(held_out) < 70  # 40 expected, 5 standard deviations
    assert [text for text in texts if text not in held_out] == documents(one_shard, "train")
    assert [text for text in texts if text in held_out] == held_out
    assert documents(shards, "train") == documents(one_shard, "train")
    assert documents(shards, "validation") == held_out


@pytest.mark.parametrize("split", SPLITS)
def test_windows_across_shards_are_those_of_one_stream(tmp_path: Path, split: Split) -> None:
    source = write_documents(tmp_path, 200)
    tokenize_source(plan_for(source, shard_mib=0.002, validation_fraction=0.1), BYTES, tmp_path / "c")
    corpus = Corpus(tmp_path / "c")
    files = len(list(corpus.folder.glob(f"*.{split}.bin")))
    assert files > 2
    if split == "validation":
        assert files < corpus.header.shards  # nothing is held out of some shards
    total = corpus.tokens(split)
    stream = corpus.window(split, 0, total - 1)
    for length in (7, 64, total // 2 - 1):
        assert corpus.count(split, length) == (total - 1) // length
        for number in range(corpus.count(split, length)):
            first, end = number * length, number * length + length + 1
            window = corpus.window(split, number, length)
            assert np.array_equal(window.ids, stream.ids[first:end])
            inside = (stream.begins >= first) & (stream.begins < end)
            assert np.array_equal(window.begins, stream.begins[inside] - first)


def test_processes_and_restarts_give_the_same_bytes(tmp_path: Path) -> None:
    plan = plan_for(write_documents(tmp_path, 300), shard_mib=0.005)
    alone = tokenize_source(plan, BYTES, tmp_path / "alone")
    in_parallel = tokenize_source(plan, BYTES, tmp_path / "many", processes=2)
    assert alone == in_parallel
    assert alone.shards > 3

    folder = tmp_path / "many"
    intact, damaged, lost = (folder / f"{number:05d}.train.bin" for number in range(3))
    (folder / "corpus.json").unlink()  # as if killed near the end
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    lost.unlink()
    intact_changed, damaged_changed = intact.stat().st_mtime_ns, damaged.stat().st_mtime_ns
    assert tokenize_source(plan, BYTES, folder) == alone
    assert intact.stat().st_mtime_ns == intact_changed
    assert damaged.stat().st_mtime_ns != damaged_changed
    assert documents(Corpus(folder), "train") == documents(Corpus(tmp_path / "alone"), "train")


def test_the_default_size_of_a_shard_follows_the_source() -> None:
    gib = 1024
    sizes = [shard_size_mib(text, 0.0) for text in (1, 16 * gib, 64 * gib, 256 * gib, 60_000 * gib)]
    assert sizes == [64, 64, 256, 1024, 1024]
    assert shard_size_mib(64 * gib, 5.0) == 5.0


def test_a_killed_preparation_leaves_no_corpus_and_can_be_finished(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 20_000, size=2000)
    plan = plan_for(source, shard_mib=1.0)
    script = (
        "import sys, pathlib; from tests.data.test_build import *\n"
        f"tokenize_source(plan_for(Source(kind='jsonl', path={source.path!r}), shard_mib=1.0), BYTES, "
        "pathlib.Path(sys.argv[1]))"
    )
    folder = tmp_path / "c"
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (folder / "00002.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(DataError, match=r"no corpus\.json"):
        Corpus(folder)
    first = os.stat(folder / "00000.train.bin").st_mtime_ns
    header = tokenize_source(plan, BYTES, folder)
    assert header.documents == 20_000
    assert os.stat(folder / "00000.train.bin").st_mtime_ns == first
    assert not list(folder.glob("raw*"))


def test_bad_records_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": ""}\n{"text": "two"}\nnonsense\n{"text": "  "}\n')
    source = Source(kind="jsonl", path=str(path))
    with pytest.raises(DataError, match=rf"{path}:2: empty document; set data\.on_bad_record = \"skip\""):
        tokenize_source(plan_for(source), BYTES, tmp_path / "c")
    assert not list((tmp_path / "c").glob("*.bin*"))
    header = tokenize_source(plan_for(source, on_bad_record="skip"), BYTES, tmp_path / "c")
    assert header.skipped == {"empty document": 2, "broken JSON": 1}
    assert documents(Corpus(tmp_path / "c"), "train") == ["one", "two"]


def test_an_error_in_a_process_of_many_is_the_same_error(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 100)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("\nnonsense")
    with pytest.raises(DataError, match=r"a\.jsonl:101: broken JSON"):
        tokenize_source(plan_for(source, shard_mib=0.002), BYTES, tmp_path / "c", processes=2)


def test_a_token_over_the_vocabulary_is_a_bad_record(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 3)
    with pytest.raises(DataError, match=r"model\.vocab = 257 has no room for the special tokens.* 258 or more"):
        plan_for(source, vocab=257)
    small = replace(plan_for(source, on_bad_record="skip"), vocab=100)
    (tmp_path / "a.jsonl").write_text('{"text": "ABC"}\n{"text": "AxC"}\n')  # x is 120
    assert tokenize_source(small, BYTES, tmp_path / "c").skipped == {"token id over model.vocab": 1}
    with pytest.raises(DataError) as caught:
        tokenize_source(replace(small, on_bad_record="error"), BYTES, tmp_path / "d")
    assert str(caught.value) == (
        f"{tmp_path}/a.jsonl:2: token id over model.vocab (120; model.vocab = 100); "
        "raise model.vocab to 258 or more, for data.tokenizer 'bytes' has that many ids, or use a smaller tokenizer"
    )


def test_nothing_to_read_is_an_error_or_a_corpus_without_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    source = Source(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"a\.jsonl: empty file"):
        tokenize_source(plan_for(source), BYTES, tmp_path / "c")
    tokenize_source(plan_for(source, on_bad_record="skip"), BYTES, tmp_path / "c")
    assert Corpus(tmp_path / "c").count("train", 1) == 0


def test_keys_and_fingerprints_do_not_change(tmp_path: Path) -> None:
    """With another key a cached corpus is not found again; with another fingerprint no checkpoint resumes on it."""
    plan = CorpusPlan(
        source=Source(kind="jsonl", path="a.jsonl"),
        files=[SourceFile("a.jsonl", 1000, 1_700_000_000_000_000_000)],
        tokenizer="bytes-fingerprint",
        vocab=258,
        validation_fraction=0.01,
        on_bad_record="error",
        shard_mib=64.0,
    )
    assert plan.key == "1dafac08db4a5f7f"
    corpus = write_corpus_of(write_documents(tmp_path, 30), tmp_path / "c", validation_fraction=0.2)
    assert corpus.fingerprint == "81d4b3b8f0f372db"


def test_the_key_changes_with_all_that_matters_and_with_nothing_else(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 3)
    plan = plan_for(source)
    changed = [
        replace(plan, tokenizer="other"),
        replace(plan, validation_fraction=0.02),
        replace(plan, on_bad_record="skip"),
        replace(plan, source=replace(source, text_key="body")),
    ]
    write_documents(tmp_path, 4)
    changed.append(plan_for(source))
    assert len({plan.key, *(different.key for different in changed)}) == 6
    assert plan_for(replace(source, weight=3.0)).key == changed[-1].key
