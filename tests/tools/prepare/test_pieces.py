"""A long text that is tokenized in pieces has the ids of the whole text."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.tokenizer import SPLIT
from torchllm.data.tokenizer import Tokenizer, load_tokenizer
from torchllm.tools.prepare.pieces import CONTEXT, NoPlaceToCut, cut_pieces, cut_places

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

WORDS = ["a", "Word", "don't", "DON'T", "it's", "I'll", "'", "s", "ſ", "é", "e\u0301", "привет", "中文", "𝒳", "ǅ", "ª"]
NUMBERS = ["1", "12345", "٣", "½", "²", "Ⅷ", "1,000.5"]
BLANKS = [" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\x0b", "\x0c", "\x1c", "\x1f"]
RARE_BLANKS = ["\x85", "\xa0", "\u1680", "\u180e", "\u2003", "\u200b", "\u2028", "\u202f", "\u3000", "\ufeff"]
SIGNS = [".", "...", "!?", "、", "。", "，", "/", "_", "🙂", "👩\u200d👧", "<|end_of_text|>", "\u0301", "\u0e31", "-\n"]
FRAGMENTS = st.lists(st.sampled_from(WORDS + NUMBERS + BLANKS + RARE_BLANKS + SIGNS), max_size=30).map("".join)
TEXTS = FRAGMENTS | st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    (ids,) = tokenizer.encode_documents([text])
    return [int(token) for token in ids]


def in_blocks(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def byte_level(folder: Path, pattern: str) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["\n\n".join(WORDS + BLANKS + SIGNS) * 3, "    \n\n\n  \n"] * 10, trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def sentence_piece(folder: Path) -> str:
    """Write a tokenizer.json like Llama 2's: no pattern, and a blank before each text."""
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "<unk>", "▁", "a", "b", "\n", "▁a", "▁b"])}
    model = tokenizers.models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>", fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    replace = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), replace])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module", params=["llama3", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pattern = SPLIT if request.param == "llama3" else GPT2_PATTERN
    return load_tokenizer(byte_level(tmp_path_factory.mktemp(request.param), pattern))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(text=TEXTS)
def test_every_place_to_cut_leaves_the_ids_as_they_are(tokenizer: Tokenizer, text: str) -> None:
    whole = ids_of(tokenizer, text)
    for cut in cut_places(text, 0):
        assert 0 < cut < len(text)
        assert ids_of(tokenizer, text[:cut]) + ids_of(tokenizer, text[cut:]) == whole


def test_each_place_in_a_long_text_is_found_once() -> None:
    for text in ("a " * 3000, "a " * 3000 + "a"):
        assert list(cut_places(text, 0)) == list(range(5999, 0, -2))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(text=TEXTS, block=st.integers(1, 9), size=st.integers(1, 20))
def test_pieces_have_the_ids_of_the_whole(tokenizer: Tokenizer, text: str, block: int, size: int) -> None:
    pieces = list(cut_pieces(in_blocks(text, block), tokenizer.find_cut, size))
    assert "".join(pieces) == text
    ids = [token for piece in pieces for token in ids_of(tokenizer, piece)]
    assert ids == ids_of(tokenizer, text)


@settings(derandomize=True, deadline=None)
@given(text=TEXTS, block=st.integers(1, 9), size=st.integers(1, 20))
def test_bytes_are_cut_anywhere(text: str, block: int, size: int) -> None:
    tokenizer = load_tokenizer("bytes")
    pieces = list(cut_pieces(in_blocks(text, block), tokenizer.find_cut, size))
    assert "".join(pieces) == text
    assert all(len(piece) <= size + block for piece in pieces)
    assert [token for piece in pieces for token in ids_of(tokenizer, piece)] == ids_of(tokenizer, text)


PROSE = "It's a text. It has words,\nlines and 12,345 numbers.\n\n  def f(x):\n\treturn  x\r\n" * 200
IDEOGRAPHS = "\u3000\u3000这是一本没有空格的书,每段都缩进。\n" * 200


def test_long_texts_of_common_kinds_are_cut(tokenizer: Tokenizer) -> None:
    for text in (PROSE, IDEOGRAPHS, "12,5\n1,7\n" * 1000):
        pieces = list(cut_pieces(in_blocks(text, 500), tokenizer.find_cut, size=1000))
        assert max(map(len, pieces)) < 2500
        assert [token for piece in pieces for token in ids_of(tokenizer, piece)] == ids_of(tokenizer, text)


def test_a_tokenizer_json_is_cut_only_where_its_ids_allow(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentence_piece(tmp_path))
    text = "a b\nb a\n" * 500
    assert ids_of(tokenizer, text) != ids_of(tokenizer, text[:1000]) + ids_of(tokenizer, text[1000:])
    (piece,) = cut_pieces(in_blocks(text, 500), tokenizer.find_cut, size=1000, longest=10_000)
    assert piece == text
    with pytest.raises(NoPlaceToCut):
        list(cut_pieces(in_blocks(text, 500), tokenizer.find_cut, size=1000, longest=3000))


def test_a_long_text_without_a_place_is_searched_once() -> None:
    searched = 0

    def find_cut(text: str, start: int) -> int:
        nonlocal searched
        searched += len(text) - start
        return next(cut_places(text, start), 0)

    blocks = ["x" * 5000] * 64
    assert list(cut_pieces(blocks, find_cut, size=5000)) == ["x" * 5000 * 64]
    assert searched < 64 * (5000 + 2 * CONTEXT) + 5000
