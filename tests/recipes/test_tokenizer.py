"""A tokenizer trained on a source: what the folder holds, and what the report says."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tiny_run import ROOT
from torchllm.config.schema import Data, Source
from torchllm.data.error import DataError
from torchllm.data.tokenizer import load_tokenizer

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
    recipe.main(_config(tmp_path))
    ours = load_tokenizer(str(tmp_path / "mine/tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "mine")
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


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    held_out: list[str] = []
    trained = list(recipe.texts(_config(tmp_path), held_out))
    assert held_out
    assert not {*held_out} & {*trained}
    assert len(held_out) < len(trained) / 20


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.0: a tokenizer is trained on text"):
        recipe.main(_config(tmp_path, kind="synthetic", path=""))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"holds a tokenizer\.json already"):
        recipe.main(_config(tmp_path))
