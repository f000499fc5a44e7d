"""Documents in three parts: nothing is lost, the same ones everywhere, and what cannot be cut is refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from torchllm.config import Config, Data, Model, Source, Training
from torchllm.config.errors import DataError
from torchllm.data.corpus import Corpus
from torchllm.data.loader import DataRanks, TrainLoader, build_loader
from torchllm.data.tokenizer import ByteTokenizer, load_tokenizer
from torchllm.tools.config.checks import problems
from torchllm.tools.prepare.fill_in_the_middle import FillInTheMiddle
from torchllm.tools.prepare.hugging_face_tokenizer import HuggingFaceTokenizer
from torchllm.tools.proof.layouts import with_settings

END, PREFIX, SUFFIX, MIDDLE = range(256, 260)
NAMES = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
TEXTS = [f"{index:03d} " + "näive"[index % 5 :] * (index % 7) + "z" * (index % 11) for index in range(200)]


def write_tokenizer(folder: Path, special: bool = True) -> str:
    """Write a tokenizer.json of bytes, with the special tokens; without `special` the end alone is one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=special or name == NAMES[0]) for name in NAMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def loader_of(
    folder: Path, texts: list[str] = TEXTS, vocab: int = 260, special: bool = True, **settings: Any
) -> TrainLoader:
    file = folder / f"{abs(hash(tuple(texts)))}.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    own: dict[str, Any] = {"tokenizer": write_tokenizer(folder, special), "cache": str(folder / "cache"), "workers": 0}
    own |= {"sources": (Source(kind="jsonl", path=str(file)),), "validation_fraction": 0.2, **settings}
    data = Data(**own)
    return build_loader(data, Training(sequence_length=8), Model(vocab=vocab), 0, DataRanks())


def documents(loader: TrainLoader, split: Any = "train") -> list[list[int]]:
    """Return the ids of each document of a split, without the end."""
    (corpus,) = loader._sources
    assert isinstance(corpus, Corpus)
    found: list[list[int]] = []
    for number in range(len(corpus.documents[split])):
        ids = corpus.shard(split, number).read_ids(0, int(corpus.tokens(split)))
        document: list[int] = []
        for token in ids.tolist():
            if token == END:
                found.append(document)
                document = []
            else:
                document.append(token)
    return found


def restored(ids: list[int], style: str, tokenizer: Any) -> str:
    """Return the text of a document whose parts are in the order of a style."""
    if PREFIX not in ids:
        return str(tokenizer.decode(ids))
    assert ids[0] == PREFIX
    suffix_at, middle_at = ids.index(SUFFIX), ids.index(MIDDLE)
    prefix, suffix, rest = ids[1:suffix_at], ids[suffix_at + 1 : middle_at], ids[middle_at + 1 :]
    assert style == "psm" or not prefix
    return str(tokenizer.decode(prefix + rest + suffix))


@pytest.mark.parametrize("style", ["psm", "spm"])
def test_every_document_can_be_put_together_and_held_out_ones_stay(tmp_path: Path, style: Any) -> None:
    plain = loader_of(tmp_path)
    cut = loader_of(tmp_path, fim_rate=1.0, fim_style=style)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert documents(cut, "validation") == documents(plain, "validation")
    texts = [str(tokenizer.decode(ids)) for ids in documents(plain)]
    assert sorted(texts) != sorted(TEXTS)
    assert [restored(ids, style, tokenizer) for ids in documents(cut)] == texts
    assert all(ids.count(token) == 1 for ids in documents(cut) for token in (PREFIX, SUFFIX, MIDDLE))
    assert cut._sources[0].fingerprint != plain._sources[0].fingerprint


