import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from recipes import prepare as recipe
from tests.launched import without_signs_of_life
from tests.patience import patience
from tests.tools.prepare.chat.families import QWEN25, TALK, write_tokenizer
from tests.tools.prepare.test_build import documents, write_documents
from torchllm.config import Data
from torchllm.config.errors import DataError, RefusedStart
from torchllm.data.corpus import Corpus
from torchllm.data.corpus_header import HEADER
from torchllm.data.readers import corpus_folder
from torchllm.tools.front.resolve import load_sizes

RECIPE = Path(__file__).parents[2] / "recipes" / "prepare.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two sources, and a run.toml that names them."""
    write_documents(tmp_path, 300)
    (tmp_path / "one.txt").write_text("a whole file")
    (tmp_path / "run.toml").write_text(
        f'[[data.sources]]\nkind = "jsonl"\npath = "{tmp_path}/a.jsonl"\nweight = 3.0\n'
        f'[[data.sources]]\nkind = "text"\npath = "{tmp_path}/*.txt"\n'
        '[[data.sources]]\nkind = "synthetic"\n[data]\ncache = "unused"\n'
    )
    return tmp_path


def prepare(folder: Path, *overrides: str) -> str:
    """Return what the recipe prints."""
    with redirect_stdout(io.StringIO()) as printed:
        recipe.main(load_sizes([str(folder / "run.toml"), *overrides], recipe.PrepareConfig))
    return printed.getvalue()


@pytest.mark.parametrize(("processes", "status"), [(1, 1), (0, 2)])
def test_an_error_is_one_line_and_has_the_status_of_its_kind(folder: Path, processes: int, status: int) -> None:
    """1 for records that are wrong, 2 for a start that is refused, here without a folder to write to."""
    with (folder / "a.jsonl").open("a") as file:
        file.write("\nnonsense")
    options = [f"--prepare.folder={folder}/tokens", f"--prepare.processes={processes}"] if processes else []
    command = [sys.executable, str(RECIPE), str(folder / "run.toml"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == status
    [line] = without_signs_of_life(done.stderr).splitlines()
    assert line.startswith(
        f"error: {folder}/a.jsonl:301: broken JSON" if processes else "error: prepare.folder is empty"
    )


def test_it_writes_what_kind_tokens_reads_and_prints_how(folder: Path) -> None:
    tokens = folder / "tokens"
    options = (f"--prepare.folder={tokens}", "--prepare.processes=2", "--prepare.shard_mib=0.002")
    done = prepare(folder, *options, "--data.validation_fraction=0.0")
    assert re.search(
        rf"{tokens}/0-jsonl-a: 300 documents, [\d,]+ tokens to train on, [\d,]+ held out, [\d.,]+ MB/s", done
    )
    printed = done.partition("[data]")[2]
    assert 'tokenizer = "bytes"' in printed
    assert f'[[data.sources]]\nkind = "tokens"\npath = "{tokens}/0-jsonl-a"\nweight = 3.0' in printed
    assert '[[data.sources]]\nkind = "synthetic"\nweight = 1.0' in printed
    texts = [json.loads(line)["text"] for line in (folder / "a.jsonl").read_text().splitlines()]
    corpus = Corpus(tokens / "0-jsonl-a")
    assert documents(corpus, "train") == texts
    assert corpus.header.shards > 4
    assert documents(Corpus(next(tokens.glob("1-text*"))), "train") == ["a whole file"]

    assert prepare(folder, *options, "--data.validation_fraction=0.0").count("already there") == 2
    with pytest.raises(DataError, match="holds another corpus"):
        prepare(folder, *options, "--data.validation_fraction=0.5")
    assert documents(Corpus(tokens / "0-jsonl-a"), "train") == texts


def test_a_copy_in_a_storage_is_whole_and_of_this_corpus(folder: Path) -> None:
    """Its description comes last: a copy that was stopped is made again."""
    bucket = f"file://{folder}/bucket"
    options = (f"--prepare.folder={folder}/tokens", f"--prepare.remote={bucket}/", "--prepare.processes=1")
    options += ("--data.sources.0.max_epochs=4",)
    printed = prepare(folder, *options)
    assert f'kind = "tokens"\npath = "{bucket}/0-jsonl-a"\nweight = 3.0\nmax_epochs = 4.0' in printed
    here, there = folder / "tokens/0-jsonl-a", folder / "bucket/0-jsonl-a"
    copied = {file.name: file.read_bytes() for file in there.iterdir()}
    assert copied == {file.name: file.read_bytes() for file in here.iterdir()}

    read = Corpus(corpus_folder(f"{bucket}/0-jsonl-a", Data(cache=str(folder / "cache"))))
    assert documents(read, "train") == documents(Corpus(here), "train")

    (there / HEADER).unlink()
    shard = min(there.glob("*.bin"))
    shard.write_bytes(b"half")
    (here / f"{shard.name}.host-1.tmp").write_bytes(b"of a process that was killed")
    prepare(folder, *options)
    assert {file.name: file.read_bytes() for file in there.iterdir()} == copied

    with pytest.raises(RefusedStart, match="holds a corpus that is not the one in"):
        prepare(folder, f"--prepare.folder={folder}/other", *options[1:], "--data.tokenizer=bytes")
    with pytest.raises(RefusedStart, match="is no URL of a storage"):
        prepare(folder, options[0], "--prepare.remote=none://bucket")


def test_bad_records_that_are_skipped_are_counted(folder: Path) -> None:
    with (folder / "a.jsonl").open("a") as file:
        file.write("\nnonsense")
    options = (f"--prepare.folder={folder}/tokens", "--prepare.processes=1", "--data.on_bad_record=skip")
    assert "skipped 1 records: broken JSON" in prepare(folder, *options)


def test_it_shows_examples_and_writes_nothing(folder: Path) -> None:
    tokenizer = write_tokenizer(folder / "tokenizer", QWEN25)
    (folder / "a.jsonl").write_text(3 * (json.dumps({"messages": TALK}) + "\n"))
    before = sorted(folder.rglob("*"))
    chat = ("--data.sources.0.messages_key=messages", "--data.document_mask=true", f"--data.tokenizer={tokenizer}")
    printed = prepare(folder, "--prepare.show=2", *chat)
    assert printed.count("> they are lazy: 12<|im_end|>\n") == 2
    assert f"text '{folder}/*.txt': text, all of which is trained\n" in printed
    assert "To train on it" not in printed
    assert sorted(folder.rglob("*")) == before


def test_conversations_that_cannot_be_trained_on_are_refused_before_anything_is_written(folder: Path) -> None:
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
        with pytest.raises(RefusedStart, match=message):
            prepare(folder, *chat, *options)
        assert not (folder / "tokens").exists()
