import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience
from tests.tools.prepare.chat.families import QWEN25, TALK, write_tokenizer
from tests.tools.prepare.test_build import documents, write_documents
from torchllm.config import Data
from torchllm.data.corpus import Corpus
from torchllm.data.corpus_header import HEADER
from torchllm.data.readers import corpus_folder

RECIPE = Path(__file__).parents[2] / "recipes" / "prepare.py"


def prepare(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the recipe on the two sources of folder/run.toml."""
    (folder / "run.toml").write_text(
        f'[[data.sources]]\nkind = "jsonl"\npath = "{folder}/a.jsonl"\nweight = 3.0\n'
        f'[[data.sources]]\nkind = "text"\npath = "{folder}/*.txt"\n'
        '[[data.sources]]\nkind = "synthetic"\n[data]\ncache = "unused"\n'
    )
    command = [sys.executable, str(RECIPE), str(folder / "run.toml"), *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(300))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_documents(tmp_path, 300)
    (tmp_path / "one.txt").write_text("a whole file")
    return tmp_path


def test_it_writes_what_kind_tokens_reads_and_prints_how(folder: Path) -> None:
    tokens = folder / "tokens"
    options = (f"--prepare.folder={tokens}", "--prepare.processes=2", "--prepare.shard_mib=0.002")
    done = prepare(folder, *options, "--data.validation_fraction=0.0")
    assert done.returncode == 0, done.stderr
    assert re.search(
        rf"{tokens}/0-jsonl-a: 300 documents, [\d,]+ tokens to train on, [\d,]+ held out, [\d.,]+ MB/s", done.stdout
    )
    printed = done.stdout.partition("[data]")[2]
    assert 'tokenizer = "bytes"' in printed
    assert f'[[data.sources]]\nkind = "tokens"\npath = "{tokens}/0-jsonl-a"\nweight = 3.0' in printed
    assert '[[data.sources]]\nkind = "synthetic"\nweight = 1.0' in printed
    texts = [json.loads(line)["text"] for line in (folder / "a.jsonl").read_text().splitlines()]
    corpus = Corpus(tokens / "0-jsonl-a")
    assert documents(corpus, "train") == texts
    assert corpus.header.shards > 4
    assert documents(Corpus(next(tokens.glob("1-text*"))), "train") == ["a whole file"]

    repeated = prepare(folder, *options, "--data.validation_fraction=0.0")
    assert repeated.stdout.count("already there") == 2
    changed = prepare(folder, *options, "--data.validation_fraction=0.5")
    assert changed.returncode == 1
    assert "holds another corpus" in changed.stderr
    assert documents(Corpus(tokens / "0-jsonl-a"), "train") == texts


def test_a_copy_in_a_storage_is_whole_and_of_this_corpus(folder: Path) -> None:
    """Its description comes last: a copy that was stopped is made again."""
    bucket = f"file://{folder}/bucket"
    options = (f"--prepare.folder={folder}/tokens", f"--prepare.remote={bucket}/", "--prepare.processes=1")
    options += ("--data.sources.0.max_epochs=4",)
    done = prepare(folder, *options)
    assert done.returncode == 0, done.stderr
    assert f'kind = "tokens"\npath = "{bucket}/0-jsonl-a"\nweight = 3.0\nmax_epochs = 4.0' in done.stdout
    here, there = folder / "tokens/0-jsonl-a", folder / "bucket/0-jsonl-a"
    copied = {file.name: file.read_bytes() for file in there.iterdir()}
    assert copied == {file.name: file.read_bytes() for file in here.iterdir()}

    read = Corpus(corpus_folder(f"{bucket}/0-jsonl-a", Data(cache=str(folder / "cache"))))
    assert documents(read, "train") == documents(Corpus(here), "train")

    (there / HEADER).unlink()
    shard = min(there.glob("*.bin"))
    shard.write_bytes(b"half")
    (here / f"{shard.name}.host-1.tmp").write_bytes(b"of a process that was killed")
    assert prepare(folder, *options).returncode == 0
    assert {file.name: file.read_bytes() for file in there.iterdir()} == copied

    other = prepare(folder, f"--prepare.folder={folder}/other", *options[1:], "--data.tokenizer=bytes")
    assert (other.returncode, "holds a corpus that is not the one in" in other.stderr) == (2, True)
    unknown = prepare(folder, options[0], "--prepare.remote=none://bucket")
    assert (unknown.returncode, "is no URL of a storage" in unknown.stderr) == (2, True)


def test_bad_records_stop_it_or_are_counted(folder: Path) -> None:
    with (folder / "a.jsonl").open("a") as file:
        file.write("\nnonsense")
    options = (f"--prepare.folder={folder}/tokens", "--prepare.processes=1")
    done = prepare(folder, *options)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"error: {folder}/a.jsonl:301: broken JSON" in done.stderr
    assert "skipped 1 records: broken JSON" in prepare(folder, *options, "--data.on_bad_record=skip").stdout


def test_it_shows_examples_and_writes_nothing(folder: Path) -> None:
    tokenizer = write_tokenizer(folder / "tokenizer", QWEN25)
    (folder / "a.jsonl").write_text(3 * (json.dumps({"messages": TALK}) + "\n"))
    before = sorted(folder.rglob("*"))
    chat = ("--data.sources.0.messages_key=messages", "--data.document_mask=true", f"--data.tokenizer={tokenizer}")
    done = prepare(folder, "--prepare.show=2", *chat)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("> they are lazy: 12<|im_end|>\n") == 2
    assert f"text '{folder}/*.txt': text, all of which is trained\n" in done.stdout
    assert "To train on it" not in done.stdout
    assert sorted(folder.rglob("*")) == sorted([*before, folder / "run.toml"])


def test_what_is_refused_before_anything_is_written_has_status_2(folder: Path) -> None:
    tokenizer = write_tokenizer(folder / "tokenizer", QWEN25)
    (folder / "a.jsonl").write_text(3 * (json.dumps({"messages": TALK[:1]}) + "\n"))
    chat = ("--data.sources.0.messages_key=messages", "--data.document_mask=true")
    for options, message in (
        (("--prepare.show=2", f"--data.tokenizer={tokenizer}"), "none of its first 2 conversations can be trained on"),
        (("--prepare.show=2", "--data.tokenizer=bytes"), "conversations need a Hugging Face tokenizer.json"),
        (
            (f"--prepare.folder={folder}/tokens", "--data.tokenizer=bytes"),
            "conversations need a Hugging Face tokenizer.json",
        ),
    ):
        done = prepare(folder, *chat, *options)
        assert done.returncode == 2
        assert message in done.stderr
        assert not (folder / "tokens").exists()


def test_it_asks_for_a_folder(folder: Path) -> None:
    done = prepare(folder)
    assert (done.returncode, "prepare.folder is empty" in done.stderr) == (2, True)