def test_the_rate_is_that_of_documents_and_their_order_does_not_matter(tmp_path: Path) -> None:
    half = loader_of(tmp_path, fim_rate=0.5)
    found = documents(half)
    assert 0.35 < sum(PREFIX in ids for ids in found) / len(found) < 0.65
    reversed_found = documents(loader_of(tmp_path, TEXTS[::-1], fim_rate=0.5))
    assert reversed_found != found
    assert Counter(map(tuple, reversed_found)) == Counter(map(tuple, found))
    more = {tuple(ids) for ids in documents(loader_of(tmp_path, fim_rate=0.7)) if PREFIX in ids}
    assert more > {tuple(ids) for ids in found if PREFIX in ids}


def test_both_places_are_uniform() -> None:
    fim, text = FillInTheMiddle(1.0, "psm", (1, 2, 3)), "x" * 9
    starts, ends = Counter[int](), Counter[int]()
    for index in range(4000):
        prefix, middle, suffix = fim.cut(text, (index * 0x9E3779B97F4A7C15) % 2**64)
        assert prefix + middle + suffix == text
        starts[len(prefix)] += 1
        ends[len(prefix) + len(middle)] += 1
    for place in range(10):  # the smaller of two uniform places of 10: (2 (10 - place) - 1) / 100
        assert abs(starts[place] / 4000 - (19 - 2 * place) / 100) < 0.03
        assert abs(ends[place] / 4000 - (1 + 2 * place) / 100) < 0.03


def test_what_has_no_special_tokens_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.fim_tokens: data\.tokenizer .* has no special token 'fim'"):
        loader_of(tmp_path, fim_rate=0.5, fim_tokens=("fim", *NAMES[1:3]))
    with pytest.raises(DataError, match=r"'<\|fim_middle\|>' is token 259, and model\.vocab is 259"):
        loader_of(tmp_path, vocab=259, fim_rate=0.5)
    assert ByteTokenizer().special_id(NAMES[0]) is None
    file = tmp_path / "ids.jsonl"
    file.write_text('{"text": [1, 2, 3]}\n' * 30)
    source = Source(kind="jsonl", path=str(file))
    with pytest.raises(DataError, match=r"ids\.jsonl:1: data\.fim_rate cuts text, and this is token ids"):
        loader_of(tmp_path, sources=(source,), fim_rate=0.5)


def test_no_text_has_a_token_of_the_parts_though_tokenizer_json_lets_it(tmp_path: Path) -> None:
    """As Qwen's, which has "special": false there."""
    names = "".join(NAMES)
    loader = loader_of(tmp_path, [f"{index} {names}" for index in range(200)], fim_rate=0.5, special=False)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert {END, PREFIX, SUFFIX, MIDDLE} & {*tokenizer.encode_documents([names])[0]} == {PREFIX, SUFFIX, MIDDLE}
    found = documents(loader)
    cut = [ids for ids in found if PREFIX in ids]
    assert 0.35 < len(cut) / len(found) < 0.65
    assert all(ids.count(token) == (ids in cut) for ids in found for token in (PREFIX, SUFFIX, MIDDLE))
    assert all(restored(ids, "psm", tokenizer).endswith(names) for ids in found)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.byte_lengths[PREFIX] == len(NAMES[1])
    assert not tokenizer.with_special((PREFIX, SUFFIX, MIDDLE)).byte_lengths[END:].any()


def test_sources_that_have_no_documents_of_text_are_named() -> None:
    cut = with_settings(Config(), {"data.fim_rate": 0.5})
    assert not [problem for problem in problems(cut, 1) if problem.key.startswith("data.fim")]
    for source, what in (
        (Source(kind="tokens", path="x"), "has its tokens already"),
        (Source(kind="synthetic"), "has its tokens already"),
        (Source(kind="jsonl", path="x", messages_key="messages"), "holds conversations"),
    ):
        config = replace(cut, data=replace(cut.data, sources=(Source(), source)))
        (message,) = [problem.message for problem in problems(config, 1) if problem.key == "data.fim_rate"]
        assert f"data.sources.1 {what}" in message
    (short,) = [p.key for p in problems(with_settings(cut, {"data.fim_tokens": ("a", "b")}), 1) if "fim" in p.key]
    assert short == "data.fim_tokens"
