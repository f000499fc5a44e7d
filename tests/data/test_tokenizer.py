import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from torchllm.config.errors import DataError
from torchllm.data.tokenizer import ByteTokenizer, Tokenizer, describe_documents, load_tokenizer
from torchllm.tools.prepare.chat.encoder import ChatEncoder
from torchllm.tools.prepare.chat.marks import RenderedChat

SAMPLES = [
    "Hello, world!  it's 12345 o'clock\r\n\n\tdef f(x):\n        return x  \n",
    "naïve 日本語 🙂 \u00a0 x",
    "<|begin_of_text|>not special<|end_of_text|><|endoftext|>",
    "",
]


@settings(derandomize=True, deadline=None)
@given(st.text())
def test_bytes_are_those_of_utf_8(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_documents([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids.tolist()) == text
    assert (tokenizer.begin, tokenizer.end, tokenizer.vocab) == (256, 257, 258)
    assert tokenizer.decode([256, 104, 105, 257, 263, 0xFF]) == "<|begin_of_text|>hi<|end_of_text|>\ufffd\ufffd"


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<stop>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the theme of the thesis"] * 10, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokenizers_of_bytes_count_the_bytes_of_a_text(json_file: Path) -> None:
    """So that any two of them count the same ones over whole documents."""
    for tokenizer in (load_tokenizer("bytes"), load_tokenizer(str(json_file))):
        for text, ids in zip(SAMPLES, tokenizer.encode_documents(SAMPLES), strict=True):
            assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
        special = [*([] if tokenizer.begin is None else [tokenizer.begin]), tokenizer.end]
        assert not tokenizer.byte_lengths[special].any()
        assert tokenizer.byte_lengths.shape == (tokenizer.vocab,)
        assert len(describe_documents(tokenizer)) == 1  # they are exact


@pytest.mark.parametrize(
    ("decoder", "tokens", "counted"),
    [  # "▁" is 3 bytes of UTF-8 and stands for 1
        ([{"type": "ByteFallback"}, {"type": "Fuse"}], "▁a <0xC3> <0xA9> ▁▁é", 8),
        ([{"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}], "_a _é", 5),
        ([{"type": "WordPiece", "prefix": "##", "cleanup": True}], "a ##é b", 6),
        ([{"type": "BPEDecoder", "suffix": "</w>"}], "a é</w> b</w>", 6),
        ([], "a é", 3),
    ],
)
def test_bytes_of_other_tokens_are_those_of_the_decoded_text(
    decoder: list[dict[str, object]], tokens: str, counted: int, tmp_path: Path
) -> None:
    words = ["<unk>", "</s>", *tokens.split(), "added"]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "</s>", "special": True, **added},
            {"id": len(words) - 1, "content": "added", "special": False, **added},
        ],
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": {"type": "WordLevel", "vocab": {word: id_ for id_, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(path))
    sizes = tokenizer.byte_lengths
    assert sizes[2:-1].sum() == counted
    assert (sizes[0], sizes[1], sizes[-1]) == (0, 0, 5)
    assert "those of a sample have -" in describe_documents(tokenizer)[-1]  # its words are unknown


def load_configured(json_file: Path, config: dict[str, object], added: str | None = None) -> Tokenizer:
    """Load a tokenizer with a tokenizer_config.json, and a post-processor that puts `added` before a text."""
    json_file.with_name("tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.Tokenizer.from_file(str(json_file))
    if added is not None:
        special = [(name, tokenizer.token_to_id(name)) for name in {*added.split(), "</s>"}]
        template = tokenizers.processors.TemplateProcessing(single=f"{added} $A </s>", special_tokens=special)
        tokenizer.post_processor = template
        tokenizer.save(str(json_file))
    load_tokenizer.cache_clear()
    return load_tokenizer(str(json_file))


def test_begin_is_what_transformers_puts_before_a_text(json_file: Path) -> None:
    names: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<stop>"}
    for added, add_bos_token in itertools.product((None, "<s>", "</s> <s>"), (None, True, False)):  # the file keeps it
        config = names if add_bos_token is None else {**names, "add_bos_token": add_bos_token}
        tokenizer = load_configured(json_file, config, added)
        theirs = transformers.AutoTokenizer.from_pretrained(json_file.parent)
        (ids,) = tokenizer.encode_documents(["the theme </s> é"])
        assert tokenizer.end not in ids.tolist()
        assert tokenizer.decode(ids.tolist()) == "the theme </s> é"
        begin = list(tokenizer.begins)
        (ids,) = tokenizer.encode_documents(["the theme"])
        expected = theirs("the theme").input_ids
        assert [*begin, *ids.tolist()] == expected[: len(begin) + len(ids)]
        assert begin == [theirs.convert_tokens_to_ids(name) for name in (added or "").split()]
        assert [tokenizer.begin] == (begin or [None])[-1:]
        contradiction = add_bos_token is not None and add_bos_token != (added is not None)
        assert len(tokenizer.notes) == contradiction


def test_a_begin_that_is_the_end_is_not_put_before_a_document(json_file: Path) -> None:
    tokenizer = load_configured(json_file, {"bos_token": "<stop>", "eos_token": {"content": "<stop>"}}, added="<stop>")
    assert (tokenizer.begin, tokenizer.end) == (None, 2)
    assert describe_documents(tokenizer) == ["data.tokenizer: before a document nothing, after it <stop> (2)"]
    digest = hashlib.sha256(json_file.read_bytes()).hexdigest()[:16]
    assert (tokenizer.begins, tokenizer.fingerprint) == ((), f"tokenizer.json-None-2-{digest}")


def test_several_begins_are_put_before_a_document(json_file: Path) -> None:
    tokenizer = load_configured(json_file, {"eos_token": "<stop>"}, added="</s> <s>")
    assert describe_documents(tokenizer) == ["data.tokenizer: before a document </s> (1) <s> (0), after it <stop> (2)"]
    digest = hashlib.sha256(json_file.read_bytes()).hexdigest()[:16]
    assert tokenizer.fingerprint == f"tokenizer.json-1+0-2-{digest}"
    assert tokenizer.begins == (1, 0)


def test_the_dropout_of_merges_is_off_and_said(json_file: Path) -> None:
    (expected,) = load_tokenizer(str(json_file)).encode_documents(["the theme of the thesis " * 9])
    content = json.loads(json_file.read_text())
    content["model"]["dropout"] = 0.5
    json_file.write_text(json.dumps(content))
    load_tokenizer.cache_clear()
    tokenizer = load_tokenizer(str(json_file))
    (line,) = tokenizer.notes
    assert line.endswith("tokenizer.json drops 50% of BPE's merges at random: not here, where ids are fixed")
    (ids,) = tokenizer.encode_documents(["the theme of the thesis " * 9])
    assert ids.tolist() == expected.tolist()
    (chat,) = ChatEncoder(json_file).encode([RenderedChat("the theme of the thesis " * 9, [], [])])
    assert chat.ids.tolist() == expected.tolist()


def test_a_begin_or_end_that_the_tokenizer_lacks_is_named(json_file: Path) -> None:
    (line,) = load_configured(json_file, {"bos_token": "<begin>", "eos_token": "</s>"}).notes
    assert "names '<begin>' as the begin of a text (bos_token)" in line
    with pytest.raises(DataError, match=r"tokenizer_config\.json names '<end>' as the end of a text .* does not have"):
        load_configured(json_file, {"bos_token": "<s>", "eos_token": "<end>"})


def test_the_token_for_unknown_text(tmp_path: Path) -> None:
    models: list[tuple[Any, int | None]] = [
        (tokenizers.models.WordLevel({"[UNK]": 3, "</s>": 1}, unk_token="[UNK]"), 3),
        (tokenizers.models.Unigram([("a", -1.0), ("</s>", -2.0)], 0, False), 0),
        (tokenizers.models.BPE({"a": 0, "</s>": 1}, []), None),
    ]
    for number, (model, unknown) in enumerate(models):
        tokenizers.Tokenizer(model).save(str(tmp_path / f"{number}.json"))
        assert load_tokenizer(str(tmp_path / f"{number}.json")).unknown == unknown


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4241003\n"
SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>\x15\x00\x00\x00\x00\x18\x03"


def test_a_wrong_file_is_named_and_says_what_to_do(json_file: Path) -> None:
    config = "tokenizer_config.json"
    unreadable = rf"data\.tokenizer: {json_file.with_name(config)} cannot be read \(.*\): copy it again"
    for written, content, message in (
        (
            "tokenizer.model",
            SENTENCEPIECE,
            r"is no tokenizer\.json; models of SentencePiece and ranks of tiktoken are not",
        ),
        ("pointer.model", POINTER, r"is a pointer of git-lfs in place of the file: run `git lfs pull`"),
        ("pointer.json", POINTER, r"is a pointer of git-lfs in place of the file: run `git lfs pull`"),
        ("broken.model", b"not a tokenizer", r"broken\.model"),
        ("broken.json", b"not a tokenizer", r"broken\.json"),
        *((config, content, unreadable) for content in (b'{"eos_token": ', b"[1]", b'{"eos_token": {"id": 1}}')),
    ):
        json_file.with_name(written).write_bytes(content)
        load_tokenizer.cache_clear()
        with pytest.raises(DataError, match=message):
            load_tokenizer(str(json_file if written == config else json_file.with_name(written)))
    with pytest.raises(DataError, match=r"is a folder: name the tokenizer file in it"):
        load_tokenizer(str(json_file.parent))
    json_file.with_name(config).write_text('{"cls_token": 5, "pad_token": [1]}')  # of no use here
    load_tokenizer.cache_clear()
    load_tokenizer(str(json_file))
    with pytest.raises(DataError, match="there is no file 'nowhere'"):
        load_tokenizer("nowhere")
