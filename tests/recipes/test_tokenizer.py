"""A tokenizer trained on a source: what the folder holds, and what the report says."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import transformers

from tests.tiny_run import ROOT
from torchllm.config.errors import DataError
from torchllm.config.schema import Data, MixtureStage, Source
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.prepare.records import BLOCK

WORDS = ("the ", "tokenizer ", "splits ", "documents ", "into ", "pieces ", "that ", "come ", "often ", "together ")


recipe = SimpleNamespace(**runpy.run_path(str(ROOT / "recipes/tokenizer.py")))


def _config(folder: Path, size: int = 300, **source: str) -> Any:
    texts = [
        f"{start} " + "".join(WORDS[(start + step * 7) % len(WORDS)] for step in range(40)) for start in range(400)
    ]
    lines = [{"text": text} for text in texts]
    (folder / "text.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sources = (Source(**({"kind": "jsonl", "path": str(folder / "text.jsonl")} | source)),)
    section = recipe.TokenizerSection(folder=str(folder / "mine"), size=size)
    return recipe.TokenizerConfig(tokenizer=section, data=Data(sources=sources))


def test_the_folder_is_read_here_and_by_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path)
    recipe.main(config)
    ours = load_tokenizer(str(tmp_path / "mine/tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "mine")
    text = "the document splits — Größe, 12345\n"
    ids = [int(token) for token in ours.encode_documents([text])[0]]
    assert ours.decode(ids) == text
    assert ids == theirs(text)["input_ids"]
    assert ours.vocab == 300
    assert theirs.eos_token_id == ours.end
    turns = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert turns == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    printed = capsys.readouterr().out
    assert "1.000 bytes per token" in printed  # the configured one, bytes
    assert "vocab = 384" in printed  # 300, rounded up to a multiple of 128
    held_out: list[str] = []
    trained = list(recipe.texts(config, held_out))
    assert 0 < len(held_out) < len(trained) / 20
    assert not {*held_out} & {*trained}

    section = replace(config.tokenizer, folder=str(tmp_path / "none"))
    recipe.main(replace(config, tokenizer=section, data=replace(config.data, validation_fraction=0.0)))
    printed = capsys.readouterr().out
    assert "no document is held out" in printed
    assert "bytes per token" not in printed


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_bad_records_are_treated_as_data_on_bad_record_says(
    on_bad_record: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path)
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write('{"text": 5}\n')
    config = replace(config, data=replace(config.data, on_bad_record=on_bad_record))
    if on_bad_record == "error":
        with pytest.raises(DataError, match=r"text\.jsonl:401: not text but int; set data\.on_bad_record"):
            recipe.main(config)
        return
    recipe.main(config)
    assert "skipped 1 records: not text" in capsys.readouterr().out
    bad = replace(config, data=replace(config.data, max_bad_share=0.0))
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write('{"text": 5}\n' * 10)
    with pytest.raises(DataError, match=r"more than data\.max_bad_share = 0 "):
        list(recipe.texts(bad, []))


def test_each_source_gives_its_share_of_all_stages(tmp_path: Path) -> None:
    """Of 1 MiB: three of four steps take a half of the first, the last step all; the second has no weight."""
    config = _config(tmp_path)
    letters = "éab"  # é has two bytes
    for letter in letters:
        (tmp_path / f"{letter}.txt").write_text(letter * 2**20)
    sources = tuple(Source(kind="text", path=str(tmp_path / f"{letter}.txt")) for letter in letters)
    stages = (MixtureStage(3, (2.0, 0.0, 2.0)), MixtureStage(0, (1.0, 0.0, 0.0)))
    data = Data(sources=sources, stage=stages, validation_fraction=0.0)
    section = replace(config.tokenizer, text_mib=1.0)
    config = replace(config, data=data, tokenizer=section, training=replace(config.training, steps=4))
    text = "".join(recipe.texts(config, []))
    for letter, share in zip(letters, (0.625, 0.0, 0.375), strict=True):
        more = text.count(letter) * len(letter.encode()) - share * 2**20
        assert 0 <= more <= (BLOCK if share else 0)  # a block is not cut


def test_a_source_that_is_held_out_whole_is_trained_on(tmp_path: Path) -> None:
    """Of a file that is one document a hash holds out all or nothing."""
    text = "the tokenizer splits documents into pieces\n" * 2**14  # over a MiB, of which the report takes less
    (tmp_path / "a.txt").write_text(text)
    config = _config(tmp_path, kind="text", path=str(tmp_path / "a.txt"))
    config = replace(config, data=replace(config.data, validation_fraction=0.9))  # this text among them
    (source,), held_out = config.data.sources, ["of another source"]
    assert "".join(recipe.source_texts(source, config, 1 / 16, held_out)) == text
    assert held_out == ["of another source"]


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.0: a tokenizer is trained on text"):
        recipe.main(_config(tmp_path, kind="synthetic", path=""))
    (tmp_path / "ids.jsonl").write_text('{"text": "one"}\n{"text": [1, 2, 3]}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": [[1, 2, 3]]}), tmp_path / "ids.parquet")
    for kind, record in (("jsonl", r"ids\.jsonl:2"), ("parquet", r"ids\.parquet row 0")):
        with pytest.raises(DataError, match=rf"{record}: holds token ids, and a tokenizer is trained on text: set "):
            recipe.main(_config(tmp_path, kind=kind, path=str(tmp_path / f"ids.{kind}")))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"holds a tokenizer\.json already"):
        recipe.main(_config(tmp_path))
