"""Tokenizers of a run as files of transformers: the same ids, or none."""

import base64
from pathlib import Path

import pytest
import transformers

from tests.data.test_tokenizer import LLAMA3
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.prepare import tokenizer_json
from torchllm.tools.prepare.tiktoken_tokenizer import TiktokenTokenizer
from torchllm.tools.prepare.tokenizer_json import InexactTokenizer, without_possessive, write_tokenizer

TEXT = "The cat's hat, 12345 thethe!\n\n\n  and  the\tend \n<|end_of_text|> naïve 🙂"
MERGED = [b"th", b"the", b" t", b" the", b"at", b"cat", b" cat", b"'s", b"12", b"123", b"  ", b"\n\n", b"en", b"and"]


def rank_file(folder: Path) -> Path:
    path = folder / "small.model"
    tokens = [bytes([value]) for value in range(256)] + MERGED
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_a_rank_file_becomes_a_tokenizer_with_the_same_ids(tmp_path: Path) -> None:
    for number, pattern in enumerate(["llama3", "cl100k"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        tokenizer = load_tokenizer(str(rank_file(folder)), pattern)
        out = folder / "out"
        out.mkdir()
        write_tokenizer(tokenizer, out, 64)
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        text = TEXT.replace("<|end_of_text|>", "")
        (ids,) = tokenizer.encode_documents([text])
        begin = [] if tokenizer.begin is None else [tokenizer.begin]
        assert theirs(text).input_ids == [*begin, *ids.tolist()], pattern
        assert bool(begin) == (pattern == "llama3"), pattern
        assert len(ids) < len(text.encode()) - 10, pattern  # words are merged
        assert theirs.decode(ids.tolist()) == text, pattern
        assert theirs.eos_token_id == tokenizer.end, pattern
        assert theirs.model_max_length == 64, pattern


@pytest.mark.exhaustive
def test_a_published_rank_file_is_converted(tmp_path: Path) -> None:
    write_tokenizer(load_tokenizer(LLAMA3, "llama3"), tmp_path, 64)


def test_other_ids_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(str(rank_file(tmp_path)))
    assert isinstance(tokenizer, TiktokenTokenizer)
    out = tmp_path / "out"
    out.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_json, "without_possessive", lambda pattern: r"\S")  # each character by itself
        with pytest.raises(InexactTokenizer, match="would have other ids"):
            write_tokenizer(tokenizer, out, 64)
    assert not list(out.iterdir())


def test_a_tokenizer_json_is_copied_with_its_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_tokenizer(load_tokenizer("bytes"), source, 64)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.safetensors").write_text("not a tokenizer's")
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(load_tokenizer(str(source / "tokenizer.json")), out, 32)
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for path in out.iterdir():
        assert path.read_bytes() == (source / path.name).read_bytes()


def test_possessive_quantifiers_become_plain_ones() -> None:
    assert without_possessive(r"[^a]?+\p{L}++|\p{N}{1,3}+|\s++$") == r"[^a]?\p{L}+|\p{N}{1,3}|\s+\z"
    assert without_possessive(r"\p{L}+|[+*]+|\++") == r"\p{L}+|[+*]+|\++"
